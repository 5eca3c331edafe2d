"""The engine in a process of its own: what crosses between it and the frontends."""
