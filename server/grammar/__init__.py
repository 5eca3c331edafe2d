"""Forms that answers keep to."""
