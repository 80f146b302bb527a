"""Pages to look at: a plan, an audit, a choice, an estimate as one HTML file that needs no network and no script.

In: values. Out: text of a page. May import: what emit may. Where everything stands is computed here (drawing.py), so
that a test can say that nothing overlaps; whatever comes from a model goes through markup.py, which escapes it.
"""
