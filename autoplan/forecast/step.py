"""Recordings of one model's step, made when asked for and kept: a sweep over meshes asks for few different ones.

A recording depends on how the model is split (tp, ep, along the sequence), on checkpointing, on dtypes and on
the batch. It does not depend on data parallelism. Bytes grow evenly with the batch, so two recordings tell all other
batches, where both did the same in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autoplan.capture.capture import Captured
from autoplan.capture.dry_run import depends_on_data, quiet
from autoplan.capture.fold import fold
from autoplan.capture.known_values import KnownValues
from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError, CaptureError
from autoplan.common.options import Checkpointing, Request, TensorParallel, Wish, check_argument
from autoplan.common.random_values import untouched_randomness
from autoplan.forecast.recording.program import Program, blended, program_of
from autoplan.forecast.recording.record import record_step
from autoplan.forecast.recording.tape import LeftOut, Tape
from autoplan.forecast.recording.world import fake_mesh
from autoplan.forecast.sharded import Copy, UnitSize, sharded_copy
from autoplan.hf.inputs.step import step_inputs
from autoplan.hf.source import Source
from autoplan.patches.kernels import on_reference_path
from autoplan.planning import capture_source, draft_plan
from autoplan.values import Plan

__all__ = ["Loss", "Recorded", "Setting", "Steps", "inputs_of", "loss_of", "own"]


Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """What a recording depends on. `training`: with labels and backward; else a forward that keeps its cache."""

    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    checkpointing: Request = False
    scope: Any = "all"
    gather_logits: bool = False
    batch: int = 1
    sequence: int = 2048
    training: bool = True
    compute: torch.dtype | None = None
    loss: Loss | None = None  # of outputs and labels, instead of the model's own
    output: torch.dtype | None = None  # what a mixed-precision policy casts outputs to


@dataclass(frozen=True)
class Recorded:
    """A recording, and what the copy that it was made on holds."""

    program: Program
    left_out: LeftOut
    units: tuple[UnitSize, ...]
    buffers: int
    kernels: tuple[str, ...] = ()


@dataclass
class Steps:
    """All recordings of one model."""

    source: Source
    given: Plan | None = None
    inputs: Mapping[str, Any] | None = None
    plans: dict[tuple[int, int, bool], Plan] = field(default_factory=dict)
    few: dict[tuple[int, int], Plan] = field(default_factory=dict)  # of few blocks, along the sequence too
    known: dict[Setting, Recorded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.given is not None:
            check_argument("plan", self.given, Plan, "give what autoplan.plan() or load_plan() returned")

    @cached_property
    def module(self) -> nn.Module:
        return self.source.module()

    @cached_property
    def captured(self) -> Captured:
        return capture_source(self.source, self.module)

    def plan(self, tp: int, ep: int = 1, sequence_parallel: bool = False) -> Plan:
        """The plan at these sizes; nothing is proven here."""
        key = (tp, ep, sequence_parallel)
        if self.given is not None and (self.given.tp_size, self.given.ep_size) == (tp, ep):
            return self.given
        if key not in self.plans:
            wish = Wish(tp, ep, sequence_parallel, prove="none")
            self.plans[key] = draft_plan(self.source, wish, module=self.module, captured=self.captured).plan
        return self.plans[key]

    def split(self, tp: int, ep: int = 1, sequence_parallel: bool = False) -> Plan:
        """The plan, as far as a recording needs it: few blocks of each kind.

        Along the sequence the first and the last block are not like those between, so all of them would be read one by
        one; here only those that are recorded are.
        """
        if not sequence_parallel or self.given is not None:
            return self.plan(tp, ep, sequence_parallel)
        if (tp, ep) not in self.few:
            module, captured = self.shallow
            wish = Wish(tp, ep, True, prove="none")
            made = draft_plan(self.source, wish, module=module, captured=captured).plan
            self.few[tp, ep] = replace(made, layers=self.plan(1).layers)
        return self.few[tp, ep]

    @cached_property
    def shallow(self) -> tuple[nn.Module, Captured]:
        """The model with few blocks of each kind, and its recording."""
        module = fold(self.module).module
        return module, capture_source(self.source, module)

    def at(self, setting: Setting) -> Recorded:
        """The step, recorded at this very batch."""
        if setting not in self.known:
            self.known[setting] = self._record(setting)
        return self.known[setting]

    def scaled(self, setting: Setting) -> Recorded:
        """The step at any batch, from the recordings of one and of two sequences where these did the same."""
        if setting in self.known or setting.batch <= 2:
            return self.at(setting)
        one, two = self.at(replace(setting, batch=1)), self.at(replace(setting, batch=2))
        program = blended(one.program, two.program, setting.batch)
        return self.at(setting) if program is None else replace(two, program=program)

    def _record(self, setting: Setting) -> Recorded:
        size = (setting.tp, setting.ep, setting.sequence_parallel)
        problem: BaseException | None = None
        for folded in (True, False):
            plan = self.split(*size) if folded else self.plan(*size)
            for how in ("fake", "known", "supposed"):
                try:
                    return self._recorded(setting, plan, folded, how)
                except AutoplanError:
                    raise
                except Exception as error:  # someone else's forward may raise anything
                    problem = problem or error
                    if not depends_on_data(error) and how == "supposed":
                        break
        raise CaptureError(
            f"a step of {self.source.name} cannot be run without storage: {type(problem).__name__}: {problem}"[:400],
            hint="pass inputs={argument: tensor} with which its forward runs",
        ) from problem

    def _recorded(self, setting: Setting, plan: Plan, folded: bool, how: str) -> Recorded:
        dim = "ep" if setting.tp == 1 < setting.ep else "tp"
        checkpointing = Checkpointing(setting.checkpointing, setting.scope)
        tensor = TensorParallel(gather_logits=setting.gather_logits)
        given = inputs_of(self, setting)
        with fake_mesh({dim: max(setting.tp, setting.ep)}) as mesh, quiet():
            copy = sharded_copy(
                self.module, plan, mesh, compute_dtype=setting.compute, checkpointing=checkpointing, tensor=tensor,
                folded=folded,
            )  # fmt: skip
            groups = {mesh.get_group().group_name: dim}
            with untouched_randomness(), on_reference_path():
                tape = _run(copy, setting, given, groups, how)
        return Recorded(program_of(tape), copy.left_out, copy.units, copy.buffers, tape.kernels)


def inputs_of(steps: Steps, setting: Setting) -> dict[str, Any]:
    """Keyword arguments of one call at this batch and length."""
    users = steps.inputs if steps.inputs is not None else steps.source.inputs
    return step_inputs(steps.source, steps.module, users, setting.batch, setting.sequence, training=setting.training)


def _run(copy: Copy, setting: Setting, given: Mapping[str, Any], groups: Mapping[str, str], how: str) -> Tape:
    copy.module.train(setting.training)
    mode: Any = copy.mode if how == "fake" else KnownValues(copy.mode, supposing=how == "supposed")
    with mode:
        inputs = {name: own(value, mode, setting.compute) for name, value in given.items()}
        loss = _loss(setting, inputs) if setting.training else None
        with torch.set_grad_enabled(setting.training):
            whole = max(setting.tp, setting.ep) == 1
            return record_step(copy.module, inputs, copy.marks, groups, loss_of=loss, whole=whole)


def _loss(setting: Setting, inputs: dict[str, Any]) -> Callable[[Any], torch.Tensor | None]:
    """The model's own loss, or the one that is asked for: then the model sees no labels."""
    given = setting.loss
    if given is None:
        return lambda result: loss_of(result, setting.output)
    labels = inputs.pop(conventions().targets, None)
    return lambda result: given(result, labels)


def own(value: Any, mode: Any, dtype: torch.dtype | None) -> Any:
    """An input as a step without storage takes it."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
    return mode.admit(value) if isinstance(mode, KnownValues) else torch.empty(value.shape, dtype=value.dtype)


def loss_of(result: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
    """The loss that the model computed, else the sum of what it returned; outputs are cast as FSDP2 casts them."""
    known = conventions()
    if dtype is not None and isinstance(result, dict):
        for name, value in list(result.items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
                result[name] = value.to(dtype)
    loss = getattr(result, known.loss, None)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    outputs = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else (result,)
    sums = [t.float().sum() for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum(sums[1:], sums[0]) if sums else None
