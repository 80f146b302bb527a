"""execute.checkpointing."""
