"""execute.vocabulary."""
