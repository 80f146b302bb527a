"""An argument of another kind, to anything public: one clear error before anything is built or changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.common.errors import AutoplanError


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


MODEL, INPUTS = Toy(), {"x": torch.zeros(2, 8)}
PLAN = autoplan.Plan("toy", 2)
IDS = torch.zeros(2, dtype=torch.long)
LOGITS = torch.zeros(2, 4)
ODD: tuple[Any, ...] = (3, -1, 0.5, "no such thing", object(), [1], {1: 2}, b"x", len)
NONE: tuple[Any, ...] = (*ODD, None)

# Each public name: the argument that is of another kind, and the call with it. `but`: what is right there.
CALLS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "plan(model)": (lambda odd: autoplan.plan(odd, 2), NONE),
    "plan(tp_size)": (lambda odd: autoplan.plan(MODEL, odd, inputs=INPUTS), (*NONE[1:], True)),
    "plan(ep_size)": (lambda odd: autoplan.plan(MODEL, 2, ep_size=odd, inputs=INPUTS), NONE),
    "plan(source)": (lambda odd: autoplan.plan(MODEL, 2, source=odd, inputs=INPUTS), NONE),
    "plan(inputs)": (lambda odd: autoplan.plan(MODEL, 2, inputs=odd), (*ODD[:6], b"x", len)),
    "plan(overrides)": (lambda odd: autoplan.plan(MODEL, 2, overrides=odd, inputs=INPUTS), ODD),
    "plan(unmatched)": (lambda odd: autoplan.plan(MODEL, 2, unmatched=odd, inputs=INPUTS), NONE),
    "plan(cache)": (
        lambda odd: autoplan.plan(MODEL, 2, cache=odd, inputs=INPUTS),
        (*ODD[:3], *ODD[4:7], len),
    ),
    "plan_once(model)": (lambda odd: autoplan.plan_once(odd, 2), NONE),
    "plan(strict)": (lambda odd: autoplan.plan(MODEL, 2, strict=odd, inputs=INPUTS), NONE),
    "plan(prove)": (lambda odd: autoplan.plan(MODEL, 2, prove=odd, inputs=INPUTS), NONE),
    "plan(sequence_parallel)": (lambda odd: autoplan.plan(MODEL, 2, sequence_parallel=odd, inputs=INPUTS), NONE),
    "plan(trust_remote_code)": (lambda odd: autoplan.plan(MODEL, 2, trust_remote_code=odd), NONE),
    "verify(model)": (lambda odd: autoplan.verify(odd), NONE),
    "verify(plan)": (lambda odd: autoplan.verify(MODEL, odd), ODD),
    "verify(tp_size)": (lambda odd: autoplan.verify(MODEL, None, odd, inputs=INPUTS), (*ODD[1:], True)),
    "verify(mesh)": (lambda odd: autoplan.verify(MODEL, mesh=odd, inputs=INPUTS), ODD),
    "verify(engine)": (lambda odd: autoplan.verify(MODEL, engine=odd, inputs=INPUTS, checks=["forward"]), NONE),
    "verify(checks)": (lambda odd: autoplan.verify(MODEL, checks=odd, inputs=INPUTS), ODD),
    "verify(ep_size)": (lambda odd: autoplan.verify(MODEL, ep_size=odd, inputs=INPUTS), ODD),
    "verify(rounding)": (lambda odd: autoplan.verify(MODEL, rounding=odd, inputs=INPUTS), NONE),
    "audit(model)": (lambda odd: autoplan.audit(odd, "hf"), NONE),
    "audit(plan)": (lambda odd: autoplan.audit(MODEL, odd, inputs=INPUTS), NONE),
    "audit(tp_size)": (lambda odd: autoplan.audit(MODEL, PLAN, odd, inputs=INPUTS), (*NONE[1:], True)),
    "audit(tokens)": (lambda odd: autoplan.audit(MODEL, PLAN, tokens=odd, inputs=INPUTS), NONE[1:]),
    "audit(gradient_norm)": (lambda odd: autoplan.audit(MODEL, PLAN, gradient_norm=odd, inputs=INPUTS), ODD[:-1]),
    "audit(dtype)": (lambda odd: autoplan.audit(MODEL, PLAN, dtype=odd, inputs=INPUTS), ODD),
    "load_plan": (autoplan.load_plan, NONE),
    "layers": (autoplan.layers, NONE),
    "parallelize(model)": (lambda odd: autoplan.parallelize(odd, None, PLAN), NONE),  # type: ignore[arg-type]
    "parallelize(mesh)": (lambda odd: autoplan.parallelize(MODEL, odd, PLAN), NONE),
    "parallelize(options)": (lambda odd: autoplan.parallelize(MODEL, None, PLAN, options=odd), ODD),  # type: ignore[arg-type]
    "applied": (autoplan.applied, NONE),
    "gather_logits": (autoplan.gather_logits, NONE),
    "full_tensors": (autoplan.full_tensors, NONE),
    "load_weights(model)": (lambda odd: autoplan.load_weights(odd, "/"), NONE),
    "load_weights(folder)": (lambda odd: autoplan.load_weights(MODEL, odd), NONE),
    "shard_batch(mesh)": (lambda odd: autoplan.shard_batch(INPUTS, odd), NONE),
    "clip_gradients(source)": (lambda odd: autoplan.clip_gradients(odd, 1.0), NONE),
    "clip_gradients(max_norm)": (lambda odd: autoplan.clip_gradients(MODEL, odd), (-1, *NONE[3:])),
    "global_norm(source)": (autoplan.global_norm, NONE),
    "global_norm(norm_type)": (lambda odd: autoplan.global_norm(MODEL, odd), (-1, *NONE[3:])),
    "to_local": (autoplan.to_local, NONE),
    "fx_graph(model)": (autoplan.fx_graph, NONE),
    "fx_graph(inputs)": (lambda odd: autoplan.fx_graph(MODEL, odd), (*ODD[:6], b"x", len)),
    "megatron_call(model)": (lambda odd: autoplan.megatron_call(odd, None, PLAN), NONE),  # type: ignore[arg-type]
    "megatron_call(mesh)": (lambda odd: autoplan.megatron_call(MODEL, odd, PLAN), NONE),
    "packed_model(model)": (lambda odd: autoplan.packed_model(odd, PLAN), NONE),
    "packed_model(plan)": (lambda odd: autoplan.packed_model(MODEL, odd), NONE),
    "rebuild_buffers": (autoplan.rebuild_buffers, NONE),
    "save_weights(model)": (lambda odd: autoplan.save_weights(odd, "/nowhere"), NONE),
    "save_weights(folder)": (lambda odd: autoplan.save_weights(MODEL, odd), (*ODD[:3], *ODD[4:], None)),
    "hand_over": (autoplan.hand_over, NONE),
    "register_plan(model_class)": (lambda odd: autoplan.register_plan(odd, {"a": "colwise"}), NONE),
    "register_plan(entries)": (lambda odd: autoplan.register_plan("a.B", odd), NONE),
    "dry_run(model)": (lambda odd: autoplan.dry_run(odd, mesh={"tp": 2}), NONE),
    "dry_run(mesh)": (lambda odd: autoplan.dry_run(MODEL, mesh=odd), NONE),
    "estimate(model)": (lambda odd: autoplan.estimate(odd, mesh={"tp": 2}), NONE),
    "estimate(mesh)": (lambda odd: autoplan.estimate(MODEL, mesh=odd), NONE),
    "choose(model)": (lambda odd: autoplan.choose(odd, gpus=2), NONE),
    "choose(gpus)": (lambda odd: autoplan.choose(MODEL, gpus=odd), NONE[1:]),
    "choose(memory)": (lambda odd: autoplan.choose(MODEL, gpus=2, memory=odd), ODD[1:]),
    "unshard": (lambda odd: autoplan.unshard(odd).__enter__(), NONE),
    "vocab_parallel_cross_entropy": (lambda odd: autoplan.vocab_parallel_cross_entropy(odd, IDS), NONE),
    "vocab_parallel_logprobs": (lambda odd: autoplan.vocab_parallel_logprobs(odd, IDS), NONE),
    "vocab_parallel_logprobs(temperature)": (
        lambda odd: autoplan.vocab_parallel_logprobs(LOGITS, IDS, temperature=odd),
        (*NONE[1:2], *NONE[3:]),
    ),
    "vocab_parallel_logprobs(top_k)": (lambda odd: autoplan.vocab_parallel_logprobs(LOGITS, IDS, top_k=odd), ODD[1:]),
    "vocab_parallel_logprobs(top_p)": (
        lambda odd: autoplan.vocab_parallel_logprobs(LOGITS, IDS, top_p=odd),
        (*ODD[:2], *ODD[3:]),
    ),
    "vocab_parallel_logprobs(cu_seqlens)": (
        lambda odd: autoplan.vocab_parallel_logprobs(LOGITS, IDS, cu_seqlens=odd),
        ODD,
    ),
    "vocab_parallel_logprobs(position_ids)": (
        lambda odd: autoplan.vocab_parallel_logprobs(LOGITS, IDS, position_ids=odd),
        ODD,
    ),
    "vocab_parallel_logprobs_from_hidden(hidden)": (
        lambda odd: autoplan.vocab_parallel_logprobs_from_hidden(odd, LOGITS, IDS),
        NONE,
    ),
    "vocab_parallel_logprobs_from_hidden(head)": (
        lambda odd: autoplan.vocab_parallel_logprobs_from_hidden(LOGITS, odd, IDS),
        NONE,
    ),
    "vocab_parallel_logprobs_from_hidden(chunk_tokens)": (
        lambda odd: autoplan.vocab_parallel_logprobs_from_hidden(LOGITS, LOGITS, IDS, chunk_tokens=odd),
        NONE[1:],
    ),
    "vocab_parallel_topk(logits)": (lambda odd: autoplan.vocab_parallel_topk(odd, 1), NONE),
    "vocab_parallel_topk(k)": (lambda odd: autoplan.vocab_parallel_topk(LOGITS, odd), NONE[1:]),
    "vocab_parallel_gather(logits)": (lambda odd: autoplan.vocab_parallel_gather(odd, IDS), NONE),
    "vocab_parallel_gather(tokens)": (lambda odd: autoplan.vocab_parallel_gather(LOGITS, odd), NONE),
    "vocab_parallel_entropy": (autoplan.vocab_parallel_entropy, NONE),
    "vocab_parallel_argmax": (autoplan.vocab_parallel_argmax, NONE),
    "vocab_parallel_sample": (autoplan.vocab_parallel_sample, NONE),
    "Plan.explain": (PLAN.explain, (*ODD[:3], None, [1], b"x")),
    "Plan.diff": (PLAN.diff, NONE),
    "Plan.part_for": (PLAN.part_for, NONE),
    "Plan.save": (PLAN.save, NONE),
    "Plan.report": (PLAN.report, NONE),
    "Plan.report(estimate)": (lambda odd: PLAN.report("plan.html", estimate=odd), ODD),
    "Plan.export": (PLAN.export, NONE),
    "Wish": (lambda odd: autoplan.Wish(tp_size=odd), NONE[1:]),
    "TensorParallel": (lambda odd: autoplan.TensorParallel(sequence_padding=odd), NONE),
    "Checkpointing": (lambda odd: autoplan.Checkpointing(blocks=odd), NONE[:-2]),
    "DataParallel": (lambda odd: autoplan.DataParallel(frozen=odd), NONE),
    "Options": (lambda odd: autoplan.Options(tensor=odd), NONE),
}
VALUES = {
    *("CaptureError", "ExportError", "IndivisibleError", "OutsideError", "PlanFileError", "PlanMismatchError"),
    *("PlanRefusedError", "SourceError", "UnprovenPlanWarning", "UntestedVersionWarning"),
    *("Cost", "Exported", "Fed", "MadeFor", "Obstacle", "PackedWeight", "Replicated", "Runtime", "TopLogits"),
    *("CutsOf", "Drawn", "Estimate", "FlowPart", "MemoryParts", "Sent", "StepTime"),
    *("Traffic", "Trial", "Keywords", "Model", "PlanSource", "Ranks"),
    *("Choice", "Device", "DryRun", "Estimate", "MegatronCall", "RankGroup", "WhatIf"),
    "AutoplanError",
    "Applied",
    "Change",
    "Entry",
    "Finding",
    "Proof",
    "Report",
    "Stack",
    "__version__",
}  # as made
ELSEWHERE = {"Plan"}  # its methods are in the table


@pytest.mark.parametrize("name", CALLS)
def test_one_clear_error(name: str) -> None:
    before = {key: value.clone() for key, value in MODEL.state_dict().items()}
    call, values = CALLS[name]
    for odd in values:
        with pytest.raises(AutoplanError) as caught:
            call(odd)
        assert caught.value.message and len(str(caught.value)) < 3000, odd
    assert all(torch.equal(value, before[key]) for key, value in MODEL.state_dict().items())


def test_the_table_has_every_public_name() -> None:
    named = {name.partition("(")[0].partition(".")[0] for name in CALLS}
    assert named | VALUES | ELSEWHERE >= set(autoplan.__all__)
