"""execute.data_parallel."""
