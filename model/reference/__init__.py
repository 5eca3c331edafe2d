"""The reference: slow, obvious, right."""
