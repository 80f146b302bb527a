"""Recordings of one model's step, kept: a sweep over meshes asks for few different ones.

They depend on the split, checkpointing, dtypes and the batch, not on data parallelism. Bytes grow evenly with the
batch, so two recordings tell all other batches where both did the same in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import nn

from autoplan.capture.capture import Captured
from autoplan.capture.dry_run import quiet
from autoplan.capture.fold import Folded, fold
from autoplan.capture.known_values import KnownValues
from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError, CaptureError
from autoplan.common.layout import Layout
from autoplan.common.options import Checkpointing, Request, TensorParallel, Wish, check_argument
from autoplan.common.random_values import untouched_randomness
from autoplan.forecast.recording.known_ops import KnownOps
from autoplan.forecast.recording.record import record_step
from autoplan.forecast.recording.tape import LeftOut, Program, Tape, blended, program_of
from autoplan.forecast.sharded import Copy, UnitSize, fake_mesh, group_names, sharded_copy
from autoplan.forecast.trained import Adapted, with_adapters
from autoplan.hf.adapters import usual_targets
from autoplan.hf.inputs.step import check_positions, size_of, step_inputs
from autoplan.hf.source import Source
from autoplan.patches.kernels import one_sequence_a_row, where_it_runs
from autoplan.planning import capture_source, draft_plan
from autoplan.values import AttendAcross, Exchange, Plan
from autoplan.values.quantised import PackedWeight

Loss = Callable[[Any, Any], torch.Tensor]
# Few blocks or all of them, and what is known of the numbers in tensors without storage: the cheapest first.
_WAYS = tuple((folded, how) for folded in (True, False) for how in ("fake", "known", "supposed"))


@dataclass(frozen=True)
class Setting:
    """The settings of a recording. `training`: with labels and backward; else a forward that keeps its cache."""

    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    checkpointing: Request = False
    gather_logits: bool = False
    batch: int = 1
    sequence: int = 2048
    training: bool = True
    compute: torch.dtype | None = None
    loss: Loss | None = None  # of outputs and labels, instead of the model's own
    chunk: int = 0  # of tokens whose logits are there at once; 0: all
    output: torch.dtype | None = None  # what a mixed-precision policy casts outputs to
    cp: int = 1
    averaged: bool = False  # FSDP2 sums gradients over the ranks of cp

    @property
    def dims(self) -> dict[str, int]:
        """Over which the model and its sequences are cut."""
        split = {"ep" if self.tp == 1 < self.ep else "tp": max(self.tp, self.ep)}
        return {"cp": self.cp, **split} if self.cp > 1 else split

    @property
    def ranks(self) -> int:
        return max(self.tp, self.ep) * self.cp


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
    lora_rank: int = 0  # of adapters that are put in where nothing of the model is frozen; 0: none are
    lora_targets: tuple[str, ...] | str | None = None  # None: as peft chooses for the type of the model
    lora_dropout: float = 0.0
    lora_dtype: str = "float32"  # "model": that of the layers beside them
    plans: dict[tuple[int, int, bool, int], Plan] = field(default_factory=dict)
    known: dict[Setting, Recorded] = field(default_factory=dict)
    worked: dict[bool, tuple[bool, str]] = field(default_factory=dict)  # which of `_WAYS`, by training
    fed: dict[tuple[int, int, bool], dict[str, Any]] = field(default_factory=dict)  # by batch, length, training
    derived: dict[Setting, Recorded] = field(default_factory=dict)  # of recordings of other batches or ranks
    lengths: dict[int, int] = field(default_factory=dict)  # for which there are positions, and how many are named

    def __post_init__(self) -> None:
        if self.given is not None:
            check_argument("plan", self.given, Plan, "pass the result of autoplan.plan() or load_plan()")
            if self.adapters:
                text = f"the plan is for {self.source.name} without adapters, and no parameter of the model is frozen"
                raise AutoplanError(text, hint="omit the plan, or add the adapters and plan that model")

    @cached_property
    def module(self) -> nn.Module:
        module = self.source.module()
        if not self.lora_rank or not all(parameter.requires_grad for parameter in module.parameters()):
            return module
        if self.lora_targets is None:
            self.lora_targets = usual_targets(self.source.model_type, self.source.config)
        wide = self.lora_dtype == "float32"
        return with_adapters(module, self.lora_rank, self.lora_targets, self.lora_dropout, wide=wide)

    @cached_property
    def dtype(self) -> str:
        """That most weights have."""
        sizes: Counter[str] = Counter()
        for parameter in self.module.parameters():
            if not (self.adapters and parameter.requires_grad):  # of an adapter
                sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
        return max(sizes, key=sizes.__getitem__, default="")

    def check_length(self, length: int) -> int:
        """Return the positions that the config names (0: none); raise where a table has fewer."""
        if length not in self.lengths:
            self.lengths[length] = check_positions(self.source.name, self.module, length)
        return self.lengths[length]

    @cached_property
    def packed(self) -> tuple[PackedWeight, ...]:
        """Return what a quantised checkpoint holds in place of weights, by the names that `module` has."""
        weights = self.source.packed(self.source.module() if self.adapters else self.module)
        inner = {name.replace(".inner.", "."): name for name, _ in self.module.named_parameters()}
        return tuple(replace(w, name=inner.get(w.name, w.name)) for w in weights) if self.adapters else weights

    @property
    def adapters(self) -> int:
        """Return how many adapters were added."""
        return sum(isinstance(part, Adapted) for part in self.module.modules()) if self.lora_rank else 0

    @cached_property
    def in_half(self) -> bool:
        return any(p.dtype in (torch.bfloat16, torch.float16) for p in self.module.parameters())

    @cached_property
    def captured(self) -> Captured:
        return capture_source(self.source, self.module)

    def plan(self, tp: int, ep: int = 1, sequence_parallel: bool = False, cp: int = 1) -> Plan:
        """The plan at these sizes; nothing is proven here."""
        key = (tp, ep, sequence_parallel, cp)
        passed = self.given
        if passed is not None and (passed.tp_size, passed.ep_size, passed.cp_size) == (tp, ep, cp):
            return passed
        if key not in self.plans:
            wish = Wish(tp, ep, sequence_parallel, prove="none", cp_size=cp)
            self.plans[key] = draft_plan(self.source, wish, module=self.module, captured=self.captured).plan
        return self.plans[key]

    @cached_property
    def folded(self) -> Folded:
        """The model with few blocks of each kind: copied for each recording."""
        return fold(self.module)

    def at(self, setting: Setting) -> Recorded:
        """The step, recorded at this very batch."""
        if setting not in self.known:
            self.known[setting] = self._record(setting)
        return self.known[setting]

    def scaled(self, setting: Setting) -> Recorded:
        """The step at any batch from recordings of one and two sequences, over any tp from half as many and a quarter,
        and over any cp from two others."""
        if setting in self.known:
            return self.known[setting]
        if setting not in self.derived:
            ways = (self._thicker,) if setting.batch > 2 else (self._thinner, self._longer, self._fuller)
            derived = next((recorded for way in ways if (recorded := way(setting)) is not None), None)
            if derived is None:
                return self.at(setting)
            self.derived[setting] = derived
        return self.derived[setting]

    def _there(self, setting: Setting) -> Recorded | None:
        return self.known.get(setting) or self.derived.get(setting)

    def _thicker(self, setting: Setting) -> Recorded | None:
        single, double = (self.scaled(replace(setting, batch=batch)) for batch in (1, 2))
        program = blended(single.program, double.program, setting.batch)
        return None if program is None else replace(double, program=program)

    def _thinner(self, setting: Setting) -> Recorded | None:
        """Extrapolate as a constant and a part of 1 / tp; None if not all is sharded evenly, or nothing is recorded."""
        if setting.tp % 4 or setting.tp < 8 or setting.ep > 1:
            return None
        half, quarter = (self._there(replace(setting, tp=setting.tp // n)) for n in (2, 4))
        even = all(setting.tp // n * setting.cp in self.plan(1).legal_tp for n in (1, 2, 4))
        if half is None or quarter is None or not even or half.left_out != quarter.left_out:
            return None
        if self._repeats(setting):
            return None
        program = blended(quarter.program, half.program, 2.5)  # 1/t = 1/2t + (1/2t - 1/4t) / 2, for the ranks of `half`
        units = [_cut_again(unit, two) for unit, two in zip(quarter.units, half.units, strict=True)]
        buffers = half.buffers + (half.buffers - quarter.buffers) // 2
        whole = tuple(unit for unit in units if unit is not None)
        if program is None or len(whole) < len(units):
            return None
        return replace(half, program=program, units=whole, buffers=buffers)

    def _longer(self, setting: Setting) -> Recorded | None:
        """Extrapolate as a constant and a part of 1 / cp, from recordings over two and four times the ranks."""
        if setting.cp < 2 or setting.sequence % (4 * setting.cp) or setting.ep > 1:
            return None
        twice, most = (self._there(replace(setting, cp=setting.cp * n)) for n in (2, 4))
        if twice is None or most is None or twice.left_out != most.left_out or twice.units != most.units:
            return None
        runtime = self.plan(setting.tp, setting.ep, setting.sequence_parallel, 4 * setting.cp).runtime
        for layout in {Layout.parse(exchange.layout) for exchange in runtime.of(Exchange)}:
            copies = layout.held(0, 4 * setting.cp) * 4 * setting.cp / layout.size  # ranks that hold one piece
            if layout.is_uneven or 1 < copies < 4:  # fewer ranks would hold more of it
                return None
        program = blended(most.program, twice.program, 4)
        buffers = 3 * twice.buffers - 2 * most.buffers
        return None if program is None else replace(twice, program=program, buffers=buffers)

    def _fuller(self, setting: Setting) -> Recorded | None:
        """Add to one sequence over cp, twice, by how much it is more than over twice the ranks: two sequences over
        those ranks differ from one by as many tokens, and what does not grow with tokens is the same."""
        if setting.batch != 2 or setting.cp < 2 or setting.ep > 1:
            return None
        alone, wider = replace(setting, batch=1), replace(setting, batch=1, cp=2 * setting.cp)
        single, far, two = map(self._there, (alone, wider, replace(wider, batch=2)))
        if single is None or far is None or two is None or not single.left_out == far.left_out == two.left_out:
            return None
        doubled = blended(far.program, single.program, 3)  # 2 × single - far
        middle = None if doubled is None else blended(doubled, two.program, 1.5)
        program = None if middle is None else blended(far.program, middle, 3)
        return None if program is None else replace(single, program=program)

    def _repeats(self, setting: Setting) -> bool:
        """Return whether several ranks hold one piece, as where there are fewer heads of keys than ranks."""
        runtime = self.plan(setting.tp, setting.ep, setting.sequence_parallel, setting.cp).runtime
        cut = {(rule.layout, setting.tp) for rule in runtime.parameters if rule.layout}
        cut |= {(exchange.layout, setting.cp) for exchange in runtime.of(Exchange)}
        layouts = ((Layout.parse(layout), ranks) for layout, ranks in cut)
        held = ((layout, sum(layout.held(n, ranks) for n in range(ranks))) for layout, ranks in layouts)
        return any(layout.is_split and total > layout.size for layout, total in held)

    def _record(self, setting: Setting) -> Recorded:
        size = (setting.tp, setting.ep, setting.sequence_parallel, setting.cp)
        problem: BaseException | None = None
        before = self.worked.get(setting.training)  # what fails at one setting fails at others, after seconds
        alone = setting.cp > 1 and not setting.averaged  # gradients of all blocks are summed when backward has ended
        ways = [way for way in _WAYS if not (alone and setting.training and way[0])]
        for folded, how in sorted(ways, key=lambda way: way != before):
            try:
                recorded = self._recorded(setting, self.plan(*size), folded, how)
            except AutoplanError:
                raise
            except Exception as error:  # someone else's forward may raise anything
                problem = problem or error
            else:
                self.worked[setting.training] = folded, how
                return recorded
        raise CaptureError(
            f"a step of {self.source.name} cannot run without storage: {type(problem).__name__}: {problem}"[:400],
            hint="pass inputs={argument: tensor} that its forward can run",
        ) from problem

    def _recorded(self, setting: Setting, plan: Plan, folded: bool, how: str) -> Recorded:
        checkpointing = Checkpointing(setting.checkpointing)
        tensor = TensorParallel(gather_logits=setting.gather_logits)
        inputs = inputs_of(self, setting)
        # The rank with most to do: the last of cp where ranks attend with own queries, whose keys are the most
        behind = prod(size for dim, size in setting.dims.items() if dim != "cp")
        busiest = (setting.cp - 1) * behind if plan.runtime.of(AttendAcross) else 0
        with fake_mesh(setting.dims, busiest) as mesh, quiet():
            copy = sharded_copy(
                self.module, plan, mesh, compute_dtype=setting.compute, checkpointing=checkpointing, tensor=tensor,
                folded=self.folded if folded else None, averaged=setting.averaged,
            )  # fmt: skip
            groups = group_names(mesh)
            with untouched_randomness(), where_it_runs(copy.module), one_sequence_a_row():
                tape = _run(copy, setting, inputs, groups, how)
        kernels = (*tape.kernels, *(["flash attention"] if copy.flash else []))
        return Recorded(program_of(tape), copy.left_out, copy.units, copy.buffers, kernels)


def _cut_again(quarter: UnitSize, half: UnitSize) -> UnitSize | None:
    """A unit over twice as many ranks; None where a dim that is cut cannot be halved."""
    parameters = []
    for few, more in zip(quarter.parameters, half.parameters, strict=True):
        cut = [small != large for large, small in zip(few.shape, more.shape, strict=True)]
        if any(c and (n % 2 or 2 * n != m) for c, n, m in zip(cut, more.shape, few.shape, strict=True)):
            return None
        parameters.append(replace(more, shape=tuple(n // 2 if c else n for c, n in zip(cut, more.shape, strict=True))))
    return replace(half, parameters=tuple(parameters))


def inputs_of(steps: Steps, setting: Setting) -> dict[str, Any]:
    """Keyword arguments of one call at this batch and length."""
    key = setting.batch, setting.sequence, setting.training
    if key not in steps.fed:
        users = steps.inputs if steps.inputs is not None else steps.source.inputs
        batch, length, training = key
        steps.fed[key] = step_inputs(steps.source, steps.module, users, batch, length, training=training)
    return dict(steps.fed[key])


def size_priced(steps: Steps, setting: Setting) -> tuple[int, int]:
    """Rows and tokens of the call that is recorded for this setting; 0 tokens where the model takes none."""
    few = min(setting.batch, 2)
    rows, tokens = size_of(inputs_of(steps, replace(setting, batch=few)))
    return (setting.batch if rows == few else rows), tokens


def _run(copy: Copy, setting: Setting, given: Mapping[str, Any], groups: Mapping[str, str], how: str) -> Tape:
    copy.module.train(setting.training)
    mode: Any = copy.mode if how == "fake" else KnownValues(copy.mode, supposing=how == "supposed")
    names = conventions()
    with mode:
        inputs = {name: own(value, mode, setting.compute) for name, value in given.items()}
        if setting.chunk:  # compute logits and loss of so many tokens only
            labels = inputs[names.targets][:, -setting.chunk :]
            inputs |= {names.last_logits: setting.chunk, names.targets: labels}
        loss = _loss(setting, inputs) if setting.training else None
        with torch.set_grad_enabled(setting.training):
            whole, length = setting.ranks == 1, setting.sequence if setting.cp > 1 else 0
            known_ops = KnownOps(copy.mode) if how == "fake" else None
            return record_step(copy.module, inputs, copy.marks, groups, loss_of=loss, whole=whole, length=length,
                               known=known_ops)  # fmt: skip


def _loss(setting: Setting, inputs: dict[str, Any]) -> Callable[[Any], torch.Tensor | None]:
    """The model's own loss, or the one that is asked for: then the model sees no labels."""
    loss = setting.loss
    if loss is None:
        return lambda result: loss_of(result, setting.output)
    labels = inputs.pop(conventions().targets, None)
    return lambda result: loss(result, labels)


def own(value: Any, mode: Any, dtype: torch.dtype | None) -> Any:
    """An input as a step without storage takes it."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
    return mode.admit(value) if isinstance(mode, KnownValues) else torch.empty(value.shape, dtype=value.dtype)


def loss_of(result: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
    """The loss that the model computed, else the sum of what it returned; outputs are cast as FSDP2 casts them."""
    names = conventions()
    if dtype is not None and isinstance(result, dict):
        for name, value in list(result.items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
                result[name] = value.to(dtype)
    loss = getattr(result, names.loss, None)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    outputs = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else (result,)
    sums = [t.float().sum() for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum(sums[1:], sums[0]) if sums else None
