"""What a record of an op is made of, and what a rule about dims gets to see.

In: nothing. Out: the classes and tables that the families of ops (one folder up) fill. May import: what ops may.
"""
