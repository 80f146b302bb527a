"""execute.randomness."""
