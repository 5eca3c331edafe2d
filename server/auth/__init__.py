"""Who calls, and how often it may."""
