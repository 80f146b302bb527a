"""torchtune#2420: modules outside the plan stay plain tensors; clipping and foreach optimizers refuse the mixture."""

from corpus.case import Case, Setting
from corpus.toys import ATTENTION, MLP, decoder, inferred, torch_styles

CASE = Case(
    16, "torchtune#2420", "Tensor and DTensor parameters side by side", "mixed-parameters",
    bad=Setting(decoder, torch_styles({**ATTENTION, **MLP})),
    good=Setting(decoder, inferred),
    silent=False,
)  # fmt: skip
