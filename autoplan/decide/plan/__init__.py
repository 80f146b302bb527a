"""decide.plan."""
