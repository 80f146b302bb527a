"""Verify that the sharded model computes what the model computes.

A tiny clone of the model, with random weights in double precision, runs once unsharded and once on N simulated ranks
with the styles that ship. Outputs, the loss, every gradient on every rank, another input shape, the other attention
implementation, decoding from a cache, training mode with dropout, the checkpoint and three optimizer steps must agree.
Each finding names the tensor and the size of its error. (`checks.py` has the checks.)

The clone has its own sizes, so it gets its own plan by the same rules; whether this plan agrees with the one to be
verified, module by module, is checked as well. A plan that a person wrote is applied as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from autoplan.check.ranks.common import GENERATORS, Budget, BudgetSpent
from autoplan.check.ranks.run import Engine, travels
from autoplan.check.verify.clone import Clone, MeshSizes, Sizes, clone_for, clone_of, parse_mesh, tried_sizes
from autoplan.check.verify.compare import against_the_least
from autoplan.check.verify.derived import capabilities_of, plan_for
from autoplan.check.verify.on_ranks import cut_together, mesh_of, sharding_of, wrong_cuts
from autoplan.check.verify.sharded import CHECK_NAMES, check_sharding
from autoplan.common.code.ways import others_of
from autoplan.common.errors import AutoplanError, IndivisibleError
from autoplan.common.options import check_argument
from autoplan.common.random_values import plain_surroundings, untouched_randomness
from autoplan.common.stages import seldom_collected
from autoplan.decide.plan.folding import whole_blocks
from autoplan.decide.written_plans.choices import ChosenCuts
from autoplan.execute.agreement import Voters, fail_together, meet, same_model, same_plan
from autoplan.execute.tensor_parallel import check_names
from autoplan.hf.source import resolve
from autoplan.hf.stacks import layers
from autoplan.patches.simulated_ranks import alone
from autoplan.values import Capabilities, Finding, HookKind, Plan, Report, SplitLogits

# dropout differs between data-parallel ranks; the training checks step optimizers
_NOT_ON_MESHES = ("training", "dropout", "optimizer")
_MOST_TRIALS = 32  # most runs on ranks to find the modules that a wrong plan must replicate
# checks after which other capabilities are tried
_DECISIVE = ("sharding", "parameters", "forward", "gradients", "second_shape", "training")


@plain_surroundings()
@seldom_collected()
def verify(
    model: Any,
    plan: Plan | None = None,
    tp_size: int | None = None,
    mesh: Any = None,
    engine: Engine = "threads",
    inputs: Mapping[str, Any] | None = None,
    *,
    ep_size: int | None = None,
    cp_size: int = 1,
    sequence_parallel: bool = False,
    checks: Iterable[str] | None = None,
    rounding: bool = False,
    trust_remote_code: bool = False,
) -> Report:
    """Shard a tiny clone of `model` on `tp_size` simulated ranks and compare it with itself unsharded.

    `model`, `inputs`, `ep_size` and `cp_size` are those of `autoplan.plan`. Without a `plan` one is made. A given plan
    is tried with its own kinds of sharding at `tp_size` ranks; without a `tp_size`, at as many as it is for, up to 8 (a
    note says so if they differ), or at 2 without a plan. With a `mesh` the ranks are the real ones: every rank of its
    "tp" dim must call this. `mesh="dp=2,tp=2"` simulates a mesh and checks training on it: another batch on each
    data-parallel rank, with and without activation checkpointing, norms, clipping, and a resumed checkpoint. `checks`
    chooses among `CHECK_NAMES`. With `rounding` the clone runs in bfloat16 too, and `report.details["rounding"]` says
    whether a difference there is a bug or rounding, with the spread of each layer.
    """
    live = mesh is not None and not isinstance(mesh, str | Mapping)
    with fail_together(_voters(mesh), "verify") if live else alone():
        # Check types before anything is built.
        if plan is not None:
            check_argument("plan", plan, Plan, "pass the result of autoplan.plan or autoplan.load_plan(path)")
        if mesh is not None:
            check_argument("mesh", mesh, (str, Mapping, DeviceMesh), 'pass a device mesh, or "dp=2,tp=2"')
        if checks is not None:
            check_argument("checks", checks, (list, tuple, set, frozenset), f"choose from {', '.join(CHECK_NAMES)}")
        for name, value in (("sequence_parallel", sequence_parallel), ("rounding", rounding)):
            check_argument(name, value, bool, "choose True or False")
        if tp_size is not None and isinstance(mesh, str | Mapping):
            named = parse_mesh(mesh)
            if (split := named.size("tp")) != tp_size:
                raise AutoplanError(f"the mesh {named} has tp {split}, tp_size is {tp_size}", hint="pass one of them")
        source = resolve(model, trust_remote_code=trust_remote_code, inputs=inputs)
        if plan is not None:
            check_names(source.module(), plan)
        how: Any = {"mesh": mesh, "engine": engine, "checks": checks, "rounding": rounding}
        how["sequence_parallel"] = sequence_parallel
        if plan is None or tp_size is not None or mesh is not None:
            tp_size = (1 if cp_size > 1 else 2) if tp_size is None else tp_size
            return _without_ways(verify_source(source, plan, tp_size, ep_size=ep_size, cp_size=cp_size, **how))
        sizes = Sizes.of_plan(plan, ep_size)
        report, tried, _ = verify_tried(tried_sizes(source, sizes, own=True), plan, **how)
    report = _without_ways(report)
    if tried == sizes:
        return report
    text = f"verified at {tried}; the plan is for {sizes}"
    return replace(report, findings=(*report.findings, Finding("plan", "note", "", text, "pass a tp_size")))


def _without_ways(report: Report) -> Report:
    """Return the report without the ways through the model's code, which are for plans, not for people."""
    return replace(report, details={name: value for name, value in report.details.items() if name != "ways"})


