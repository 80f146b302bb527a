"""analyse.traffic."""
