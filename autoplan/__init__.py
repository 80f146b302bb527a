"""autoplan reads a model it has never seen and writes the plan that parallelises it."""
