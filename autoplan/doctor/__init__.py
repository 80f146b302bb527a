"""What autoplan rests on in torch and transformers, and whether the installed versions still have it.

Three tables are held against the installed libraries: what is replaced for a while (patches/), undocumented
names (private_*.py here), and public names of transformers (hf/names.py). Each entry of the first two has a canary.

In: nothing. Out: a Diagnosis. May import: patches, hf, common.
"""
