"""Context parallelism: the form of a boundary is a matter of price, and the tiny clone has the forms of its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoplan
from autoplan.check.verify.derived import gathered_in
from autoplan.common.options import Wish
from autoplan.common.patterns import like_modules
from autoplan.hf.source import resolve
from autoplan.planning import capture_source, draft_plan, wanted_capabilities
from autoplan.values import (
    AllGatherSequence,
    AllGatherSequenceSumGradient,
    ExchangeToPieces,
    ExchangeToPositions,
    Plan,
    ReduceScatterSequence,
)

HEADS, WIDTH = 8, 16


class Mixer(nn.Module):
    """Attention, `wide` times as wide as the stream, behind a latent if there is one."""

    def __init__(self, wide: int, latent: int = 0) -> None:
        super().__init__()
        inner = wide * WIDTH
        self.down = nn.Sequential(nn.Linear(WIDTH, latent), nn.LayerNorm(latent)) if latent else nn.Identity()
        self.q, self.k, self.v = (nn.Linear(latent or WIDTH, inner) for _ in range(3))
        self.o = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Decoder(nn.Module):
    def __init__(self, mixer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(mixer(index)) for index in range(4))
        self.head = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


INPUTS = {"ids": torch.arange(32).view(2, 16) % 64}
GATHERS = (AllGatherSequence, AllGatherSequenceSumGradient)


def at(plan: Plan, *kinds: type) -> set[str]:
    return {
        instruction.pattern
        for kind in kinds
        for instruction in plan.runtime.of(kind)
        if "blocks" in instruction.pattern
    }


@pytest.mark.parametrize(
    ("wide", "latent", "cp", "gathered", "summed"),
    [
        (1, 0, 2, set(), set()),  # 3/2 of a width of the stream against one: no rank holds the stream
        (2, 0, 2, {"blocks.*.norm"}, set()),  # 3 against one
        (2, 0, 4, set(), set()),
        (6, 0, 2, {"blocks.*.norm"}, {"blocks.*.mixer.o"}),
        (1, 4, 2, {"blocks.*.mixer.down"}, set()),  # the latent is narrower than all that is made of it
    ],
)
def test_forms_are_a_matter_of_price(wide: int, latent: int, cp: int, gathered: set[str], summed: set[str]) -> None:
    plan = autoplan.plan(Decoder(lambda _: Mixer(wide, latent)), cp_size=cp, inputs=INPUTS)
    assert plan.proof is not None and plan.proof.ok and plan.proof.trial.outcome == "passed"
    assert {name.removesuffix(".1") for name in at(plan, *GATHERS)} == gathered
    assert at(plan, ReduceScatterSequence) == summed
    assert bool(at(plan, ExchangeToPieces)) != bool(gathered)
    assert bool(at(plan, ExchangeToPositions)) != bool(summed)
    assert all(block.moved >= block.least > 0 for block in plan.communication)
    assert autoplan.verify(Decoder(lambda _: Mixer(wide, latent)), plan, inputs=INPUTS).ok


def test_blocks_of_two_kinds_have_each_their_form() -> None:
    model = Decoder(lambda index: Mixer(2) if index % 2 else nn.Sequential(Mixer(1)))
    plan = autoplan.plan(model, cp_size=2, inputs=INPUTS)
    assert plan.proof is not None and plan.proof.ok
    assert at(plan, *GATHERS) == {"blocks.1.norm", "blocks.3.norm"}
    assert at(plan, ExchangeToPieces) == {f"blocks.*.mixer.0.{name}" for name in "qkv"}


def test_beside_tensor_parallelism_a_rank_gathers_less_often() -> None:
    plan = autoplan.plan(Decoder(lambda _: Mixer(2)), tp_size=2, cp_size=2, inputs=INPUTS)
    assert plan.proof is not None and plan.proof.ok and plan.proof.trial.outcome == "passed"
    assert not at(plan, *GATHERS) and at(plan, ExchangeToPieces)


@pytest.mark.parametrize("cp", [2, 8])
def test_a_clone_gathers_where_its_model_does(cp: int) -> None:
    source = resolve("qwen3_next")
    plan = draft_plan(source, Wish(1, cp_size=cp)).plan
    gathered = gathered_in(plan, source.module())
    assert gathered is not None
    clone = resolve(replace(source, ranks=(2, 2)).tiny())
    capabilities = replace(wanted_capabilities(Wish(1, cp_size=2)), gathered=gathered)
    derived = draft_plan(clone, Wish(1, cp_size=2), capabilities=capabilities).plan

    def inside(plan: Plan) -> set[str]:
        return {each.pattern.rpartition(".")[2] for kind in GATHERS for each in plan.runtime.of(kind)}

    assert inside(derived) == inside(plan) == ({"", "input_layernorm"} if cp == 2 else {""})


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt_oss", "nemotron_h", "deepseek_v3"])
@pytest.mark.parametrize("cp", [2, 8])
def test_an_exchange_moves_at_most_twice_as_much(kind: str, cp: int) -> None:
    source = resolve(kind)
    module, wish = source.module(), Wish(1, cp_size=cp)
    captured = capture_source(source, module)
    names = like_modules({name: type(m).__name__ for name, m in module.named_modules(remove_duplicate=False)})
    everywhere = tuple(product(names.values(), ("input", "output")))

    def moved(gathered: tuple[tuple[str, str], ...] | None) -> int:
        how = replace(wanted_capabilities(wish), gathered=gathered)
        plan = draft_plan(source, wish, capabilities=how, module=module, captured=captured).plan
        return sum(size for t in plan.communication for way in (t.forward, t.backward) for _, size in way.values())

    chosen, *others = moved(None), moved(()), moved(everywhere)
    assert chosen <= 2 * min(others)
    assert chosen < max(others)
