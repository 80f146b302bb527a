"""execute.hooks."""
