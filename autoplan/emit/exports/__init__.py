"""emit.exports."""
