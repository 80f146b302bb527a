"""execute.calls."""
