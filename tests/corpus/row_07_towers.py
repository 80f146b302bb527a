"""accelerate#4145, Automodel#2763: one stack is known, and the tower falls into the root FSDP unit."""

import torch
from torch import nn

from corpus.case import Case, Setting
from corpus.toys import WIDTH, Attention, Block, Decoder, Mlp, inferred


class VisionBlock(Block):
    pass


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(VisionBlock(Attention(), Mlp(64)) for _ in range(3))

    def forward(self, pixels):
        for block in self.blocks:
            pixels = block(pixels)
        return pixels


class Multimodal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = Tower()
        self.language_model = Decoder([Block(Attention(), Mlp()) for _ in range(2)])

    def forward(self, input_ids, pixels):
        seen = self.vision_tower(pixels).mean(dim=1, keepdim=True)
        x = self.language_model.embed(input_ids) + seen
        for layer in self.language_model.layers:
            x = layer(x)
        return self.language_model.head(self.language_model.norm(x))


INPUTS = {"input_ids": torch.arange(10).reshape(2, 5), "pixels": torch.randn(2, 7, WIDTH)}
CASE = Case(
    7, "accelerate#4145, Automodel#2763", "the vision tower is in nobody's unit", "layers",
    bad=Setting(Multimodal, inferred, options={"inputs": INPUTS, "layers": {"fsdp": ["language_model.layers.*"]}}),
    good=Setting(Multimodal, inferred, options={"inputs": INPUTS, "layers": {"fsdp": ["Block", "VisionBlock"]}}),
)  # fmt: skip
