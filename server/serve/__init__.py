"""`quill serve`: start, drain, stop."""
