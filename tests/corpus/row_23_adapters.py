"""peft#3044, #3079: under adapters `q_proj` became `q_proj.base_layer`, and the plan reaches no weight."""

from torch import nn

from corpus.case import Case, Setting
from corpus.toys import GOOD, Attention, decoder, inferred, said


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class AdaptedAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = Lora(self.q_proj), Lora(self.v_proj)


def model():
    return decoder(AdaptedAttention)


CASE = Case(
    23, "peft#3044, #3079", "adapters are not in the plan", "adapters",
    bad=Setting(model, said(GOOD)),
    good=Setting(model, inferred),
    silent=False,
)  # fmt: skip
