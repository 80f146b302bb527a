"""The path, top to bottom: a model in, a plan out, a plan applied.

    source ── capture ── analyse ── decide ── prove ── Plan ── parallelize

Every step is one call, made here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.export import ExportedProgram
from transformers import PretrainedConfig

from autoplan.analyse.solve import Solution
from autoplan.capture.capture import Captured, capture_any, capture_fake
from autoplan.check.audit.gate import refuse_disproven, refuse_wrong
from autoplan.check.prove import prove_graph, prove_ranks, sequence_findings, settle_means
from autoplan.common.errors import AutoplanError, CaptureError, IndivisibleError
from autoplan.common.requirements import check_versions
from autoplan.common.undo import undoing
from autoplan.decide.plan.chosen import plan_chosen, solve_chosen
from autoplan.decide.plan.experts import check_expert_size, expert_findings, experts_of
from autoplan.decide.plan.folding import same_in_like_blocks
from autoplan.decide.written_plans.choices import Choices
from autoplan.decide.written_plans.constraints import same_in_folded_blocks
from autoplan.decide.written_plans.read import PlanSource, read_source
from autoplan.execute.checkpointing.choose import Request, checkpoint_blocks
from autoplan.execute.data_parallel.fsdp import DataParallel, shard_data_parallel
from autoplan.execute.data_parallel.mesh_dims import read_mesh
from autoplan.execute.fits import with_made_for
from autoplan.execute.parameters.optimizer_state import mark_parameters
from autoplan.execute.tensor_parallel import apply_plan, check_matches, record, tp_mesh_of, undo_all
from autoplan.hf.expert_counts import without_namesakes
from autoplan.hf.inputs.make import make_inputs
from autoplan.hf.source import Source, resolve
from autoplan.hf.stacks import layers
from autoplan.patches.kernels import kernel_note
from autoplan.values import Finding, LocalExperts, Means, Plan

__all__ = ["capture_source", "parallelize", "plan", "plan_source", "solve_source"]

Model: TypeAlias = nn.Module | PretrainedConfig | ExportedProgram | str
PROOFS = ("graph", "ranks", "none")


def plan(
    model: Model,
    tp_size: int = 1,
    *,
    ep_size: int = 1,
    sequence_parallel: bool = False,
    source: PlanSource = "auto",
    inputs: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    unmatched: str = "error",
    strict: bool = False,
    prove: str = "graph",
    trust_remote_code: bool = False,
) -> Plan:
    """Read a model and write its plan at `tp_size`. Nothing of the model is touched, and no weights are needed.

    `model` is a module on any device (torch.fx's graph modules too), a transformers config, a program of torch.export
    (its plan is for `program.module()`), or a string: a folder with a config.json, "package.module:builder", a model
    type ("llama"), or a hub id.

    `source` is where the choice of what is cut comes from: "auto" (a hand-written plan for the class, else analysis),
    "inferred" (analysis), "handwritten", "hf" (transformers' own plan), the path of a plan file, the id of a plan in
    rules/plans, a dotted path to a plan or to a function that returns one, or a dict {pattern: style}. `overrides`
    are laid over it. `unmatched` "list" notes keys and styles that mean nothing, where "error" raises.

    `ep_size` deals whole experts out over ranks rather than cut each inside: over those of tp (`ep_size=tp_size`), or
    with `tp_size=1` over a mesh dim "ep". Experts that are modules of their own stay as they are; a finding says so.

    `inputs` are example arguments of the forward, where autoplan cannot make them itself. `sequence_parallel` cuts the
    stream between split regions along the sequence too; where a model does not allow it, a finding says why and the
    plan is without. `strict` raises where an axis does not divide by `tp_size`. `prove` is "graph" (default), "ranks"
    (run on simulated ranks too) or "none".
    """
    check_versions()
    _check_options(tp_size, ep_size, prove)
    found = resolve(model, trust_remote_code=trust_remote_code, inputs=inputs)
    module = found.module()
    written = read_source(
        source,
        overrides,
        module,
        name=found.name,
        tp_size=tp_size,
        ep_size=ep_size,
        sequence_parallel=sequence_parallel,
        unmatched=unmatched,
    )
    if isinstance(written, Plan):
        check_matches(module, written)
        return written
    how: Any = {"sequence_parallel": sequence_parallel, "strict": strict, "prove": prove, "module": module}
    return plan_source(found, tp_size, ep_size, choices=written, **how)


def plan_source(
    source: Source,
    tp_size: int,
    ep_size: int = 1,
    *,
    choices: Choices | None = None,
    means: Means | None = None,
    sequence_parallel: bool = False,
    strict: bool = False,
    prove: str = "graph",
    module: nn.Module | None = None,
) -> Plan:
    """`plan` for a source that is already resolved, under the choices of a written plan if there is one.

    Unless `means` are given, a tiny clone is sharded on simulated ranks to see which of them give the same numbers.
    """
    module = source.module() if module is None else module
    captured = capture_source(source, module, choices)
    stacks = layers(module)
    tried: tuple[Finding, ...] = ()
    ranks = max(tp_size, ep_size)
    if means is None:
        wanted = Means(True, sequence_parallel and tp_size > 1)
        means, tried = (wanted, ()) if prove == "none" or ranks == 1 else settle_means(source, wanted, tp_size, ep_size)
    blocks = tuple(stack.fqns for stack in stacks) if means.sequence else None
    solution = solve_source(
        source, captured, tp_size, ep_size, choices=choices, means=means, strict=strict, sequence_stacks=blocks
    )
    runtime = without_namesakes(source, solution.runtime, solution.trace.module_classes)
    solution = replace(solution, runtime=runtime)
    made = plan_chosen(
        solution,
        choices,
        model=source.name,
        layers=stacks,
        sequence_parallel=solution.sequence_parallel,
    )
    made = replace(made, tp_size=tp_size, ep_size=ep_size, findings=made.findings + tried)
    made = with_made_for(made, module)
    made = replace(made, findings=made.findings + (sequence_findings(solution) if means.sequence else ()))
    if ep_size > 1 and means.experts:
        made = replace(made, findings=made.findings + expert_findings(made, solution))
    if prove == "none" or ranks == 1:
        return made
    proof = prove_graph(source, made, captured.trace, choices)
    made = replace(made, proof=proof.proof, findings=made.findings + proof.findings, entries=proof.stamp(made.entries))
    return prove_ranks(source, made) if prove == "ranks" else made


def capture_source(source: Source, module: nn.Module, choices: Choices | None = None) -> Captured:
    """Make example inputs and record what the module does with them.

    Repeated blocks are traced once, unless a written plan tells them apart.
    """
    made = make_inputs(module, config=source.config, model_type=source.model_type, inputs=source.inputs)
    note = kernel_note(module)
    captured = capture_any(module, made.entries, (*made.notes, note) if note else made.notes)
    unfold = partial(capture_fake, module, made.entries, folded=False)
    if choices is None or same_in_folded_blocks(choices, captured.trace):
        return replace(captured, unfold=unfold) if captured.trace.folds else captured
    return unfold()


def solve_source(
    source: Source,
    captured: Captured,
    tp_size: int,
    ep_size: int = 1,
    *,
    choices: Choices | None = None,
    means: Means = Means(),  # noqa: B008 - frozen
    strict: bool = False,
    sequence_stacks: tuple[tuple[str, ...], ...] | None = None,
) -> Solution:
    """Decide the splits, under a written plan if there is one; say clearly when the size fits nothing."""
    ranks = max(tp_size, ep_size)
    solved = partial(
        solve_chosen,
        tp=ranks,
        choices=choices,
        sequence_stacks=sequence_stacks,
        scoped=means.scoped,
        whole=means.whole,
        experts=experts_of(tp_size, ep_size, means),
    )
    solution = solved(captured.trace)
    if captured.unfold and not same_in_like_blocks(solution.parameters, solution.runtime, captured.trace.folds):
        try:
            solution = solved(captured.unfold().trace)
        except CaptureError as error:  # what need not be alike along the sequence is so without it
            if sequence_stacks is None:
                raise
            uneven = f"its blocks are not cut alike, and cannot be recorded one by one: {error.message}"
            solution = replace(solved(captured.trace, sequence_stacks=None), sequence_notes=(uneven,))
    if ranks == 1:
        return solution
    if strict and solution.experts_inside:
        inside = ": ".join(solution.experts_inside[0])
        raise IndivisibleError(f"{source.name}: {inside}", hint="choose an ep_size that divides them, or 1")
    legal = ", ".join(map(str, solution.legal_tp))
    odd = [c for c in solution.classes if not c.split and "does not divide" in c.reason]
    if strict and odd:
        first = odd[0]
        raise IndivisibleError(
            f"{source.name}: an axis of {first.size} units in {first.parameters[0][0]} does not divide by tp={tp_size} "
            f"({len(odd)} such axes)",
            hint=f"choose one of the sizes that divide everything: {legal}",
        )
    if tp_size == 1 and not solution.runtime.of(LocalExperts):
        told = "; ".join(f"{where}: {why}" for where, why in solution.experts_inside)
        raise IndivisibleError(
            f"{source.name}: no experts can be dealt out over {ep_size} ranks" + (f" ({told})" if told else ""),
            hint="ep_size needs modules that hold all their experts in one stack of weights; else split with tp_size",
        )
    if not any(fact.dim is not None for fact in solution.parameters):
        why = odd[0] if odd else None
        unit = f": an axis of {why.size} units in {why.parameters[0][0]} stops it" if why else ""
        raise IndivisibleError(
            f"{source.name}: nothing can be split at tp={tp_size}{unit}",
            hint=f"sizes that divide every axis: {legal}"
            if odd
            else "see plan(tp_size=1) for what stays whole and why",
        )
    return solution


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: PlanSource | None = None,
    *,
    check: bool = True,
    gather_logits: bool = False,
    sequence_padding: str = "error",
    reproducible_forward: bool = False,
    mesh_dims: Mapping[str, str] | None = None,
    activation_checkpointing: Request = False,
    checkpoint_scope: str | Iterable[str] = "all",
    mp_policy: MixedPrecisionPolicy | str | None = None,
    offload_policy: OffloadPolicy | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: bool | int | None = None,
    prefetch: int | tuple[int, int] | None = None,
    frozen: str = "units",
) -> nn.Module:
    """Shard `model` in place over a named mesh, whole or not at all, and return it.

    Tensor parallelism over "tp" (over "ep" with a plan that only deals out experts), then activation checkpointing,
    then FSDP2 over "dp_shard" (also called dp, fsdp or dp_shard_cp; "dp_replicate" before it makes HSDP).
    `mesh_dims={"tp": name}` names mesh dims differently; cp and pp are left alone. Without a `plan` one is made for the
    mesh. It may be anything that `autoplan.plan` takes as a source: what comes in a foreign dialect is audited first,
    and refused if it is wrong, unless `check=False`.

    Logits leave split over the vocabulary unless `gather_logits`; every other output is whole. A loss that the model
    computes from labels gathers none either (under torch.compile, logits beside a loss carry no gradient).
    `reproducible_forward` makes the same bits at every tp size, slowly. `autoplan.applied(model)` says what was done,
    and what was not.

    `activation_checkpointing`: True (whole blocks), "submodule", "selective" (every other matmul, attention and sums
    are kept), or a function (name, block) -> any of these or False; `checkpoint_scope`: "all", "text", "vision",
    "audio". `mp_policy`: FSDP2's, "bf16" (sums and outputs in float32), or None: dtypes as they are.
    `reshard_after_forward`: None frees all blocks but the last of each stack. `prefetch`: units ahead, or (forward,
    backward). `frozen`: stacks without trainable parameters are "units", in the "root" unit, or "ignore".
    """
    dims = read_mesh(mesh, mesh_dims)
    plan = plan if isinstance(plan, Plan) else _plan_for_mesh(model, dims.tp_size, dims.ep_size, plan, check)
    dims.check_experts(plan.tp_size, plan.ep_size)
    if check:
        refuse_disproven(plan)
    tp_mesh = tp_mesh_of(mesh, plan, dims.names)
    data = DataParallel(mp_policy, offload_policy, cpu_offload, reshard_after_forward, prefetch, frozen)
    data.check(has_mesh=dims.data is not None)
    stacks = plan.layers or layers(model)
    undo: list[Callable[[], None]] = []
    with undoing(undo):
        if tp_mesh is not None and plan.ranks > 1:
            apply_plan(
                model,
                tp_mesh,
                plan,
                gather_logits=gather_logits,
                sequence_padding=sequence_padding,
                reproducible_forward=reproducible_forward,
            )
        record(model, plan, notes=dims.notes)
        undo.append(lambda: undo_all(model))
        if activation_checkpointing:
            undo.append(checkpoint_blocks(model, stacks, activation_checkpointing, checkpoint_scope))
        if dims.data is not None:
            shard_data_parallel(model, dims.data, stacks, data)
        mark_parameters(model)
    return model


def _plan_for_mesh(model: nn.Module, tp_size: int, ep_size: int, given: PlanSource | None, check: bool) -> Plan:
    """Without a split only the layers matter, and they need no run of the model."""
    source = resolve(model)
    if max(tp_size, ep_size) == 1:
        return Plan(source.name, 1, layers=layers(model))
    ep_size = 1 if tp_size > 1 else ep_size
    if given is None:
        return plan_source(source, tp_size, ep_size)
    found = refuse_wrong(source, given, tp_size) if check else ()
    written = read_source(given, None, model, name=source.name, tp_size=tp_size, ep_size=None)
    made = written if isinstance(written, Plan) else plan_source(source, tp_size, ep_size, choices=written)
    check_matches(model, made)
    return replace(made, findings=made.findings + found)


def _check_options(tp_size: int, ep_size: int, prove: str) -> None:
    if not isinstance(tp_size, int) or tp_size < 1:
        raise AutoplanError(f"tp_size is {tp_size!r}", hint="give a whole number from 1 on")
    check_expert_size(tp_size, ep_size)
    if prove not in PROOFS:
        raise AutoplanError(f"prove={prove!r}", hint=f"choose one of {', '.join(PROOFS)}")
