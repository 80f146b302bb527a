"""`autoplan choose`, `dryrun` and `estimate`: the mesh to choose, whether it fits; `report`: a plan as a page."""

from __future__ import annotations

from enum import StrEnum
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli.shared import (
    FINDINGS,
    OK,
    AsJson,
    Cut,
    EpSize,
    LongCut,
    Model,
    Output,
    Page,
    Trust,
    emit,
    note,
    page_path,
    plan_of,
    progress,
    write_report,
)
from autoplan.common.errors import AutoplanError
from autoplan.values.estimate import TRAIN

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoplan.emit.pages.markup import WhatIf
    from autoplan.values import Plan
    from autoplan.values.estimate import Estimate

Train = StrEnum("Train", [(way, way) for way in TRAIN])  # type: ignore[misc]  # the kinds of training
ALL = Train("full")

Mesh = Annotated[
    str | None, typer.Option("--mesh", help="Mesh such as dp_shard=8,tp=8 or dp_shard=8,cp=8; default: one rank.")
]
Ranks = Annotated[int, typer.Option("--tp", min=1, help="Split over N ranks; alone it is --mesh tp=N.")]
Length = Annotated[int, typer.Option("--sequence", min=2, help="Tokens per sequence.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Sequences per micro-batch of a rank.")]
Gpu = Annotated[str, typer.Option("--gpu", help="One of rules/devices, or a .toml of your own.")]
Again = Annotated[
    str, typer.Option("--checkpointing", help="none, block, submodule or selective: what backward recomputes.")
]
Estimated = Annotated[
    bool, typer.Option("--memory/--no-memory", help="Estimate a training step of a rank at each valid tp size.")
]
AskedGpu = Annotated[
    str | None, typer.Option("--gpu", help="One of rules/devices, or a .toml of your own; implies --memory.")
]
How = Annotated[Train, typer.Option("--train", help="Train all, train adapters, or run inference with a KV cache.")]
LoraRank = Annotated[
    int, typer.Option("--lora-rank", min=1, help="With --train lora: adapter rank, if the model has no adapters.")
]
LoraTargets = Annotated[
    str | None,
    typer.Option("--lora-targets", help="Names of the layers that get adapters, or all-linear; default: peft's."),
]
LoraDtype = Annotated[str, typer.Option("--lora-dtype", help="Of adapters: float32, as peft casts them, or model.")]
LoraDropout = Annotated[float, typer.Option("--lora-dropout", min=0.0, max=0.99, help="Dropout of the adapters.")]
Updates = Annotated[str, typer.Option("--optimizer", help="adamw, adamw8bit, muon, adafactor … (docs/estimate.md).")]
WeightsStored = Annotated[
    str | None, typer.Option("--weights", "--dtype", help="Storage format, if not the config's: bfloat16, fp8, nf4 …")
]

Precision = Annotated[
    str | None,
    typer.Option("--mixed-precision", help="bf16: float32 weights are gathered and computed with in bfloat16."),
]
Matmuls = Annotated[str | None, typer.Option("--matmuls", help="fp8: matmuls at the device's float8 rate.")]

Compiled = Annotated[bool, typer.Option("--compiled", help="Price elementwise ops as torch.compile fuses them.")]
Offload = Annotated[bool, typer.Option("--cpu-offload", help="FSDP2 keeps its shards in host memory.")]
Concurrency = Annotated[int, typer.Option("--concurrency", min=0, help="For inference: sequences held at once.")]
CacheDtype = Annotated[str | None, typer.Option("--cache-dtype", help="KV cache dtype: bfloat16, fp8 …")]
Summed = Annotated[
    str, typer.Option("--gradient-sync", help="each, or last: earlier micro-batches keep unsharded gradients.")
]
Exchange = Annotated[
    int, typer.Option("--exchange-experts", min=1, help="Place experts on this many ranks of dp_shard.")
]
ShardStates = Annotated[bool, typer.Option("--shard-optimizer", help="Shard its states over dp_replicate (ZeRO-1).")]
Stages = Annotated[int, typer.Option("--virtual-stages", min=1, help="Stages on each rank of pp (interleaved 1F1B).")]
Chunked = Annotated[bool, typer.Option("--chunked-loss", help="Compute logits for an eighth of the tokens at a time.")]

