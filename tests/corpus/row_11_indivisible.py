"""transformers#47811: features divide by tp, key/value heads do not."""

from functools import partial

from corpus.case import Case, Setting
from corpus.toys import GOOD, Attention, decoder, said


def model(heads: int):
    return decoder(partial(Attention, heads=heads, kv_heads=heads))


CASE = Case(
    11, "transformers#47811", "3 heads of 8 features: 24 divides by 2, 3 does not", "units",
    bad=Setting(partial(model, 3), said(GOOD)),
    good=Setting(partial(model, 4), said(GOOD)),
    silent=False,
)  # fmt: skip
