"""Automodel#1519: the heads were halved although the plan left the fused projection whole."""

from dataclasses import replace

import autoplan
from autoplan.values import IntegerEdit
from corpus.case import Case, Setting
from corpus.toys import FusedAttention, decoder


def model():
    return decoder(FusedAttention)


def mlp_only(module):
    names = {"layers.*.mlp.w1": "colwise", "layers.*.mlp.w3": "colwise", "layers.*.mlp.w2": "rowwise"}
    return autoplan.plan(module, tp_size=2, source=names, prove="none")


def halved(module):
    plan = mlp_only(module)
    edit = IntegerEdit("layers.*.attn", "num_heads", None, 4, 2)
    return replace(plan, runtime=replace(plan.runtime, instructions=(*plan.runtime.instructions, edit)))


CASE = Case(
    10, "Automodel#1519", "heads halved, projection whole", "head-counts",
    bad=Setting(model, halved),
    good=Setting(model, mlp_only),
    silent=False,
)  # fmt: skip
