"""The format that the server reads. It imports only the standard library."""
