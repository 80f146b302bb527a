"""Messages that are counted are those that run on real gloo ranks: as many, of the same kinds, over the same dims, of
of as many bytes. The quick cases share one set of processes, the others another."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from slow_cases import marked
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, LlamaConfig, T5Config

import autoplan
from autoplan.check.ranks.run import run_processes
from autoplan.forecast.asked import Asked
from autoplan.forecast.devices import load_device
from autoplan.forecast.dry_run import dry_run, summed
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.recording.record import Marks, record_step
from autoplan.forecast.recording.tape import Message
from autoplan.forecast.sharded import group_names
from autoplan.forecast.step import Setting, Steps, inputs_of, loss_of
from autoplan.hf.source import resolve

_LLAMA = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8,
                     num_key_value_heads=4, vocab_size=256)  # fmt: skip
_GPT2 = GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=256, n_positions=64)
_T5 = T5Config(d_model=64, d_ff=96, d_kv=16, num_heads=4, num_layers=3, vocab_size=256)
CASES: list[tuple[Any, dict[str, int], dict[str, Any]]] = [
    (_LLAMA, {"tp": 4}, {}),
    (_LLAMA, {"tp": 4}, {"activation_checkpointing": True}),
    (_LLAMA, {"dp_shard": 4}, {}),
    (_LLAMA, {"dp_shard": 2, "tp": 2}, {"activation_checkpointing": True}),
    (_LLAMA, {"dp_shard": 2, "tp": 2}, {"activation_checkpointing": "selective"}),
    (_LLAMA, {"dp_shard": 2, "tp": 2}, {"reshard_after_forward": False}),
    (_LLAMA, {"dp_replicate": 2, "dp_shard": 2}, {}),
    (_LLAMA, {"tp": 4}, {"gather_logits": True}),
    (_GPT2, {"tp": 4}, {}),
    (_GPT2, {"dp_shard": 2, "tp": 2}, {}),
    (_T5, {"tp": 4}, {}),
    (_T5, {"dp_shard": 2, "tp": 2}, {"activation_checkpointing": True}),
    (_LLAMA, {"dp_shard": 2, "cp": 2}, {"activation_checkpointing": True}),
    (_LLAMA, {"cp": 4}, {}),
    (_LLAMA, {"cp": 2, "tp": 2}, {}),
    (_LLAMA, {"dp_shard": 1, "cp": 2, "tp": 2}, {"activation_checkpointing": True}),
]
QUICK = (0, 3, 6)
REST = tuple(n for n in range(len(CASES)) if n not in QUICK)
BATCH, LENGTH = 2, 16
STEPS: dict[int, Steps] = {}
Counted = dict[tuple[str, str], tuple[int, int]]


def _counted(sent: Any) -> Counted:
    return {(one.dim, one.kind): (one.number, one.bytes) for one in sent}


def on_real_ranks(rank: int, plans: dict[int, autoplan.Plan]) -> dict[int, Counted]:
    """What one rank of a gloo group of four takes part in, for each case."""
    found: dict[int, Counted] = {}
    known: dict[int, Steps] = {}
    for case, plan in plans.items():
        config, dims, options = CASES[case]
        steps = known.setdefault(id(config), Steps(resolve(config)))
        torch.manual_seed(0)
        model = steps.source.model_class._from_config(config)  # type: ignore[union-attr]
        mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        autoplan.parallelize(model, mesh, plan, check=False, **options)
        model.train()
        setting = Setting(tp=dims.get("tp", 1), batch=BATCH, sequence=LENGTH)
        inputs = inputs_of(steps, setting)
        tape = record_step(model, inputs, Marks(), group_names(mesh), loss_of=lambda result: loss_of(result, None))
        found[case] = _counted(summed(tuple(item for item in tape.items if isinstance(item, Message))))
    return found


@cache
def real(cases: tuple[int, ...]) -> dict[int, Counted]:
    plans = {}
    for config, dims, case in ((*CASES[case][:2], case) for case in cases):
        steps = STEPS.setdefault(id(config), Steps(resolve(config)))
        plans[case] = steps.plan(dims.get("tp", 1), cp=dims.get("cp", 1))
    return run_processes(on_real_ranks, (plans,), 4, timeout=300)[0]  # type: ignore[no-any-return]


def _ran(case: int) -> Counted:
    return real(QUICK if case in QUICK else REST)[case]


@pytest.mark.long
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in REST)])
def test_estimated_messages_are_those_that_run(case: int) -> None:
    config, dims, options = CASES[case]
    asked = Asked(tuple(dims.items()), BATCH, LENGTH, **options)
    steps = STEPS.setdefault(id(config), Steps(resolve(config)))
    assert _counted(estimate_with(steps, asked, load_device("h100")).messages) == _ran(case)


@pytest.mark.parametrize("case", marked(QUICK, slow=[3]))
def test_a_dry_run_lists_the_same(case: int) -> None:
    config, dims, options = CASES[case]
    found = dry_run(config, mesh=dims, batch=BATCH, sequence=LENGTH, **options)
    assert _counted(found.sent) == _ran(case)
    assert dict(found.outputs)["logits"] == (BATCH, LENGTH, 256) and found.gradients == found.parameters
