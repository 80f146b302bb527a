"""transformers#42016: digits in `w1/w2/w3` were rewritten to `*`, no key matched, and no expert was sharded."""

from corpus.case import Case, Setting
from corpus.toys import ATTENTION, GOOD, TABLES, decoder, said

CASE = Case(
    1, "transformers#42016", "MLPs never sharded", "dead-keys",
    bad=Setting(decoder, said({**TABLES, **ATTENTION, "layers.*.mlp.w*": "colwise"})),
    good=Setting(decoder, said(GOOD)),
)  # fmt: skip
