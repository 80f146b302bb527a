"""NeMo-RL#1835: the norms take a part of the sequence, and what they feed computes positions for all of it."""

import autoplan
from corpus.case import Case, Setting
from corpus.toys import GOOD, decoder, said


def known_consumers(module):
    return autoplan.plan(module, tp_size=2, sequence_parallel=True, prove="none")


CASE = Case(
    25, "NeMo-RL#1835", "a sequence cut that its readers do not know of", "sequence",
    bad=Setting(decoder, said({**GOOD, "layers.*.input_norm": "sequence_parallel"})),
    good=Setting(decoder, known_consumers),
    silent=False,
)  # fmt: skip
