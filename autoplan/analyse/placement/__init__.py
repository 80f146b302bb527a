"""analyse.placement."""
