"""A small decoder over any mixer, for tests of how the sequence is cut around it."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Block(torch.nn.Module):
    def __init__(self, mixer: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = torch.nn.LayerNorm(16), mixer

    def forward(self, x: torch.Tensor, *more: torch.Tensor | None) -> torch.Tensor:
        made: torch.Tensor = x + self.mixer(self.norm(x), *more)
        return made


class Stack(torch.nn.Module):
    def __init__(self, mixer: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(30, 16), torch.nn.Linear(16, 30)
        self.blocks = torch.nn.ModuleList(Block(mixer()) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.run(input_ids)

    def run(self, input_ids: torch.Tensor, *more: torch.Tensor | None) -> torch.Tensor:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x, *more)
        made: torch.Tensor = self.head(x)
        return made
