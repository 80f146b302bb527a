"""Tiny models that need one class of instruction each, with the plan that has it: where faults can be planted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autoplan.analyse.splits.experts import solve_experts
from autoplan.capture.capture import capture_real
from autoplan.common.random_values import randomise
from autoplan.hf.inputs.make import make_inputs
from autoplan.values import Plan

__all__ = ["TOYS", "Subject", "toy_for"]

Subject = tuple[nn.Module, dict[str, Any], Plan]
X = torch.linspace(-1, 1, 2 * 6 * 16, dtype=torch.float64).view(2, 6, 16)
IDS = torch.arange(12).view(2, 6) % 7
VOCABULARY = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPTJ = {**VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}


class Between(nn.Module):
    """Something done to features that are split."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], inner: int = 32, outer: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, inner, bias=False), nn.Linear(outer, 16, bias=False)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(x).relu()))


class MeanTaken(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.mean(-1, keepdim=True)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanTaken()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h - self.mean(h)


class OwnTable(nn.Module):
    """A table without a module of its own, looked up and multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(F.embedding(ids, self.table).tanh(), self.table)


class Gated(nn.Module):
    """Two split MLPs and a whole gate read one value: one sum serves all, and the gate's gradient is divided for it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.gate = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 3)
        self.one, self.two = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        y = self.norm(x)
        weights = self.gate(y).softmax(-1)
        return x + self.one(y) * weights[..., :1] + self.two(y) * weights[..., 1:2]


class OneRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) + self.table.weight[3].tanh()


class OwnProduct(nn.Module):
    """A product that only gathering can cut, of a weight without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight).softmax(-1)


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sort(-1).values


class HalfSplit(nn.Module):
    """One half of what a projection makes is split, the other is added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, beside = self.up(x).chunk(2, -1)
        return x + self.down(inner.relu()) + beside


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class StoredHeads(nn.Module):
    """Attention over as many heads as an attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            one(x).view(batch, length, self.heads, -1).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        mixed = (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5).softmax(-1) @ value
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Dropped(nn.Module):
    """Dropout on split and on whole values in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.dropout(self.up(x).relu(), 0.3, self.training)
        return F.dropout(self.down(inner), 0.3, self.training)


class Recurrent(nn.Module):
    """A recurrent network as one call, or step by step."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.inner, nn.RNNBase):
            return self.inner(x)[0]
        state, states = None, []
        for step in x.unbind(1):
            state = self.inner(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, 1)


class OwnWeights(nn.Module):
    """Two blocks that have their weights, and all of their code, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(40, 16), nn.ModuleList(OwnWeightsBlock() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return x


class OwnWeightsBlock(nn.Module):
    centred = False  # whether it also takes away the mean over all positions

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(16), nn.Parameter(torch.randn(16, 4, 4))
        self.out = nn.Parameter(torch.randn(4, 4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = torch.einsum("btd,dhk->bhtk", self.norm(x), self.mixed)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mixed = (heads @ heads.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ heads
        x = x + torch.einsum("bhtk,hkd->btd", mixed, self.out)
        return x - x.mean(1, keepdim=True) if self.centred else x


def centred(model: OwnWeights) -> OwnWeights:
    for block in model.blocks:
        block.centred = True
    return model


def toy(model: nn.Module, given: torch.Tensor = X, **how: Any) -> Subject:
    model = model.double().eval()
    feeds = {"forward": {"x" if given is X else "ids": given}}
    return model, feeds, _planned(model, feeds, **how)


def decoder(model_type: str, sizes: dict[str, Any], blocks: Iterable[str] = (), **how: Any) -> Subject:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **sizes)
    model = AutoModelForCausalLM.from_config(config, **how.pop("build", {})).double().eval()
    randomise(model)
    feeds = make_inputs(model, config=config, model_type=model_type).feeds
    if blocks:
        how["sequence_stacks"] = (tuple(blocks),)
    return model, feeds, _planned(model, feeds, **how)


def _planned(model: nn.Module, feeds: dict[str, Any], **how: Any) -> Plan:
    solution = solve_experts(capture_real(copy.deepcopy(model), feeds).trace, 2, **how)
    sizes = {"tp_size": 1, "cp_size": 2} if how.get("context") else {"tp_size": 2}
    return Plan(model="toy", runtime=solution.runtime, ep_size=2 if how.get("experts") else 1, **sizes)


LLAMA = {
    **VOCABULARY, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}

RWKV = {**VOCABULARY, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2}

TOYS: dict[str, Callable[[], Subject]] = {
    "sum": lambda: toy(Between(lambda h: h * torch.sigmoid(h.sum(-1, keepdim=True)))),
    "mean": lambda: toy(Between(lambda h: h * torch.sigmoid(h.mean(-1, keepdim=True)))),
    "mean in a module": lambda: toy(Between(Centred())),
    "norm": lambda: toy(Between(nn.LayerNorm(32))),
    "variance": lambda: toy(Between(lambda h: h / (1 + h.var(-1, keepdim=True)))),
    "length": lambda: toy(Between(lambda h: F.normalize(h, dim=-1))),
    "constant": lambda: toy(Between(lambda h: h * torch.arange(32).to(h))),
    "own table": lambda: toy(OwnTable(), IDS),
    "one row": lambda: toy(OneRow(), IDS),
    "gated": lambda: toy(Gated(), IDS),
    "own product": lambda: toy(OwnProduct()),
    "sorted": lambda: toy(Sorted()),
    "half split": lambda: toy(HalfSplit()),
    "attention": lambda: toy(Attention()),
    "stored heads": lambda: toy(StoredHeads()),
    "dropped": lambda: toy(Dropped()),
    "recurrent": lambda: toy(Recurrent(nn.LSTM(16, 24, batch_first=True))),
    "recurrent cell": lambda: toy(Recurrent(nn.LSTMCell(16, 24))),
    "branches": lambda: decoder("gptj", GPTJ),
    "sequence": lambda: decoder("gptj", GPTJ, ["transformer.h.0", "transformer.h.1"]),
    "context": lambda: decoder("llama", LLAMA, ["model.layers.0", "model.layers.1"], context=True),
    "own queries": lambda: decoder(
        "llama",
        {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3},
        ["model.layers.0", "model.layers.1"],
        context=True,
    ),
    "own weights": lambda: toy(OwnWeights(), IDS, sequence_stacks=(("blocks.0", "blocks.1"),)),
    "all positions": lambda: toy(centred(OwnWeights()), IDS, sequence_stacks=(("blocks.0", "blocks.1"),), context=True),
    "halo": lambda: decoder("rwkv", RWKV, ["rwkv.blocks.0", "rwkv.blocks.1"], context=True),
    "experts": lambda: decoder("mixtral", MIXTRAL, experts="apart", build={"experts_implementation": "eager"}),
}


@cache
def subject(name: str) -> Subject:
    torch.manual_seed(0)
    return TOYS[name]()


def toy_for(has_place: Callable[[Plan], bool]) -> Subject | None:
    """The first toy in whose plan a fault has a place."""
    return next((found for name in TOYS if has_place((found := subject(name))[2])), None)
