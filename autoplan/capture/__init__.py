"""Record one run of a model: fold it, feed it, write down what it does.

In: a module and example inputs. Out: a Trace of plain data. May import: values, common, patches, ops.
"""
