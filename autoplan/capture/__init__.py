"""One run of a model, written down: folded, fed, recorded.

In: a module and example inputs. Out: a Trace of plain data. May import: values, common, patches, ops.
"""
