"""check.replay."""
