"""Which mesh to take: every legal way to lay a model over so many GPUs, estimated, and put in order; and which tp.

choose ── Sweep (sizes that divide, each estimated) ── rows in order ── Choice

A size is planned by itself: what divides at one does not at another. Planning and recording share one run of the model,
so a size takes about a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from os import PathLike
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoplan.api import parallelize
from autoplan.check.pipeline import proven_plan
from autoplan.common.errors import AutoplanError, IndivisibleError
from autoplan.common.options import Wish, bytes_in, check_argument, check_count, check_ranks
from autoplan.common.stages import seldom_collected
from autoplan.emit.pages.markup import WhatIf
from autoplan.emit.tables.estimate_table import shown_sizes
from autoplan.execute.data_parallel.mesh_dims import ALIASES
from autoplan.forecast.asked import Asked, mesh_sizes
from autoplan.forecast.devices import Device, load_device
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.step import Loss, Setting, Steps, inputs_of
from autoplan.forecast.sweep import Sweep
from autoplan.forecast.trained import LORA_RANK, check_adapters, targets_of
from autoplan.hf.driving import script_text
from autoplan.hf.source import Model, Source, resolve
from autoplan.values import Plan
from autoplan.values.estimate import Estimate, Row, Shown, done_above, named_dims


@dataclass(frozen=True)
class Choice(Shown):
    """The rows in order, those that fit first and the fastest before others. `enough`: the smallest number of GPUs
    that would do, where none fits. `elsewhere`: the fastest that fit, of those that other engines would run. `margin`:
    the share of a device's memory that is left free; `memory` is without it. `how`: what was asked of all rows;
    `unused`: what of the question has no part in any."""

    source: Source = field(repr=False)
    rows: tuple[Row, ...]
    gpus: int
    memory: int
    device: Device
    sweep: Sweep = field(repr=False, compare=False)
    batch: int
    dropped: tuple[str, ...] = ()
    enough: int | None = None
    elsewhere: tuple[Row, ...] = ()
    margin: float = 0.0
    how: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def steps(self) -> Steps:
        return self.sweep.steps

    @property
    def fits(self) -> bool:
        return bool(self.rows) and self.rows[0].fits

    @property
    def best(self) -> Row:
        if not self.fits:
            more = f"{self.enough} such GPUs would suffice" if self.enough else "no number of such GPUs suffices"
            text = f"{self.source.name} does not fit {self.gpus} GPUs of {self.memory / 1e9:.0f} GB: "
            raise AutoplanError(text + (self.rows[0].binds if self.rows else "no valid size"), hint=more)
        return self.rows[0]

    @property
    def nearest(self) -> Row | None:
        """The row that misses the least, of those that do not fit."""
        return next((row for row in self.rows if not row.fits), None)

    def against_first(self, mesh: str | Mapping[str, int]) -> tuple[int, Row, dict[str, float]]:
        """The place of a mesh's best row, the row, and what its step takes more, in shares of the first row's. A mesh
        that others run, or that was not looked at, is estimated; its place is 0."""
        purposes = {name: purpose for purpose, names in reversed(ALIASES.items()) for name in names}
        sizes = tuple((purposes.get(name, name), size) for name, size in mesh_sizes(mesh, priced=("pp",)))
        named, first = named_dims(sizes), self.rows[0].estimate.time
        row = next((row for row in self.rows if row.mesh == named), None)
        place = 0 if row is None else 1 + self.rows.index(row)
        if row is None:
            row = self.sweep.of_mesh(sizes, self.gpus, self.batch)
        assert first is not None and row.estimate.time is not None, "choose always estimates times"
        parts, others = first.parts, row.estimate.time.parts
        more = {name: others.get(name, 0.0) - parts.get(name, 0.0) for name in {**parts, **others}}
        return place, row, {name: seconds / first.total for name, seconds in more.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """Return which of the options have no effect, and the notes on the estimate of the first row."""
        unused = (f"no effect: {text}" for text in self.unused)
        return tuple(dict.fromkeys((*unused, *(self.rows[0].estimate.notes if self.rows else ()))))

    @property
    def plan(self) -> Plan:
        """The plan of the best row, proven."""
        self._refuse_supposed_adapters()
        best = self.best
        return proven_plan(self.source, Wish(best.tp, best.ep, best.sequence_parallel, cp_size=best.cp))

    def mesh(self, device_type: str = "cuda") -> DeviceMesh:
        """The best row's mesh over the ranks of this job; for inference this rank's part of it, for other copies of
        the model know nothing of this one."""
        alone = self.best.estimate.train == "inference"
        sizes = dict(self.best.estimate.mesh) if alone else self.best.mesh
        whole = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return whole[list(sizes)[-1]] if alone else whole

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
        """Shard `model` as the best row says."""
        return parallelize(model, self.mesh() if mesh is None else mesh, self.plan, **self.options())

    def options(self) -> dict[str, Any]:
        """The keywords of `parallelize` for the best row."""
        best = self.best
        trains = best.estimate.train != "inference"
        options: dict[str, Any] = {"activation_checkpointing": trains and best.checkpointing or None}
        options["reshard_after_forward"] = best.reshard if "dp_shard" in best.mesh else None
        for name in ("mp_policy", "cpu_offload", "gather_logits"):
            options[name] = trains and getattr(self.sweep.common, name) or None
        return {name: value for name, value in options.items() if value is not None}

    def pictured(self, most: int = 12) -> dict[int, WhatIf]:
        """The plans of the first rows, by the row's number. Rows that cut along the sequence too are drawn without."""
        rows = enumerate(self.rows[:most], 1)
        return {n: WhatIf(self.steps.plan(row.tp, row.ep, cp=row.cp), row.estimate) for n, row in rows}

    def script(self) -> str:
        """A program for torchrun that trains, or generates, so."""
        self._refuse_supposed_adapters()
        best = self.best.estimate
        common = self.sweep.common
        plain = isinstance(common.mp_policy, str | bool | None)
        own = "a loss of your own" if common.loss else "" if plain else "a mixed-precision policy of your own"
        if best.run_by or own:
            hint = "choose without loss= and what others run, and with mp_policy='bf16', to get a script"
            raise AutoplanError(f"a script runs what autoplan runs, not {best.run_by or own}", hint=hint)
        inputs = inputs_of(self.steps, Setting(sequence=best.sequence, training=best.train != "inference"))
        packed = bool(self.steps.packed)
        return script_text(self.source, self.best, self.options(), self.device.per_node, inputs, packed)

    def _refuse_supposed_adapters(self) -> None:
        if self.steps.adapters:
            raise AutoplanError(
                f"{self.source.name} has no adapters: rank {self.steps.lora_rank} was assumed for the estimate",
                hint="add yours (peft's get_peft_model, on meta), and choose for that model to get a plan",
            )

    def report(self, path: str | PathLike[str]) -> None:
        """Write a page to look at: every way with its memory, and the plan of the best one, proven."""
        done_above("Choice.report", self, path)


