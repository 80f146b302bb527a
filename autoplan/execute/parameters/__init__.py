"""execute.parameters."""
