"""Plain torch models and tiny transformers clones for the tests of meshes, with the plans they need; made once."""

from __future__ import annotations

import copy
import logging
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoplan.check.verify.clone import Clone, clone_of
from autoplan.common.options import Wish
from autoplan.hf.source import resolve
from autoplan.hf.stacks import layers
from autoplan.planning import draft_plan
from autoplan.values import Plan

# DTensor says on every gather over two mesh dims that it takes two steps
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

WIDTH = 8


class Part(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(torch.nn.functional.gelu(self.up(x))))


class Block(nn.Module):
    runs = 0

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), Part(dropout), Part()

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        self.runs += 1
        if cache is not None:
            cache.update(x)
        return x + self.second(self.first(self.norm(x)))


class Deep(nn.Module):
    """A table, blocks, a head; `use_cache` as transformers' models have it."""

    def __init__(self, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, ids: torch.Tensor, use_cache: bool | None = True) -> torch.Tensor:
        cache = Cache() if use_cache else None
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, cache)
        self.cache = cache
        return self.head(x)


class Cache:
    """Like those of keys and values: grows with each call."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def update(self, x: torch.Tensor) -> None:
        self.seen.append(x.detach())


def deep(**options: Any) -> Deep:
    torch.manual_seed(0)
    return Deep(**options).double()


def ids(batch: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(16, (batch, length), generator=torch.Generator().manual_seed(batch))


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def layers_only(model: nn.Module) -> Plan:
    return Plan("toy", 1, layers=layers(model))


@cache
def clone(kind: str) -> Clone:
    """The tiny clone of a model type; never changed: take `model_of`."""
    return clone_of(resolve(kind))


def model_of(kind: str) -> Any:
    return copy.deepcopy(clone(kind).model)


@cache
def plan_of(kind: str, tp: int) -> Plan:
    made = clone(kind)
    if tp == 1:
        return Plan(kind, 1, layers=layers(made.model))
    return draft_plan(resolve(copy.deepcopy(made.model), inputs=dict(made.feeds)), Wish(tp)).plan
