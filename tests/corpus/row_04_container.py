"""Automodel#1927: layer discovery returned `[ModuleList]`: checkpointing was on in the config and off in reality."""

from corpus.case import Case, Setting
from corpus.toys import decoder, inferred

CASE = Case(
    4, "Automodel#1927, #1941", "checkpointing over a container", "layers",
    bad=Setting(decoder, inferred, options={"layers": {"checkpointing": lambda model: [model.layers]}}),
    good=Setting(decoder, inferred, options={"layers": {"checkpointing": lambda model: list(model.layers)}}),
)  # fmt: skip
