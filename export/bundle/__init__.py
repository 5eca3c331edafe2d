"""The format that the server reads. It needs the standard library alone."""
