"""How good it is on its own data, and what it looks at."""
