"""vllm#22673, Automodel#1861: a text plan lacks the prefix that the multimodal model puts before it."""

from torch import nn

from corpus.case import Case, Setting
from corpus.toys import GOOD, WIDTH, decoder, said


class Multimodal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.language_model = decoder()
        self.projector = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids):
        return self.language_model(input_ids)


CASE = Case(
    20, "vllm#22673, Automodel#1861", "keys relative to a submodule", "prefixes",
    bad=Setting(Multimodal, said(GOOD)),
    good=Setting(Multimodal, said({f"language_model.{key}": style for key, style in GOOD.items()})),
)  # fmt: skip
