"""axolotl#2999: one parameter with two entries is sharded twice and untied without a word."""

from functools import partial

from corpus.case import Case, Setting
from corpus.toys import ATTENTION, GOOD, TABLES, decoder, said, torch_styles

model = partial(decoder, tied=True)
CASE = Case(
    18, "axolotl#2999", "tied embeddings become two parameters", "tied",
    bad=Setting(model, torch_styles({**ATTENTION, **TABLES})),
    good=Setting(model, said(GOOD)),
)  # fmt: skip
