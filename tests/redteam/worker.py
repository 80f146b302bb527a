"""Judge one case on one rank: plan, parallelize, run the script on both models, compare."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.execute import collectives

from . import cases as _cases  # noqa: F401 - registers them
from .case import CASES, Case, Setting
from .compare import difference, law_difference
from .script import Step, build, observe, script, seed

__all__ = ["Outcome", "judge", "setting_of"]

_GROUP_SECONDS = 40


@dataclass(frozen=True)
class Outcome:
    """What came of a case on one rank, or on all.

    `kind`: "exact", "refused" (an AutoplanError), "raw" (any other exception), "wrong", "late" or "broken" (the case
    itself does not run). `verified`: did `autoplan.verify` pass, where it was asked. `split`: sharded parameters.
    `idle`: nothing is split, or the sequence was to be cut and is not.
    """

    case: str
    kind: str
    error: float = 0.0
    where: str = ""
    text: str = ""
    proven: bool | None = None
    verified: bool | None = None
    split: int = 0
    idle: bool = False
    warned: tuple[str, ...] = ()
    surroundings: tuple[str, ...] = ()
    seconds: float = 0.0

    def allowed(self) -> bool:
        return self.kind in CASES[self.case.partition("@")[0]].allowed


def setting_of(name: str) -> tuple[Case, Setting]:
    """The case and the setting that an id such as "flags/Norm@tp2+sp" means."""
    stem, _, told = name.partition("@")
    case, setting = CASES[stem], Setting.parse(told)
    return (replace(case, dtype=torch.bfloat16) if "bf16" in setting.how else case), setting


def judge(
    name: str, rank: int, store: str, fault: str = "", verify: str = "wrong", once: bool = False
) -> Outcome:  # fmt: skip
    """Run a case on this rank. All ranks call it; `store` is a file that they share. `verify`: "wrong", "all", "no".
    `once`: one rank makes the plan for all."""
    case, setting = setting_of(name)
    start = time.monotonic()
    try:
        steps = script(replace(case, vary=False) if fault else case)  # a fault shows in the first calls
    except Exception:  # whatever the unsharded model raises, the case is at fault
        return Outcome(name, "broken", text=traceback.format_exc(limit=-1))
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=setting.ranks,
        store=dist.FileStore(store, setting.ranks),
        timeout=timedelta(seconds=_GROUP_SECONDS),
    )
    try:
        with _as_it_was(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            outcome = _judged(case, setting, name, steps, fault, once)
        outcome = replace(outcome, warned=tuple(dict.fromkeys(str(w.message)[:200] for w in told)))
    finally:
        dist.destroy_process_group()
    if rank == 0 and (verify == "all" or (verify == "wrong" and outcome.kind == "wrong")):
        outcome = _verified(case, setting, outcome)
    return replace(outcome, seconds=time.monotonic() - start)


def _judged(case: Case, setting: Setting, name: str, steps: list[Step], fault: str, once: bool) -> Outcome:
    _MOVED.clear()
    before = _surroundings()
    proven, where, split, worst, at = None, "plan", 0, 0.0, ""
    try:
        plan = autoplan.plan_once if once else autoplan.plan
        made = _plan_for_faults(name) if fault else _plan(case, setting, plan)
        proven = made.proof.ok if hasattr(made, "proof") else None
        where = "parallelize"
        mesh = init_device_mesh("cpu", tuple(setting.mesh.values()), mesh_dim_names=tuple(setting.mesh))
        unguarded = {"path_guard": "off"} if fault else {}  # a planted fault is code that the plan never saw
        blocks = {"activation_checkpointing": True} if "ac" in setting.how else {}
        sharded = _sharded(case, setting, mesh, made, **case.options, **unguarded, **blocks)
        split = sum(isinstance(p, DTensor) and not p.placements[-1].is_replicate() for p in sharded.parameters())
        with _planted(fault, sharded):
            names = iter([*(step.name for step in steps), "end"])
            compared = _compared(case, sharded, steps)
            where = next(names)
            rounding = _rounding(case, steps) if "bf16" in setting.how else {}
            for name_of_step, (error, key) in compared:
                error *= case.tolerance / max(case.tolerance, rounding.get(name_of_step, 0.0))
                worst, at = max((worst, at), (error, f"{name_of_step}: {key}"))
                where = next(names, "end")
    except autoplan.AutoplanError as error:
        if worst > case.tolerance:  # a refusal that comes after a wrong value comes too late
            return Outcome(name, "wrong", worst, at, f"then refused: {error}", proven, None, split)
        return Outcome(name, "refused", 0.0, where, str(error), proven, None, split)
    except Exception as error:  # any other exception is what "raw" means
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
        return Outcome(name, "raw", 0.0, where, text, proven, None, split)
    kind = "wrong" if worst > case.tolerance else "exact"
    idle = not (split or setting.tp == 1) or (setting.sequence and not made.sequence_parallel)
    if idle and case.shards:
        return Outcome(name, "refused", worst, at, "nothing is split", proven)
    left = _changed(before, _surroundings())
    return Outcome(name, kind, worst, at, "", proven, None, split, idle, surroundings=left)


def _sharded(case: Case, setting: Setting, mesh: Any, made: Any, **options: Any) -> nn.Module:
    if "meta" not in setting.how:
        return autoplan.parallelize(build(case), mesh, made, **options)
    with tempfile.TemporaryDirectory() as folder:  # one of each rank
        save_file(
            {k: v.clone().contiguous() for k, v in build(case).state_dict().items()}, f"{folder}/model.safetensors"
        )
        with torch.device("meta"):
            empty = build(case)
        model = autoplan.parallelize(empty, mesh, made, **options)
        autoplan.load_weights(model, folder)
        return model


def _rounding(case: Case, steps: list[Step]) -> dict[str, float]:
    """How far the unsharded model in this dtype is from the one in double precision, several times over."""
    runs = []
    for one in (case, replace(case, dtype=torch.float64)):
        model = build(one)
        if one.prepare is not None:
            one.prepare(model)
        runs.append(dict(observe(one, model, steps)))
    low, high = runs
    return {
        name: 8 * difference(_double(high[name]), _double(found))[0] + torch.finfo(case.dtype).eps
        for name, found in low.items()
    }


def _double(found: dict[str, Any]) -> dict[str, Any]:
    return {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in found.items()}


@lru_cache(maxsize=1)
def _plan_for_faults(name: str) -> autoplan.Plan:
    """The plan of a case, made by one rank, once for all faults that are planted in it."""
    return _plan(*setting_of(name), autoplan.plan_once)


def _plan(case: Case, setting: Setting, plan: Callable[..., autoplan.Plan] = autoplan.plan) -> autoplan.Plan:
    sizes = {"tp_size": setting.tp, "cp_size": setting.cp, "sequence_parallel": setting.sequence}
    wishes = sizes | {"inputs": case.inputs}
    if case.plan_for is None:
        return plan(build(case), **wishes)
    other = build(case, case.plan_for)
    with tempfile.TemporaryDirectory() as folder:
        if case.through == "cache":
            autoplan.plan(other, cache=folder, **wishes)
            return autoplan.plan(build(case), cache=folder, **wishes)
        autoplan.plan(other, **wishes).save(f"{folder}/plan.yaml")
        return autoplan.load_plan(f"{folder}/plan.yaml")


def _compared(case: Case, sharded: nn.Module, steps: list[Step]) -> Iterator[tuple[str, tuple[float, str]]]:
    """Run the same steps on both models. Ranks meet after each, so that none is far ahead of one that fails."""
    plain = build(case)
    if case.prepare is not None:
        case.prepare(plain)
        case.prepare(sharded)
    if case.draws:
        yield "draws", _laws(case, plain, sharded)
        return
    expected = dict(observe(case, plain, steps))
    states = _generators()
    for name, found in observe(case, sharded, steps):
        yield name, difference(expected[name], _with_whole_buffers(expected[name], found))
    _MOVED.extend(which for which, state in _generators().items() if not _equal(state, states[which]))


_MOVED: list[str] = []


def _with_whole_buffers(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Join the parts of buffers that ranks hold: a buffer is not wrong because it follows a split weight."""
    whole = dict(found)
    for name, value in found.items():
        wanted = expected.get(name)
        if not name.startswith("buffer") or wanted is None or wanted.dim() != value.dim():
            continue
        dims = [d for d in range(value.dim()) if wanted.shape[d] != value.shape[d]]
        if len(dims) != 1:
            continue
        parts = [value]
        number, ranks = wanted.shape[dims[0]] // max(1, value.shape[dims[0]]), dist.get_world_size()
        if value.shape[dims[0]] * number == wanted.shape[dims[0]] and number > 1 and ranks % number == 0:
            parts = [torch.empty_like(value) for _ in range(ranks)]
            dist.all_gather(parts, value.contiguous())
            first = dist.get_rank() // number * number  # tensor-parallel ranks are neighbours
            parts = parts[first : first + number]
        whole[name] = torch.cat(parts, dims[0])
        # Ranks may have rows of several pieces each, or all of them some rows: are they those of the whole?
        rows, all_rows = (
            one.movedim(dims[0], 0).reshape(one.shape[dims[0]], -1).double() for one in (whole[name], wanted)
        )
        apart = torch.cdist(rows, all_rows, compute_mode="donot_use_mm_for_euclid_dist")
        if apart.amin(1).max() < 1e-9 and (len(parts) == 1 or apart.amin(0).max() < 1e-9):
            whole[name] = wanted
    return whole