def _voters(mesh: Any) -> Any:
    """Return the ranks that verify together on a real mesh: those of its dims "tp", or "ep", and "cp"."""
    names = mesh.mesh_dim_names or () if isinstance(mesh, DeviceMesh) else ()
    split = [name for name in ("tp", "ep") if name in names][:1]
    return Voters.of(*(mesh[name] for name in (*split, *(["cp"] if "cp" in names else []))))


@untouched_randomness()
def verify_source(
    source: Any,
    plan: Plan | None = None,
    tp_size: int = 2,
    *,
    ep_size: int | None = None,
    cp_size: int = 1,
    sequence_parallel: bool = False,
    mesh: Any = None,
    engine: Engine = "threads",
    checks: Iterable[str] | None = None,
    rounding: bool = False,
    choices: ChosenCuts | None = None,
    budget: Budget | None = None,
    clone: Clone | None = None,
    traffic: bool = True,
    idle: bool = False,
    gathered: tuple[HookKind, ...] | None = None,
) -> Report:
    """Run `verify` on a resolved source; without a plan, with the choices of a written one.

    `clone`: a clone of the source, if there is one already. `traffic`: measure what each block moves. `idle`: where
    nothing can be split, or all that is split is wrong, try a plan that splits nothing. `gathered`: see Capabilities.

    Raise BudgetSpent if the time runs out before anything is known; errors found by then are reported.
    """
    if isinstance(mesh, (str, Mapping)):
        if rounding:
            raise AutoplanError("rounding is measured on tensor-parallel ranks only", hint=f"omit mesh={mesh!r}")
        return _verify_mesh(source, plan, parse_mesh(mesh), engine, checks, sequence_parallel, ep_size)
    sizes = Sizes.of(tp_size, ep_size, plan, cp_size) if mesh is None else Sizes.of_mesh(mesh, ep_size, plan)
    budget = Budget() if budget is None else budget
    clone = clone_for(source, sizes) if clone is None else clone
    how: Any = {"mesh": mesh, "budget": budget, "traffic": traffic}
    if clone.outside and mesh is None and engine == "threads":
        engine = _engine_for(clone)
    report: Report | None = None
    applied: Plan | None = None
    idle = idle and plan is None and sizes.cp == 1
    ways = capabilities_of(plan, source, sequence_parallel, sizes, gathered)
    ways = (*ways, Capabilities(False, idle=True)) if idle else ways
    for wanted in ways:
        if wanted.idle and report is not None:
            break
        budget.check("before a clone was run on ranks")
        try:
            drawn, differences = plan_for(clone, source, plan, sizes, wanted, choices)
        except AutoplanError as error:
            nothing = isinstance(error, IndivisibleError) and idle and wanted != ways[-1]
            if report is None and not nothing:
                raise
            continue  # with fewer capabilities nothing is left to split: the last report holds
        if plan is not None:
            refused = dict.fromkeys((*drawn.runtime.unsummed, *plan.runtime.unsummed))
            drawn = replace(drawn, runtime=replace(drawn.runtime, unsummed=tuple(refused)))
        if applied is not None and drawn.runtime == applied.runtime:
            continue
        capabilities, applied, findings = wanted, drawn, differences
        report = verify_clone(clone, applied, engine=engine, checks=checks, **how)
        if not _decisively_wrong(report) or budget.spent:
            break
    assert report is not None and applied is not None
    if plan is None and _decisively_wrong(report) and not budget.spent:
        capabilities = replace(capabilities, idle=idle)
        run: Any = {**how, "engine": engine}
        capabilities, report, applied = _narrowed(clone, source, applied, capabilities, report, checks, choices, run)
    details = {
        **report.details,
        "model": source.name,
        **({"ranks": str(sizes)} if sizes.cp > 1 else {"plan_tp": (plan or applied).tp_size}),
        "capabilities": capabilities,
        # ways that its plan was not made from, but that were verified
        "ways": others_of(report.details["ways"], clone.recorded.get("ways", {})),
    }
    if rounding:
        from autoplan.check.verify.rounding import measure_rounding

        options: Any = {"exact": report.ok, "engine": engine, "mesh": mesh}
        details["rounding"] = measure_rounding(clone.model, clone.feeds, applied, **options)
    findings = [*report.findings, *findings, *whole_blocks(plan or applied)]
    return replace(report, ok=not any(f.level == "error" for f in findings), findings=tuple(findings), details=details)


