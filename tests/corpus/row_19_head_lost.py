"""transformers#47253: the line of `lm_head` was lost on the way from the class to the instance."""

from corpus.case import Case, Setting
from corpus.toys import GOOD, decoder, inferred, said

CASE = Case(
    19, "transformers#47253", "the head is replicated", "heads-gather",
    bad=Setting(decoder, said({key: style for key, style in GOOD.items() if key != "head"})),
    good=Setting(decoder, inferred),
)  # fmt: skip
