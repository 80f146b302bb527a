"""`autoplan report`: a plan as a page to read and to send."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli.estimate import ALL, Again, Batch, Gpu, How, Length, checkpointing_of, on_mesh
from autoplan.cli.shared import FINDINGS, OK, Cut, EpSize, LongCut, Trust, note, progress
from autoplan.common.errors import AutoplanError

if TYPE_CHECKING:
    from autoplan.emit.pages.markup import WhatIf
    from autoplan.values import Plan
    from autoplan.values.estimate import Estimate


def report(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As in `autoplan plan`, or a plan file.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Page to write (.html).")],
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Number of ranks; a plan file has its own.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", help="Mesh such as dp_shard=8,tp=8, for the memory of a rank; default: tp alone."),
    ] = None,
    ep: EpSize = 1,
    cp: LongCut = 1,
    batch: Batch = 1,
    sequence: Length = 2048,
    checkpointing: Again = "none",
    train: How = ALL,
    gpu: Gpu = "h100",
    sequence_parallel: Cut = False,
    what_if: Annotated[
        bool,
        typer.Option("--what-if/--no-what-if", help="Also plan other valid sizes, selectable on the page."),
    ] = True,
    trust_remote_code: Trust = False,
) -> None:
    """Write a plan as one HTML file: what is split, what moves, what fills the memory, how sure it is."""
    from autoplan.emit.pages.markup import check_page

    check_page(output)
    from autoplan.forecast.asked import mesh_sizes

    mesh = mesh if mesh is None and cp == 1 else on_mesh(mesh, cp, tp or 1)
    sizes = {} if mesh is None else dict(mesh_sizes(mesh))
    cp = sizes.get("cp", 1)
    how: dict[str, Any] = {"sequence_parallel": sequence_parallel, "trust_remote_code": trust_remote_code}
    tp = tp or sizes.get("tp", 1 if cp > 1 else None)
    plan = _made(model, tp, ep if ep > 1 else sizes.get("ep", 1), how | ({"cp_size": cp} if cp > 1 else {}))
    if sizes.get("tp", plan.tp_size) != plan.tp_size:
        raise AutoplanError(f"--mesh {mesh} has tp {sizes['tp']}, the plan tp {plan.tp_size}", hint="pass one of them")
    how |= {"batch": batch, "sequence": sequence, "train": train.value}
    how |= {"activation_checkpointing": checkpointing_of(checkpointing)}
    priced, memory = _estimated(model, mesh, plan, gpu, how)
    sizes = sizes or ({"tp": plan.tp_size} if priced is not None else {})
    others = _others(model, plan, sizes, gpu, how) if what_if else {}
    plan.report(output, estimate=priced, memory=memory, what_if=others)
    note(f"written to {output}")
    raise typer.Exit(FINDINGS if plan.proof.failed else OK)


def _made(model: str, tp: int | None, ep: int, how: dict[str, Any]) -> Plan:
    import autoplan
    from autoplan.decide.written_plans.plan_file import load_plan, names_plan_file

    if names_plan_file(model):
        return load_plan(model)
    if tp is None:
        raise typer.BadParameter("required unless MODEL is a plan file, or --mesh has it", param_hint="--tp")
    how = how | ({"ep_size": ep} if ep > 1 else {})
    with progress(f"planning {model} for tp {tp}"):
        return autoplan.plan(model, tp_size=tp, **how)


def _others(model: str, plan: Plan, sizes: dict[str, int], gpu: str, how: dict[str, Any]) -> dict[int, WhatIf]:
    """Return plans at other sizes; with a mesh also the cost of a step on as many ranks, if these are divisible."""
    from autoplan.decide.written_plans.plan_file import names_plan_file
    from autoplan.forecast.choose import other_sizes
    from autoplan.forecast.devices import load_device

    if names_plan_file(model) or plan.tp_size == 1 or plan.cp_size > 1:
        return {}
    with progress(f"planning {model} at other sizes"):
        return other_sizes(model, plan, load_device(gpu), sizes, **how)


def _estimated(
    model: str, mesh: str | None, plan: Plan, gpu: str, how: dict[str, Any]
) -> tuple[Estimate | None, int | None]:
    """Return the estimate and the memory; without a mesh on tp ranks alone, and none if that is impossible."""
    import autoplan
    from autoplan.decide.written_plans.plan_file import names_plan_file
    from autoplan.forecast.devices import load_device

    if names_plan_file(model):
        if mesh is None:
            return None, None
        raise AutoplanError("--mesh needs the model, not a plan file", hint="omit --mesh, or pass the model")
    on = mesh or (f"ep={plan.ep_size}" if plan.tp_size == 1 < plan.ep_size else f"tp={plan.tp_size}")
    experts = plan.ep_size if plan.tp_size > 1 else 1  # otherwise they are a mesh dim
    try:
        with progress(f"estimating {model} on {on}"):
            return autoplan.estimate(model, mesh=on, device=gpu, ep_size=experts, **how), load_device(gpu).memory
    except AutoplanError as error:
        if mesh is not None:
            raise
        note(f"no memory on the page: {error.message.splitlines()[0]}")
        return None, None
