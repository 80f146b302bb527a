"""Proofs: simulated ranks, verification of a sharded model, the permutation law, graph replay, audits, scoreboards.

In: a source or a plan. Out: a Report, a Proof, a Scoreboard. May import: all rooms below.
"""
