"""emit.tables."""
