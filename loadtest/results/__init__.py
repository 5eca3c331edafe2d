"""Numbers, pictures, verdicts."""
