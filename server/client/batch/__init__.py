"""Many requests from a file, or from rows of somebody else's pipeline."""
