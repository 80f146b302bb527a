"""Automodel#2589: one unknown style dropped the plan; the fallback named `mlp.*`, the model `feed_forward.*`."""

from torch import nn

from corpus.case import Case, Setting
from corpus.toys import ATTENTION, MLP, Attention, Decoder, Mlp, said


class HybridBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.feed_forward = Attention(), Mlp(256)

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.feed_forward(x)


def model():
    return Decoder([HybridBlock(), HybridBlock()])


CASE = Case(
    2, "Automodel#2589", "the plan covers a small part of the weights", "coverage",
    bad=Setting(model, said({**ATTENTION, **MLP})),
    good=Setting(model, said({**ATTENTION, **{key.replace("mlp", "feed_forward"): s for key, s in MLP.items()}})),
)  # fmt: skip
