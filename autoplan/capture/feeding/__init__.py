"""Find inputs for an unfamiliar forward by trying: from its signature, its consumers and its failures.

In: a module. Out: a recipe, from which calls of several sizes are drawn, and the trail of the search. May import: what
capture may.
"""
