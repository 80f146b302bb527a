"""No forward asks other ranks or the device for a seed: streams are shared when a plan is applied, and go on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_cases import marked
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.check.ranks.run import count_collectives, run_ranks
from autoplan.execute import random_streams as streams
from autoplan.execute.collectives import RankGroup
from autoplan.execute.random_streams import SharedRandomness
from autoplan.hf.source import resolve

WIDTH = 16
_ATEN = torch.ops.aten


class Noisy(nn.Module):
    """Draws whether it trains or not."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.randn(x.shape, dtype=x.dtype)
        return x + self.fall(torch.tanh(self.rise(x)))


class Dropped(Noisy):
    """Draws of a whole value, then of a share, then of a whole value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.5, self.training)
        inner = nn.functional.dropout(torch.tanh(self.rise(x)), 0.5, self.training)
        return nn.functional.dropout(self.fall(inner), 0.5, self.training)


class _Reads(TorchDispatchMode):
    """Counts what waits for a device: numbers read out of tensors, and tensors made of numbers of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (_ATEN._local_scalar_dense.default, _ATEN.lift_fresh.default)
        return func(*args, **(kwargs or {}))


def _model(build: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def _llama(rate: float) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64)
    heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, attention_dropout=rate)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="eager"))


def _sharded(model: nn.Module, plan: autoplan.Plan, **options: Any) -> nn.Module:
    return autoplan.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan, **options)


def _on_two_ranks(function: Callable[[int], Any]) -> list[Any]:
    return run_ranks(function, 2)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_training_forward_asks_nobody(rate: float) -> None:
    ids = torch.arange(12).view(2, 6)
    plan = autoplan.plan(_llama(rate), 2, prove="none")
    models = [_llama(rate) for _ in range(2)]
    alone = _llama(rate).train()
    alone(input_ids=ids, use_cache=False)
    with _Reads() as unsharded:
        alone(input_ids=ids, use_cache=False)

    def step(rank: int) -> tuple[int, int]:
        model = _sharded(models[rank], plan).train()
        torch.manual_seed(rank)
        model(input_ids=ids, use_cache=False)  # seeded anew: shared once more
        with count_collectives() as seen, _Reads() as reads:
            model(input_ids=ids, use_cache=False)
        return sum(seen.values()), reads.count

    planned = 2 * 2 + 1  # sums of attention and MLP in each block, and of the token table
    assert _on_two_ranks(step) == [(planned, unsharded.count)] * 2


@pytest.mark.parametrize(
    "kind", marked(["gpt2", "deepseek_v3", "bamba", "t5", "qwen3_next", "gpt_oss"], long=["qwen3_next"], slow=["bamba"])
)
def test_no_step_waits_for_the_host(kind: str) -> None:
    """Biases that are added once, gradients that are scaled, rows that are taken: all is made where it is needed."""
    tiny = resolve(kind).tiny()
    ids = torch.arange(1, 13).view(2, 6)
    given: dict[str, Any] = dict(input_ids=ids, use_cache=False) | ({"decoder_input_ids": ids} if kind == "t5" else {})
    plan = autoplan.plan(copy.deepcopy(tiny), 2, prove="none")
    models = [copy.deepcopy(tiny) for _ in range(2)]

    def read(model: nn.Module) -> int:
        model(**given).logits.sum().backward()
        with _Reads() as reads:
            model(**given).logits.sum().backward()
        return reads.count

    assert _on_two_ranks(lambda rank: read(_sharded(models[rank], plan))) == [read(tiny)] * 2


@pytest.mark.parametrize("again", [False, True])
def test_what_draws_in_eval_mode_draws_as_unsharded(again: bool) -> None:
    """Under one seed: of before the plan was applied, or of after; for several forwards."""
    x = torch.randn(2, 6, WIDTH)
    plan = autoplan.plan(Noisy(), 2, inputs={"x": x}, prove="none")
    alone, models = _model(Noisy).eval(), [_model(Noisy).eval() for _ in range(2)]
    with streams.fork(7):
        wanted = [alone(x) for _ in range(3)]

    def forwards(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(70 if again else 7 + rank)
        model = _sharded(models[rank], plan)
        if again:
            model(x)
            torch.manual_seed(7 + rank)
        return [model(x).detach() for _ in range(3)]

    for seen in _on_two_ranks(forwards):
        torch.testing.assert_close(seen, [one.detach() for one in wanted])


def test_streams_go_on_and_ranks_draw_apart_only_of_shares() -> None:
    x = torch.randn(2, 6, WIDTH)
    plan = autoplan.plan(Dropped(), 2, inputs={"x": x}, prove="none")
    models = [_model(Dropped).train() for _ in range(2)]

    def forwards(rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(rank)
        model = _sharded(models[rank], plan)
        seen = [model(x).detach() for _ in range(2)]
        return seen, torch.rand(3)

    (first, mine), (second, other) = _on_two_ranks(forwards)
    torch.testing.assert_close(first, second)
    assert not torch.equal(first[0], first[1])  # the second forward goes on
    assert not torch.equal(mine, other)  # ranks keep streams of their own outside
    with streams.fork(1):
        assert torch.equal(other, torch.rand(3))  # which the model does not move where it draws from another


def test_two_models_share_one_seed_without_asking_in_turns() -> None:
    x = torch.randn(2, 6, WIDTH)
    plan = autoplan.plan(Noisy(), 2, inputs={"x": x}, prove="none")
    models = [[_model(Noisy) for _ in range(2)] for _ in range(2)]

    def step(rank: int) -> int:
        pair = [_sharded(model, plan, path_guard="off") for model in models[rank]]  # its votes are collectives too
        torch.manual_seed(rank)
        for model in pair:
            model(x)
        with count_collectives() as seen:
            for model in pair * 2:
                model(x)
        return sum(seen.values())

    assert _on_two_ranks(step) == [4, 4]


@pytest.mark.parametrize("mode", [FakeTensorMode(), torch.device("meta")])
def test_tensors_without_values_draw_too(mode: Any) -> None:
    def forward(rank: int) -> list[float]:
        group = RankGroup.of(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
        shared = SharedRandomness(group, torch.device("meta" if isinstance(mode, torch.device) else "cpu"))
        torch.manual_seed(5)
        with mode:
            for _ in range(2):
                shared.begin()
                shared.enter_split()
                assert tuple(torch.rand(3).shape) == (3,)
                shared.leave_split()
                shared.end()
            torch.manual_seed(5)
            shared.begin()
        return torch.rand(3).tolist()

    with streams.fork(5):
        wanted = torch.rand(3).tolist()
    assert _on_two_ranks(forward) == [wanted] * 2