def _laws(case: Case, plain: nn.Module, sharded: nn.Module) -> tuple[float, str]:
    """Compare distributions over many draws, and that all ranks hold the same values."""
    one = replace(case.calls[0], train=True, grad=False)
    rows = []
    for model in (plain, sharded):
        seed(77)
        steps = [Step("draw", one, "nothing")]
        drawn = [_row(found) for _ in range(case.draws) for _, found in _unseeded(case, model, steps)]
        rows.append(torch.stack(drawn))
    whole = [torch.zeros_like(rows[1]) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, rows[1].contiguous())
    error, what = law_difference(*rows)
    apart = max((other - rows[1]).abs().max().item() for other in whole)
    law = (error * case.tolerance * 0.99 if error <= 1 else error, what)
    return max(law, (apart, "ranks hold different values"))


def _unseeded(case: Case, model: nn.Module, steps: list[Step]) -> Iterator[tuple[str, dict[str, Any]]]:
    with mock.patch(f"{observe.__module__}.seed"):
        yield from observe(case, model, steps)


def _row(found: dict[str, Any]) -> torch.Tensor:
    tensors = [value for name, value in found.items() if name.startswith("output") and isinstance(value, torch.Tensor)]
    return torch.cat([value.double().flatten() for value in tensors])


def _verified(case: Case, setting: Setting, outcome: Outcome) -> Outcome:
    """Ask autoplan's own verify, on rank 0 alone, about the same plan."""
    try:
        report = autoplan.verify(build(case), _plan(case, setting), **({"inputs": case.inputs} if case.inputs else {}))
        return replace(outcome, verified=bool(report.ok))
    except Exception as error:  # only what verify says is asked here
        return replace(outcome, verified=False, text=f"{outcome.text}\nverify: {type(error).__name__}: {error}"[:1500])


