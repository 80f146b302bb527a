"""Pages: a plan, an audit, a choice, an estimate as one HTML file that needs no network and no script.

In: values. Out: text of a page. May import: what emit may. All positions are computed here (drawing.py), so that a test
can check that nothing overlaps; text from a model goes through markup.py, which escapes it.
"""
