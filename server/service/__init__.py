"""The calls themselves, whichever door they come through."""
