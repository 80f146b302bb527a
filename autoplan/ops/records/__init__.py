"""The classes that records of ops are made of, and the view that a dim rule gets of an op.

In: nothing. Out: the classes and tables that the families of ops (one folder up) fill. May import: what ops may.
"""
