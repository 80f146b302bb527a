"""analyse.picture."""
