"""analyse.splits."""
