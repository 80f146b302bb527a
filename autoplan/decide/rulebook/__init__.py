"""decide.rulebook."""
