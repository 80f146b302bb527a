"""analyse.sequence."""
