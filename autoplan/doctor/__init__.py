"""The internals of torch and transformers that autoplan relies on, checked against the installed versions.

Three tables are compared with the installed libraries: temporary patches (patches/), undocumented names (private_*.py
here), and public names of transformers (hf/names.py). Each entry of the first two has a canary.

In: nothing. Out: a Diagnosis. May import: patches, hf, common.
"""
