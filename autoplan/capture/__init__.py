"""From a model to a trace: find it, fold it, feed it, record it."""