def parse_memory(text: str | int) -> int:
    """Bytes of "80GB", "79GiB" or a number."""
    hint = "write it like 80GB or 79GiB"
    check_argument("memory", text, (int, str), hint)
    size = text if isinstance(text, int) else bytes_in(text)
    if size is None or size < 2**20:
        raise AutoplanError(f"memory {text!r} is not a size" + f": {size} bytes" * (size is not None), hint=hint)
    return size


def choose(
    model: Model,
    *,
    gpus: int,
    memory: str | int | None = None,
    gpu: str | Device = "h100",
    per_node: int | None = None,
    sequence: int = 2048,
    global_batch: int = 0,
    train: str = "full",
    lora_rank: int = LORA_RANK,
    lora_targets: str | Sequence[str] | None = None,
    lora_dropout: float = 0.0,
    lora_dtype: str = "float32",
    optimizer: str = "adamw",
    mp_policy: Any = None,
    gather_logits: bool = False,
    loss: Loss | None = None,
    matmuls: str | None = None,
    chunked_loss: bool = False,
    gradient_sync: str = "each",
    exchange_experts: int = 1,
    shard_optimizer: bool = False,
    virtual_stages: int = 1,
    compiled: bool = False,
    cpu_offload: bool = False,
    concurrency: int = 0,
    cache_dtype: str | None = None,
    margin: float = 0.0,
    inputs: Mapping[str, Any] | None = None,
    weights: str | None = None,
    trust_remote_code: bool = False,
) -> Choice:
    """Return every valid mesh and way to run `model` on `gpus` devices of `memory` each, estimated and ranked.

    `global_batch`: sequences a step of all ranks (by default one for each GPU); for "inference", those held at once, or
    with `concurrency` (by default `global_batch`, of all copies of the model together) the prompts that are read.
    `train`, `lora_rank`, `lora_targets`, `lora_dropout`, `lora_dtype`, `weights`, `gather_logits`, `loss`, `matmuls`,
    `chunked_loss`, `gradient_sync`, `exchange_experts`, `shard_optimizer`, `compiled`, `cpu_offload`, `cache_dtype`:
    see `estimate`; they hold for every row, `virtual_stages` for those with a pipeline, which others run.
    `margin`: the share of the memory that is left free, for what an allocator reserves and does not use.
    The device is one of rules/devices, or a file of one's own.
    """
    check_ranks("gpus", gpus)
    if per_node is not None:
        check_count("per_node", per_node)
    check_adapters(train, lora_rank, lora_targets, lora_dropout, lora_dtype)
    if global_batch != 0 or isinstance(global_batch, bool):
        check_count("global_batch", global_batch)
    device = gpu if isinstance(gpu, Device) else load_device(gpu)
    device = device if per_node is None else replace(device, per_node=per_node)
    check_count("virtual_stages", virtual_stages)
    mesh = (("dp_replicate", gpus), ("dp_shard", 1)) if shard_optimizer else (("dp_shard", gpus),)
    question = Asked(mesh, 1, sequence, mp_policy=mp_policy, optimizer=optimizer, train=train,
                  gather_logits=gather_logits, loss=loss, matmuls=matmuls, chunked_loss=chunked_loss,
                  compiled=compiled, cpu_offload=cpu_offload, concurrency=concurrency, cache_dtype=cache_dtype,
                  gradient_sync=gradient_sync, exchange_experts=exchange_experts,
                  shard_optimizer=shard_optimizer)  # fmt: skip
    sequences = global_batch or (min(gpus, concurrency) if concurrency else gpus)
    if 0 < concurrency < sequences:
        raise AutoplanError(f"concurrency={concurrency} with global_batch={global_batch}",
                            hint="concurrency must be at least global_batch")  # fmt: skip
    if not isinstance(margin, int | float) or isinstance(margin, bool) or not 0 <= margin < 1:
        raise AutoplanError(f"margin={margin!r}", hint="pass a fraction of the memory, such as 0.1")
    source = resolve(model, trust_remote_code=trust_remote_code, inputs=inputs)
    source = source if weights is None else source.stored_as(weights)
    rank = lora_rank if train == "lora" else 0
    steps = Steps(source, None, inputs, rank, targets_of(lora_targets), lora_dropout, lora_dtype)
    size = parse_memory(memory) if memory is not None else device.memory
    size = int(size * (1 - margin))
    sweep = Sweep(steps, device, size, question, virtual_stages)
    with seldom_collected():
        rows = sweep.rows(gpus, sequences)
    if not rows and sequences != gpus:
        raise _no_batch(sweep, gpus, sequences)
    rows = sweep.settled(rows)
    enough = None if rows and rows[0].fits else sweep.enough(gpus, global_batch or (sequences if concurrency else 0))
    batch = f"{sequences} sequence{'s' * (sequences > 1)} {'held at once' if train == 'inference' else 'a step'}"
    if concurrency:
        batch = f"{concurrency} sequences held at once, {sequences} prompts read at a time"
    dropped = tuple(dict.fromkeys(sweep.dropped))
    return Choice(source, tuple(rows), gpus, size, device, sweep, sequences, dropped, enough,
                  tuple(sweep.elsewhere(gpus, sequences)), margin, (batch, *question.how), question.unused)  # fmt: skip


