"""A network and a run on disk, whole or absent."""
