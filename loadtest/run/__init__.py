"""One load from its start to its report."""
