"""Other people's weights."""
