"""Which integers stand for a matrix, and in which layout."""