def _no_batch(sweep: Sweep, gpus: int, batch: int) -> AutoplanError:
    copies = sorted({gpus // split.ranks for split in sweep.splits(gpus)})
    fewer = max(batch // n * n for n in copies)
    more = min(-(-batch // n) * n for n in copies)
    return IndivisibleError(
        f"a global batch of {batch} cannot be divided over {' or '.join(map(str, copies))} copies of the model "
        f"on {gpus} GPUs",
        hint=f"nearest valid: {f'{fewer} or ' if fewer else ''}{more}",
    )


_LENGTHS = (2048, 512)  # tokens of a sequence: some models know few positions
_MOST = 6


@dataclass(frozen=True)
class Sizes:
    """A plan and an estimate for each size of tp; `why`: there is none, or not for all of them."""

    plans: Mapping[int, Plan] = field(default_factory=dict)
    estimates: Mapping[int, Estimate] = field(default_factory=dict)
    why: str = ""


def estimated_sizes(
    model: Model,
    plan: Plan,
    device: Device,
    *,
    inputs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Sizes:
    """One training step of one sequence on each rank of {"tp": n}, for the plan's own size and those near it."""
    steps = Steps(resolve(model, trust_remote_code=trust_remote_code, inputs=inputs), plan, inputs)
    plans = _planned(steps, plan)
    estimates: dict[int, Estimate] = {}
    why = ""
    for length in _LENGTHS:
        try:
            estimates = {plan.tp_size: _estimate(steps, plan, plan.tp_size, length, device)}
            break
        except AutoplanError as error:
            why = why or error.message.splitlines()[0]
    if not estimates:
        return Sizes(plans, why=why)
    why = ""
    for tp in plans:
        try:
            estimates.setdefault(tp, _estimate(steps, plan, tp, length, device))
        except AutoplanError as error:
            why = f"at tp {tp}: {error.message.splitlines()[0]}"
    return Sizes(plans, dict(sorted(estimates.items())), why)


def other_sizes(
    model: Model, plan: Plan, device: Device, mesh: Mapping[str, int], *, trust_remote_code: bool = False,
    sequence_parallel: bool = False, **fields: Any,
) -> dict[int, WhatIf]:  # fmt: skip
    """The plan at the other sizes that are shown; with a `mesh` of ranks a step there, on as many ranks. `fields`: the
    other fields of `Asked`."""
    steps = Steps(resolve(model, trust_remote_code=trust_remote_code))
    ranks = prod(mesh.values())
    what_ifs: dict[int, WhatIf] = {}
    for tp, planned in _planned(steps, plan).items():
        if tp == plan.ranks:
            continue
        estimate = None
        if mesh and ranks % tp == 0:
            sizes = (("dp_shard", ranks // tp), ("tp", tp))
            along = sequence_parallel and tp > 1
            question = Asked(sizes, **fields, sequence_parallel=along, experts=1 < tp == planned.ep_size)
            with suppress(AutoplanError):  # at this size no step can be: the page shows the plan
                estimate = estimate_with(steps, question, device)
        what_ifs[tp] = WhatIf(planned, estimate)
    return what_ifs


def _planned(steps: Steps, plan: Plan) -> dict[int, Plan]:
    """The plan, and those at the sizes nearest to its own; sizes that cannot be planned are left out."""
    plans = {plan.tp_size: plan}
    if plan.cp_size > 1:  # its sizes of tp are for that size of cp
        return plans
    near = sorted(shown_sizes(plan), key=lambda size: abs(size.bit_length() - plan.tp_size.bit_length()))
    for tp in near[:_MOST]:
        try:
            experts = tp if 1 < plan.tp_size == plan.ep_size else 1
            plans.setdefault(tp, steps.plan(tp, experts, plan.sequence_parallel and tp > 1))
        except IndivisibleError:
            continue
    return dict(sorted(plans.items()))


def _estimate(steps: Steps, plan: Plan, tp: int, length: int, device: Device) -> Estimate:
    split = ("ep", plan.ep_size) if tp == plan.tp_size == 1 < plan.ep_size else ("tp", tp)
    mesh = (("dp_shard", 1), ("cp", plan.cp_size), split) if plan.cp_size > 1 else (split,)
    along, experts = plan.sequence_parallel and tp > 1, 1 < plan.tp_size == plan.ep_size and tp > 1
    return estimate_with(steps, Asked(mesh, 1, length, sequence_parallel=along, experts=experts), device)
