"""Models in other projects' formats."""
