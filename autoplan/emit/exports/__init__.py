"""Exports of a plan to other systems.

In: a Plan. Out: text for a file, or an error that names what the system cannot express. May import: what emit may.
"""