@untouched_randomness()
def verify_tried(
    attempts: Iterable[tuple[Any, Sizes]], plan: Plan | None, *, clone: Clone | None = None, **how: Any
) -> tuple[Report, Sizes, Clone]:
    """Run `verify_source` on the first of these clones that can be tried; return its report, sizes and clone.

    `clone`: a clone that exists already, for the attempt that it was made for.
    """

    def verified(source: Any, sizes: Sizes) -> tuple[Report, Sizes, Clone]:
        chosen = clone if clone is not None and clone.ranks == source.ranks else clone_of(source)
        report = verify_source(source, plan, sizes.tp, ep_size=sizes.ep, cp_size=sizes.cp, clone=chosen, **how)
        return report, sizes, chosen

    *before, last = attempts
    for attempt in before:
        with suppress(AutoplanError):
            return verified(*attempt)
    return verified(*last)


def _verify_mesh(
    source: Any,
    plan: Plan | None,
    mesh: MeshSizes,
    engine: Engine,
    checks: Iterable[str] | None,
    sequence_parallel: bool,
    ep_size: int | None,
) -> Report:
    """Run the usual checks on a mesh of several dims, and train on it, with and without activation checkpointing."""
    from autoplan.check.verify.mesh_training import check_training

    sizes = Sizes.of(mesh.size("tp"), mesh.size("ep") if mesh.size("ep") > 1 else ep_size, plan, mesh.size("cp"))
    clone = clone_for(source, sizes)
    left_out = _NOT_ON_MESHES if sizes.ranks > sizes.cp else (*_NOT_ON_MESHES, "state_dict")
    wanted = [name for name in (checks or CHECK_NAMES) if name not in left_out]
    how: Any = {"others": clone.others, "engine": engine, "dims": mesh.dims}
    for capabilities in capabilities_of(plan, source, sequence_parallel, sizes):
        applied, findings = Plan(source.name, 1, layers=layers(clone.model)), list[Finding]()
        if sizes.ranks > 1:
            applied, findings = plan_for(clone, source, plan, sizes, capabilities)
        report = check_sharding(clone.model, clone.feeds, sharding_of(applied), sizes.ranks, checks=wanted, **how)
        if not _decisively_wrong(report):
            break
    trained, done = check_training(clone.model, clone.feeds, clone.others, applied, mesh, engine=engine)
    findings = [*report.findings, *findings, *trained]
    details = {k: v for k, v in report.details.items() if k != "blocks"}
    details |= {"ranks": str(sizes)} if mesh.size("cp") > 1 else {"plan_tp": (plan or applied).tp_size}
    details |= {"mesh": str(mesh), "model": source.name}
    details |= {"checked": (*report.details["checked"], *done), "clone": clone.note}
    return replace(report, ok=not any(f.level == "error" for f in findings), findings=tuple(findings), details=details)