# Of the options of `choose` and `estimate`, those that are not keywords of autoplan's functions by the same name
_OF_A_COMMAND = ("cp", "tp", "checkpointing", "like", "row", "script", "page", "as_json", "output")


def choose(
    model: Model,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs.")],
    memory: Annotated[str | None, typer.Option(help="Memory per GPU, such as 80GB; default: the device's.")] = None,
    gpu: Gpu = "h100",
    per_node: Annotated[int | None, typer.Option(min=1, help="GPUs per node; default: the device's.")] = None,
    sequence: Length = 2048,
    global_batch: Annotated[int, typer.Option(min=0, help="Sequences per step over all ranks; 0: one per GPU.")] = 0,
    train: How = ALL,
    lora_rank: LoraRank = 8,
    lora_targets: LoraTargets = None,
    lora_dropout: LoraDropout = 0.0,
    lora_dtype: LoraDtype = "float32",
    weights: WeightsStored = None,
    optimizer: Updates = "adamw",
    mp_policy: Precision = None,
    matmuls: Matmuls = None,
    chunked_loss: Chunked = False,
    gradient_sync: Summed = "each",
    exchange_experts: Exchange = 1,
    shard_optimizer: ShardStates = False,
    virtual_stages: Stages = 1,
    compiled: Compiled = False,
    cpu_offload: Offload = False,
    concurrency: Concurrency = 0,
    cache_dtype: CacheDtype = None,
    margin: Annotated[float, typer.Option("--margin", min=0.0, max=0.99, help="Fraction of memory left free.")] = 0.0,
    like: Annotated[
        str | None, typer.Option("--like", help="Show the row of this mesh, and its extra cost over the first.")
    ] = None,
    row: Annotated[int | None, typer.Option("--explain", min=1, metavar="ROW", help="Show one row in full.")] = None,
    script: Annotated[bool, typer.Option("--script", help="Print a program for torchrun instead.")] = False,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    page: Page = None,
    output: Output = None,
) -> None:
    """Say which mesh to take for so many GPUs: every legal one, ranked. Exit code 1 where none fits."""
    options = {name: value for name, value in locals().items() if name not in _OF_A_COMMAND} | {"train": train.value}
    import autoplan
    from autoplan.emit.tables.estimate_table import against_view, choice_view, row_to_dict, row_view
    from autoplan.forecast.asked import mesh_sizes

    if like is not None and (ranks := prod(size for _, size in mesh_sizes(like, priced=("pp",)))) != gpus:
        raise AutoplanError(f"--like {like} has {ranks} ranks, for {gpus} GPUs", hint="pass a mesh of all GPUs")
    with progress(f"choosing among meshes of {gpus} GPUs for {model}"):
        choice = autoplan.choose(**options)
    if row is not None and row > len(choice.rows):
        raise AutoplanError(f"there is no row {row}", hint=f"choose 1 to {len(choice.rows)}")
    against = None if like is None else against_view(*choice.against_first(like))
    write_report(choice, page)
    if script:
        emit(choice.script(), None, False, output)
    elif row is not None:
        emit(row_view(choice.rows[row - 1]), row_to_dict(choice.rows[row - 1]), as_json, output)
    else:
        near = None if choice.nearest is None else choice.rows.index(choice.nearest) + 1
        data: dict[str, Any] = {
            "model": choice.source.name, "gpus": gpus, "memory_bytes": choice.memory, "fits": choice.fits,
            "enough": choice.enough, "nearest": near, "dropped": list(choice.dropped), "notes": list(choice.notes),
            "elsewhere": [row_to_dict(entry) for entry in choice.elsewhere], "like": against, "margin": choice.margin,
            "rows": [row_to_dict(entry) | {"tie": entry.ties(choice.rows[0])} for entry in choice.rows],
        }  # fmt: skip
        emit(choice_view(choice), data, as_json, output)
        if against is not None and not as_json:
            note(against)
    raise typer.Exit(OK if choice.fits else FINDINGS)


