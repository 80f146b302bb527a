"""execute.weights."""
