"""One step of a sharded model at full size, without storage and without other ranks, with every collective it takes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoplan.api import parallelize
from autoplan.capture.dry_run import fake_mode, quiet
from autoplan.capture.fold import fold
from autoplan.capture.known_values import KnownValues
from autoplan.common.errors import AutoplanError, CaptureError
from autoplan.common.options import check_argument
from autoplan.common.random_values import untouched_randomness
from autoplan.forecast.asked import Asked, check_experts, how_priced, mesh_sizes, notes_on_question
from autoplan.forecast.devices import load_device
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.recording.record import Marks, local_piece, record_step
from autoplan.forecast.recording.tape import Message
from autoplan.forecast.sharded import as_on_a_gpu, fake_mesh, faker, group_names
from autoplan.forecast.step import Setting, Steps, inputs_of, loss_of, size_priced
from autoplan.hf.source import Model, resolve
from autoplan.patches.kernels import one_sequence_a_row, where_it_runs
from autoplan.values import Plan
from autoplan.values.estimate import Sent

_ESTIMATED = {"activation_checkpointing", "mp_policy", "reshard_after_forward", "gather_logits"}  # of `parallelize`


@dataclass(frozen=True)
class DryRun:
    """Shapes, bytes of this rank's parameters, gradients and AdamW's states, and each collective in order. `peak`: as
    `estimate` has it, without what device and libraries take; None where it has none for these options. `how`, `notes`:
    what was requested besides sizes, and where what ran differs from that."""

    model: str
    mesh: tuple[tuple[str, int], ...]
    rank: int
    outputs: tuple[tuple[str, tuple[int, ...]], ...]
    parameters: int
    gradients: int
    messages: tuple[Message, ...]
    states: int = 0
    peak: int | None = None
    batch: int = 1
    sequence: int = 0
    dtype: str = ""
    dtype_origin: str = ""
    how: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sent(self) -> tuple[Sent, ...]:
        return summed(self.messages)


def summed(messages: tuple[Message, ...]) -> tuple[Sent, ...]:
    """Return how many of each kind were sent over each dim, with the bytes of their whole values."""
    totals: dict[tuple[str, str], list[int]] = {}
    for message in messages:
        total = totals.setdefault((message.dim, message.kind), [0, 0])
        total[0] += 1
        total[1] += max(message.sent, message.received)
    return tuple(Sent(dim, kind, number, size) for (dim, kind), (number, size) in totals.items())


def dry_run(
    model: Model,
    *,
    mesh: Mapping[str, int] | str,
    rank: int = 0,
    batch: int = 1,
    sequence: int = 2048,
    sequence_parallel: bool = False,
    ep_size: int = 1,
    plan: Plan | None = None,
    inputs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> DryRun:
    """Run `parallelize`, a forward, a backward and an optimizer step as rank `rank` of `mesh` would, on shapes alone.

    `ep_size`: whole experts lie on the ranks of tp. `options` are those of `parallelize`.
    """
    sizes = dict(mesh_sizes(mesh))
    check_argument("rank", rank, int, "pass an integer from 0")
    check_experts(tuple(sizes.items()), ep_size)
    estimated = {name: value for name, value in options.items() if name in _ESTIMATED}
    how: dict[str, Any] = {"sequence_parallel": sequence_parallel, "experts": ep_size == sizes.get("tp", 1) > 1}
    question = Asked(tuple(sizes.items()), batch, sequence, **how, **estimated)
    steps = Steps(resolve(model, trust_remote_code=trust_remote_code, inputs=inputs), plan, inputs)
    tp, ep, cp = (sizes.get(dim, 1) for dim in ("tp", "ep", "cp"))
    setting = Setting(tp, max(ep_size, ep), sequence_parallel, batch=batch, sequence=sequence, cp=cp)
    planned = steps.plan(setting.tp, setting.ep, sequence_parallel, setting.cp)
    keywords = inputs_of(steps, setting)
    unpacked = [f"the checkpoint is quantised ({weight.scheme.title}); the step ran with unquantised weights"
                for weight in steps.packed[:1]]  # fmt: skip
    problem: Exception | None = None
    for knowing in (False, True):
        try:
            ran, pairs = _run(steps, planned, sizes, rank, keywords, options, knowing, sequence)
            rows, tokens = size_priced(steps, setting)
            return replace(
                ran, peak=_peak(steps, question) if estimated == options else None, batch=rows, sequence=tokens,
                dtype=steps.dtype, dtype_origin=steps.source.dtype_origin, how=how_priced(steps, question, setting),
                notes=(*notes_on_question(steps, question, setting, pairs), *unpacked),
            )  # fmt: skip
        except RuntimeError as error:  # its Python asks for numbers: run it again with those that are known
            problem = problem or error
    raise CaptureError(
        f"a step of {steps.source.name} cannot run without storage: {type(problem).__name__}: {problem}"[:400],
        hint="pass inputs={argument: tensor} that its forward can run",
    ) from problem


def _run(
    steps: Steps, plan: Plan, sizes: dict[str, int], rank: int, keywords: dict[str, Any], options: dict[str, Any],
    knowing: bool, sequence: int,
) -> tuple[DryRun, Mapping[str, float]]:  # fmt: skip
    mode = fake_mode()
    shapes: dict[str, tuple[int, ...]] = {}

    def loss(result: Any) -> torch.Tensor | None:
        items = result.items() if isinstance(result, dict) else [("output", result)]
        shapes.update({name: tuple(value.shape) for name, value in items if isinstance(value, torch.Tensor)})
        return loss_of(result, None)

    with (
        fake_mesh(sizes, rank) as mesh, quiet(), untouched_randomness(), one_sequence_a_row(), ExitStack() as stack,
    ):  # fmt: skip
        model = fold(steps.module, faker(mode, None), fold=False).module
        stack.enter_context(where_it_runs(model))
        as_on_a_gpu(model)
        parallelize(model, mesh, plan, check=False, **options)
        model.train()
        with KnownValues(mode) if knowing else mode:
            groups, length = group_names(mesh), sequence if plan.cp_size > 1 else 0
            tape = record_step(model, keywords, Marks(), groups, loss_of=loss, whole=plan.ranks == 1, length=length)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            optimizer.step()
        pieces = sum(local_piece(p).nbytes for p in model.parameters())
        grown = sum(local_piece(p.grad).nbytes for p in model.parameters() if p.grad is not None)
    states = (local_piece(value) for state in optimizer.state.values() for value in state.values())
    messages = tuple(item for item in tape.items if isinstance(item, Message))
    ran = DryRun(steps.source.name, tuple(sizes.items()), rank, tuple(shapes.items()), pieces, grown, messages,
                 sum(state.nbytes for state in states if state.dim()))  # fmt: skip
    return ran, tape.pairs


def _peak(steps: Steps, question: Asked) -> int | None:
    try:
        priced = estimate_with(steps, question, load_device("h100"))
    except AutoplanError:  # what runs whole may not run folded
        return None
    return priced.peak - priced.parts.overhead
