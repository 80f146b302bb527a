"""Run a model on shards: what a plan says, done to a live module. Nothing in here decides anything."""
