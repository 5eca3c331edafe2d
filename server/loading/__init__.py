"""A bundle on disk becomes a running instance, and the next one takes over."""
