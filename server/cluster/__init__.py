"""Many replicas as one server, with Ray Serve: `quill cluster`."""
