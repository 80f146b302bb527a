"""NeMo-RL#1227: results differ with tp. Is it a bug, or bfloat16 adding in another order?"""

from corpus.case import Case, Setting
from corpus.toys import ATTENTION, GOOD, TABLES, FusedMlp, decoder, said

SCRAMBLED = {"layers.*.mlp.gate_up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}


def fused():
    return decoder(mlp=FusedMlp)


CASE = Case(
    24, "NeMo-RL#1227", "a difference that is no rounding", "rounding",
    bad=Setting(fused, said({**TABLES, **ATTENTION, **SCRAMBLED}), options={"dtype": "bfloat16"}),
    good=Setting(decoder, said(GOOD), options={"dtype": "bfloat16"}),
)  # fmt: skip
