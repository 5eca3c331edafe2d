"""The programs that are compared: one process each, some in the peers' environment."""