def estimate(
    model: Model,
    mesh: Mesh = None,
    tp: Ranks = 1,
    cp: LongCut = 1,
    batch: Batch = 1,
    sequence: Length = 2048,
    checkpointing: Again = "none",
    train: How = ALL,
    lora_rank: LoraRank = 8,
    lora_targets: LoraTargets = None,
    lora_dropout: LoraDropout = 0.0,
    lora_dtype: LoraDtype = "float32",
    weights: WeightsStored = None,
    optimizer: Updates = "adamw",
    device: Gpu = "h100",
    sequence_parallel: Cut = False,
    ep_size: EpSize = 1,
    cpu_offload: Offload = False,
    mp_policy: Precision = None,
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Micro-batches per step.")] = 1,
    reshard_after_forward: Annotated[
        bool | None, typer.Option("--reshard/--no-reshard", help="Free gathered weights after forward, or keep them.")
    ] = None,
    matmuls: Matmuls = None,
    chunked_loss: Chunked = False,
    compiled: Compiled = False,
    gradient_sync: Summed = "each",
    exchange_experts: Exchange = 1,
    shard_optimizer: ShardStates = False,
    virtual_stages: Stages = 1,
    concurrency: Concurrency = 0,
    cache_dtype: CacheDtype = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Say what one step costs on one rank of a mesh: memory at its peak, messages, time."""
    options = {name: value for name, value in locals().items() if name not in _OF_A_COMMAND} | {"train": train.value}
    options |= {"mesh": on_mesh(mesh, cp, tp), "activation_checkpointing": checkpointing_of(checkpointing)}
    import autoplan
    from autoplan.emit.tables.estimate_table import estimate_view

    with progress(f"estimating {model} on {options['mesh']}"):
        priced = autoplan.estimate(**options)
    emit(estimate_view(priced), priced.to_dict(), as_json, output)


def dryrun(
    model: Model,
    mesh: Mesh = None,
    tp: Ranks = 1,
    cp: LongCut = 1,
    rank: Annotated[int, typer.Option(min=0, help="Rank to run as.")] = 0,
    batch: Batch = 1,
    sequence: Length = 2048,
    checkpointing: Again = "none",
    sequence_parallel: Cut = False,
    ep: EpSize = 1,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Run one step of the sharded model at its real size as one rank would, on shapes alone; list every message."""
    from autoplan.emit.tables.estimate_table import dry_run_to_dict, dry_run_view

    mesh = on_mesh(mesh, cp, tp)
    options: dict[str, Any] = {"activation_checkpointing": again} if (again := checkpointing_of(checkpointing)) else {}
    with progress(f"running {model} on {mesh} without storage"):
        from autoplan.forecast.dry_run import dry_run  # loads torch and transformers, which takes seconds

        ran = dry_run(model, mesh=mesh, rank=rank, batch=batch, sequence=sequence, ep_size=ep,
                      sequence_parallel=sequence_parallel, trust_remote_code=trust_remote_code, **options)  # fmt: skip
    emit(dry_run_view(ran), dry_run_to_dict(ran), as_json, output)


def calibrate(
    like: Annotated[
        str, typer.Option("--like", help="Device whose figures stand in for what is not measured.")
    ] = "h100",
    output: Output = None,
) -> None:
    """Measure the machine at hand (under torchrun its links too), and write a device file for --gpu."""
    import os

    with progress("loading torch"):
        import torch
        import torch.distributed as dist

    from autoplan.forecast.devices import device_text, load_device, measure

    device = load_device(like)
    alone = "WORLD_SIZE" not in os.environ
    if not alone:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        try:
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        except (RuntimeError, ValueError) as error:
            raise AutoplanError(
                f"WORLD_SIZE is set, but its ranks cannot connect: {error}",
                hint="run it with torchrun, or unset WORLD_SIZE",
            ) from error
    with progress("measuring matmuls, attention, copies and messages"):
        text = device_text(measure(), device)
    if alone or dist.get_rank() == 0:
        emit(text.rstrip(), None, False, output)
    if not alone:
        dist.destroy_process_group()


def sizes_of(model: str, plan: Plan, memory: bool, gpu: str | None, **how: Any) -> RenderableType | None:
    """Return the memory of a rank, and the table over valid tp sizes; unless requested, this plan's size alone."""
    from autoplan.emit.tables.estimate_table import sizes_view

    if not memory and gpu is None:
        return sizes_view(plan)
    from autoplan.forecast.choose import estimated_sizes
    from autoplan.forecast.devices import load_device

    device = load_device(gpu or "h100")
    with progress(f"estimating a step of {model} at valid tp sizes"):
        sizes = estimated_sizes(model, plan, device, **how)
    return sizes_view(plan, sizes.plans, sizes.estimates, device.memory, sizes.why)


def on_mesh(mesh: str | None, cp: int, tp: int = 1) -> str:
    """Return the requested mesh, or one rank; with --cp alone FSDP2 shards over its ranks, besides those of `tp`."""
    if mesh is None:
        return ",".join((f"dp_shard=1,cp={cp}",) * (cp > 1) + (f"tp={tp}",) * (tp > 1 or cp == 1))
    from autoplan.forecast.asked import mesh_sizes

    sizes = dict(mesh_sizes(mesh, priced=("pp",)))
    for name, size in (("cp", cp), ("tp", tp)):
        if size not in (1, sizes.get(name, 1)):
            raise AutoplanError(f"--mesh {mesh} has {name} {sizes.get(name, 1)}, --{name} is {size}", hint="pass one")
    return mesh


def checkpointing_of(text: str) -> bool | str:
    choices: dict[str, bool | str] = {"none": False, "block": True, "submodule": "submodule", "selective": "selective"}
    if text not in choices:
        raise AutoplanError(f"--checkpointing {text}", hint=f"choose one of {', '.join(choices)}")
    return choices[text]


def report(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As in `autoplan plan`, or a plan file.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Page to write (.html).", callback=page_path)
    ],
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
        bool, typer.Option("--what-if/--no-what-if", help="Also plan other valid sizes, selectable on the page.")
    ] = True,
    trust_remote_code: Trust = False,
) -> None:
    """Write a plan as one HTML file: what is split, what moves, what fills the memory, how sure it is."""
    from autoplan.decide.written_plans.plan_file import names_plan_file
    from autoplan.forecast.asked import mesh_sizes

    mesh = mesh if mesh is None and cp == 1 else on_mesh(mesh, cp, tp or 1)
    sizes = {} if mesh is None else dict(mesh_sizes(mesh))
    cp = sizes.get("cp", 1)
    how: dict[str, Any] = {"sequence_parallel": sequence_parallel, "trust_remote_code": trust_remote_code}
    tp, ep = tp or sizes.get("tp", 1 if cp > 1 else None), ep if ep > 1 else sizes.get("ep", 1)
    missing = "required unless MODEL is a plan file, or --mesh has it"
    plan = plan_of(model, tp, ep=ep, cp=cp, or_file=missing, **how)
    if sizes.get("tp", plan.tp_size) != plan.tp_size:
        raise AutoplanError(f"--mesh {mesh} has tp {sizes['tp']}, the plan tp {plan.tp_size}", hint="pass one of them")
    how |= {"batch": batch, "sequence": sequence, "train": train.value}
    how |= {"activation_checkpointing": checkpointing_of(checkpointing)}
    if (is_file := names_plan_file(model)) and mesh is not None:
        raise AutoplanError("--mesh needs the model, not a plan file", hint="omit --mesh, or pass the model")
    priced, memory = (None, None) if is_file else _estimated(model, mesh, plan, gpu, how)
    sizes = sizes or ({"tp": plan.tp_size} if priced is not None else {})
    others = _others(model, plan, sizes, gpu, how) if what_if and not is_file else {}
    write_report(plan, output, estimate=priced, memory=memory, what_if=others)
    raise typer.Exit(FINDINGS if plan.proof.failed else OK)


def _others(model: str, plan: Plan, sizes: dict[str, int], gpu: str, how: dict[str, Any]) -> dict[int, WhatIf]:
    """Return plans at other sizes; with a mesh also the cost of a step on as many ranks, if these are divisible."""
    from autoplan.forecast.choose import other_sizes
    from autoplan.forecast.devices import load_device

    if plan.tp_size == 1 or plan.cp_size > 1:
        return {}
    with progress(f"planning {model} at other sizes"):
        return other_sizes(model, plan, load_device(gpu), sizes, **how)


def _estimated(
    model: str, mesh: str | None, plan: Plan, gpu: str, how: dict[str, Any]
) -> tuple[Estimate | None, int | None]:
    """Return the estimate and the memory; without a mesh on tp ranks alone, and none if that is impossible."""
    import autoplan
    from autoplan.forecast.devices import load_device

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
