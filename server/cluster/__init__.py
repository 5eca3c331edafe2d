"""Several replicas behind one address, with Ray Serve and HAProxy: `quill cluster`."""
