"""check.ranks."""
