"""decide.matching."""
