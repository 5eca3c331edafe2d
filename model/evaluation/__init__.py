"""How good it is, how fast, and what it looks at."""
