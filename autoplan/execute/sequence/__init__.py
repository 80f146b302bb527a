"""execute.sequence."""
