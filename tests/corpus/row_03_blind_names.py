"""Automodel#2243: a llama plan applied blindly to an unknown architecture dies in an assert deep inside."""

from corpus.case import Case, Setting
from corpus.toys import ATTENTION, MLP, FusedAttention, decoder, inferred, torch_styles


def model():
    return decoder(FusedAttention)


CASE = Case(
    3, "Automodel#2243", "names of another architecture: o_proj matches, q, k and v do not", "pairing",
    bad=Setting(model, torch_styles({**ATTENTION, **MLP})),
    good=Setting(model, inferred),
    silent=False,
)  # fmt: skip
