"""Proofs: simulated ranks, verification of a sharded model, the permutation law, graph replay, planted faults."""
