"""Is what lies around the cuts right? Tables, heads, adapters, frozen and quantised weights, FSDP, clipping.

In: an Audited, and the findings before. Out: findings. May import: what check may.
"""
