"""check.verify."""
