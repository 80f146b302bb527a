"""What a plan says that a block moves is what real gloo ranks move in it: context parallelism, alone and beside tp."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_processes
from autoplan.common.patterns import matches
from autoplan.forecast.recording.record import Marks, record_step
from autoplan.forecast.recording.tape import Block, Message
from autoplan.forecast.sharded import group_names
from autoplan.forecast.step import loss_of
from autoplan.hf.source import resolve
from autoplan.values import Halo

BATCH = 2
LENGTHS = {"qwen3_next": 128}  # two of its chunks; 32 of the others
KINDS = ("llama", "gpt_oss", "qwen3_next", "nemotron_h", "deepseek_v3", "rwkv")
BESIDE_TP = ("llama", "gpt_oss", "nemotron_h", "deepseek_v3")
_WEIGHT = {"all-reduce": 2}  # it is a reduce-scatter and an all-gather
Moved = dict[str, tuple[int, int]]  # of a kind, over which ranks: how many, and bytes for each token


def tiny(kind: str, sizes: tuple[int, int]) -> Any:
    return replace(resolve(kind), ranks=(sizes[0] * sizes[1],) * 2).tiny(dtype=torch.float32)


@cache
def planned(kind: str, sizes: tuple[int, int]) -> tuple[Any, autoplan.Plan]:
    model = tiny(kind, sizes)
    return model, autoplan.plan(model, tp_size=sizes[0], cp_size=sizes[1], prove="none")


def moved_on_ranks(rank: int, plans: dict[str, autoplan.Plan], tp: int, cp: int) -> dict[str, dict[str, list[Moved]]]:
    """Of each kind of model, what blocks move forward and backward on one rank of a gloo group."""
    found: dict[str, dict[str, list[Moved]]] = {}
    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    for kind, plan in plans.items():
        torch.manual_seed(0)
        model = tiny(kind, (tp, cp))
        autoplan.parallelize(model, mesh, plan, check=False)
        blocks = tuple(name for stack in plan.layers for name in stack.fqns)
        ids = torch.randint(3, 40, (BATCH, LENGTHS.get(kind, 32)))
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
        tape = record_step(model.train(), inputs, Marks(blocks=blocks), group_names(mesh),
                           loss_of=lambda result: loss_of(result, None))  # fmt: skip
        found[kind] = _by_block(tape.items, tp > 1)
    return found


def _by_block(items: Any, beside: bool) -> dict[str, list[Moved]]:
    found: dict[str, list[Moved]] = {}
    inside = ""
    phase = 0
    for item in items:
        if isinstance(item, Block):
            inside, phase = item.name if item.when == "before" else "", int(item.phase == "backward")
            found.setdefault(item.name, [{}, {}])
        elif isinstance(item, Message) and inside:
            kind = item.kind.replace("-", "_") + (f" over {item.dim}" if beside else "")
            number, size = found[inside][phase].get(kind, (0, 0))
            size += max(item.sent, item.received) * _WEIGHT.get(item.kind, 1)
            found[inside][phase][kind] = number + 1, size
    return found


@cache
def real(tp: int, cp: int) -> dict[str, dict[str, list[Moved]]]:
    plans = {kind: planned(kind, (tp, cp))[1] for kind in (BESIDE_TP if tp > 1 else KINDS)}
    return run_processes(moved_on_ranks, (plans, tp, cp), tp * cp, timeout=600)[0]  # type: ignore[no-any-return]


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize(("kind", "tp"), [*((kind, 1) for kind in KINDS), *((kind, 2) for kind in BESIDE_TP)])
def test_blocks_move_what_their_plan_says(kind: str, tp: int) -> None:
    ran = real(tp, 2)[kind]
    model, plan = planned(kind, (tp, 2))
    assert plan.communication and ran
    row = BATCH * model.get_input_embeddings().weight.shape[1] * 4  # of one position; for each token nothing
    for name, (forward, backward) in ran.items():
        (said,) = (one for one in plan.communication if matches(one.block, name))
        halos = sum(row * one.before for one in plan.runtime.of(Halo) if matches(one.pattern.rsplit(".", 2)[0], name))
        for counted, one in ((forward, said.forward), (backward, said.backward)):
            tokens = BATCH * LENGTHS.get(kind, 32)
            if halos:
                number, size = counted["all_to_all"]
                counted["all_to_all"] = number, size - halos
            assert {kind: (number, size // tokens) for kind, (number, size) in counted.items()} == one, name
