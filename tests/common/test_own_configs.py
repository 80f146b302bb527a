"""Models that keep settings of their own under `.config`, as nanoGPT and LitGPT do: nothing there is transformers'."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh_toys import mesh_of
from slow_cases import marked
from torch import nn
from torch.nn import functional as F

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.execute.random_streams import may_draw


@dataclass
class Settings:
    vocab_size: int = 48
    n_embd: int = 32
    n_head: int = 4
    n_layer: int = 2
    dropout: float = 0.0


class Attention(nn.Module):
    def __init__(self, said: Settings, config: Any) -> None:
        super().__init__()
        self.config, self.n_head, self.n_embd = config, said.n_head, said.n_embd
        self.c_attn = nn.Linear(said.n_embd, 3 * said.n_embd)
        self.c_proj = nn.Linear(said.n_embd, said.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        heads = (batch, length, self.n_head, width // self.n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(self.n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, said: Settings, config: Any) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(said.n_embd), Attention(said, config)
        self.ln_2 = nn.LayerNorm(said.n_embd)
        self.c_fc, self.c_proj = nn.Linear(said.n_embd, 4 * said.n_embd), nn.Linear(4 * said.n_embd, said.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class Gpt(nn.Module):
    """nanoGPT's shape; its parts read `said`, whatever kind of config they keep."""

    def __init__(self, keep: Callable[[Settings], Any]) -> None:
        super().__init__()
        said = Settings()
        self.config = keep(said)
        self.wte = nn.Embedding(said.vocab_size, said.n_embd)
        self.h = nn.ModuleList(Block(said, self.config) for _ in range(said.n_layer))
        self.ln_f = nn.LayerNorm(said.n_embd)
        self.lm_head = nn.Linear(said.n_embd, said.vocab_size, bias=False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


KINDS: dict[str, Callable[[Settings], Any]] = {
    "dataclass": lambda said: said,
    "dict": asdict,
    "SimpleNamespace": lambda said: SimpleNamespace(**asdict(said)),
    "argparse": lambda said: Namespace(**asdict(said)),
    "None": lambda said: None,
}


def built(kind: str) -> Gpt:
    torch.manual_seed(0)
    return Gpt(KINDS[kind]).double()


@pytest.mark.parametrize("kind", marked(KINDS, slow=["dict", "SimpleNamespace", "argparse"]))
def test_settings_of_ones_own_are_no_transformers_config(kind: str) -> None:
    whole = built(kind)
    plan = autoplan.plan(whole, 2)
    assert plan.proof.ok and "colwise" in {entry.style for entry in plan.entries}, plan.findings
    assert autoplan.verify(built(kind), tp_size=2).ok
    assert [len(stack.fqns) for stack in autoplan.layers(built(kind))] == [2]

    ids = torch.arange(12).view(2, 6)

    def rank_body(rank: int) -> torch.Tensor:
        model = autoplan.parallelize(copy.deepcopy(whole), mesh_of(tp=2), plan, gather_logits=True)
        return model(ids).detach()

    for logits in run_ranks(rank_body, 2):
        torch.testing.assert_close(logits, whole(ids).detach())


@pytest.mark.parametrize("kind", ["dataclass", "dict", "SimpleNamespace", "argparse"])
def test_a_rate_is_seen_in_any_kind_of_config(kind: str) -> None:
    """nanoGPT reads `self.config.dropout` in its forward: no module of it says that numbers are drawn."""
    model = built(kind)
    assert not may_draw(model)
    model.config = KINDS[kind](Settings(dropout=0.1))
    assert may_draw(model)


def test_transformers_plans_and_a_config_with_parts_named_by_numbers() -> None:
    model = built("dict")
    model.config = {"layers": {0: {"dropout": 0.0}}}
    assert not may_draw(model)
    with pytest.raises(autoplan.AutoplanError, match="no transformers plan"):
        autoplan.plan(model, 2, source="hf")