def verify_clone(
    clone: Clone,
    plan: Plan,
    *,
    mesh: Any = None,
    engine: Engine = "threads",
    checks: Iterable[str] | None = None,
    checkpointing: str = "",
    budget: Budget | None = None,
    traffic: bool = True,
) -> Report:
    """Compare a clone sharded by its own plan with itself unsharded; `checkpointing` is the mode of the sharded one."""
    wanted = tuple(checks) if checks is not None else CHECK_NAMES
    budget = Budget() if budget is None else budget
    if mesh is not None:  # real ranks
        meet(same_model(clone.model), same_plan(plan))
    how: Any = {"others": clone.others, "engine": engine, "mesh": mesh, "dims": mesh_of(plan), "budget": budget}
    how["other_dims"] = clone.dims
    sharding = sharding_of(plan, checkpointing=checkpointing, traffic=traffic)
    report = check_sharding(clone.model, clone.feeds, sharding, plan.ranks, checks=wanted, **how)
    findings = list(report.findings)
    if report.ok and "loss" in wanted and plan.runtime.of(SplitLogits):
        gathered = sharding_of(plan, gather_logits=True)
        again = check_sharding(clone.model, clone.feeds, gathered, plan.ranks, checks=["loss"], **how)
        findings += [replace(extra, message=f"with gathered logits: {extra.message}") for extra in again.findings]
    ok = not any(finding.level == "error" for finding in findings)
    details = {**report.details, "clone": clone.note}
    details["communication"] = against_the_least(details.pop("blocks"), plan.communication)
    return replace(report, ok=ok, findings=tuple(findings), details=details)


# The plan


def _engine_for(clone: Clone) -> Engine:
    """Return "gloo" for a clone with state outside of the model, which threads would share, if it can be pickled."""
    if travels(clone.model):
        return "gloo"
    if GENERATORS in clone.outside:
        raise AutoplanError(
            "the model draws from numpy's or Python's generator through functions other than those of numpy.random and "
            "random (as scipy does); thread-based ranks would share it, and the model cannot be pickled for processes",
            hint="define the model's classes in an importable module, so that ranks can run as processes",
        )
    return "threads"


def _decisively_wrong(report: Report) -> bool:
    return any(f.level == "error" and f.check in _DECISIVE for f in report.findings)


def _narrowed(
    clone: Clone,
    source: Any,
    applied: Plan,
    capabilities: Capabilities,
    report: Report,
    checks: Iterable[str] | None,
    choices: ChosenCuts | None,
    how: Mapping[str, Any],
) -> tuple[Capabilities, Report, Plan]:
    """Replicate what is sharded wrongly (and everything that shares its cut), so that the rest is right."""
    sizes = Sizes.of_plan(applied)
    wrong = {finding.check for finding in report.findings if finding.level == "error"}
    narrowing = tuple(wrong) if wrong <= {"second_shape", "training"} else ("forward",)
    modules = tuple(dict.fromkeys(entry.pattern for entry in applied.entries))

    def planned(whole: tuple[str, ...]) -> Plan | None:
        try:
            return plan_for(clone, source, None, sizes, replace(capabilities, whole=whole), choices)[0]
        except AutoplanError:  # nothing is left to split
            return None

    def still_cut(whole: str) -> set[str]:
        plan = planned((whole,))
        return set() if plan is None else {entry.pattern for entry in plan.entries}

    def is_wrong(cut: tuple[str, ...]) -> bool:
        how["budget"].check("while locating the error")
        plan = planned(tuple(name for name in modules if name not in cut))
        return plan is not None and _decisively_wrong(verify_clone(clone, plan, checks=narrowing, **how))

    try:
        whole = wrong_cuts(cut_together(modules, still_cut), is_wrong, _MOST_TRIALS)
        narrower = planned(whole)
        narrowed = verify_clone(clone, narrower, checks=checks, **how) if narrower is not None else report
        if capabilities.idle and _decisively_wrong(narrowed) and (narrower := planned(modules)) is not None:
            whole, narrowed = modules, verify_clone(clone, narrower, checks=checks, **how)
    except BudgetSpent as error:
        late = Finding("sharding", "note", "", error.message, error.hint)
        return capabilities, replace(report, findings=(*report.findings, late)), applied
    if narrower is None or _decisively_wrong(narrowed):
        return capabilities, report, applied
    return replace(capabilities, whole=whole), narrowed, narrower
