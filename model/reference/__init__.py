"""The oracle: slow, obvious, right."""
