"""Everything that knows transformers: MODEL strings, tiny configs, names of fields and arguments, inputs by modality.

In: what the user pointed at. Out: a Source: the model, a tiny clone of it, and inputs for both. May import: values,
common, patches, ops, capture, analyse (its pictures).
"""
