"""Several servers at once: real ones that are measured, and many more that are simulated."""
