"""decide.written_plans."""