# ------------------------------------------------------------------------------------------------ planted faults


@contextmanager
def _planted(fault: str, model: nn.Module) -> Iterator[None]:
    """Spoil one rank's weight ("weight"), leave out sums over ranks ("sum"), or draw alike on all ranks ("draw")."""
    if fault == "weight" and dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            for parameter in model.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.view(-1)[: max(1, local.numel() // 2)] += 0.5
    with ExitStack() as spoilt:
        if fault == "sum":
            spoilt.enter_context(_without_sums())
        if fault == "draw":  # what ranks would draw for their own parts is drawn as on rank 0
            spoilt.enter_context(mock.patch("torch.nn.functional.dropout", _dropped_alike))
        yield


def _dropped_alike(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    kept = torch.from_numpy(numpy.random.default_rng(next(_TURNS)).random(tuple(x.shape)) >= p)
    return x * kept.to(x.dtype) / (1 - p) if training else x


_TURNS = itertools.count()


@contextmanager
def _without_sums() -> Iterator[None]:
    sent = collectives.sent

    def send(collective: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        if collective is collectives._NAMED.all_reduce and x.is_floating_point():
            return x.clone()
        return sent(collective, x, *args)

    with mock.patch.object(collectives, "sent", send):
        yield


# ------------------------------------------------------------------------------------------------ what others read


def _surroundings() -> dict[str, Any]:
    """State of the process that is not autoplan's to change."""
    return {
        "excepthook": sys.excepthook,
        "warning filters": list(warnings.filters),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "environment": dict(os.environ),
        "signal handlers": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "trace function": sys.gettrace(),
        "grad mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _changed(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    moved = tuple(_MOVED)
    return moved + tuple(name for name, value in before.items() if value != after[name])


def _generators() -> dict[str, Any]:
    return {
        "initial seed": torch.initial_seed(),
        "generator of torch": torch.get_rng_state(),
        "generator of Python": random.getstate(),
        "generator of numpy": [
            part.tolist() if isinstance(part, numpy.ndarray) else part for part in numpy.random.get_state()
        ],
    }


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Undo what a case may leave behind, so that the next one starts afresh."""
    hook, environment, trace = sys.excepthook, dict(os.environ), sys.gettrace()
    try:
        yield
    finally:
        sys.excepthook = hook
        sys.settrace(trace)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)  # "cpu" would leave a mode that sees every call of torch
        os.environ.clear()
        os.environ.update(environment)
