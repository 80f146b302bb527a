"""The path, top to bottom: a model in, a plan out, a plan applied.

    source ── capture ── analyse ── decide ── prove ── Plan ── parallelize

Every step is one call, made here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from autoplan.analyse.solve import Solution, solve
from autoplan.capture.capture import Captured, capture_any
from autoplan.capture.inputs import make_inputs
from autoplan.capture.source import Source, resolve
from autoplan.check.prove import prove_graph, prove_ranks
from autoplan.decide.planner import make_plan
from autoplan.emit.plan_file import load_plan
from autoplan.errors import AutoplanError, IndivisibleError
from autoplan.execute.parallelize import apply_plan, tp_mesh_of
from autoplan.layers import layers
from autoplan.requirements import check_versions
from autoplan.values import Plan

__all__ = ["capture_source", "parallelize", "plan", "plan_source", "solve_source"]

Model = nn.Module | PretrainedConfig | str
SOURCES = ("auto", "inferred")
PROOFS = ("graph", "ranks", "none")


def plan(
    model: Model,
    tp_size: int = 1,
    *,
    source: str = "auto",
    inputs: Mapping[str, Any] | None = None,
    strict: bool = False,
    prove: str = "graph",
    trust_remote_code: bool = False,
) -> Plan:
    """Read a model and write its plan at `tp_size`. Nothing of the model is touched, and no weights are needed.

    `model` is a module on any device, a transformers config, or a string: a folder with a config.json,
    "package.module:builder", a model type ("llama"), or a hub id. `source` is "auto" or "inferred" (analysis), or the
    path of a plan file, which is loaded and checked against the model. `inputs` are example arguments of the forward,
    where autoplan cannot make them itself. `strict` raises where an axis does not divide by `tp_size`. `prove` is
    "graph" (default), "ranks" (run on simulated ranks too) or "none".
    """
    check_versions()
    _check_options(tp_size, prove)
    found = resolve(model, trust_remote_code=trust_remote_code, inputs=inputs)
    if source not in SOURCES:
        return _from_file(source, found, tp_size)
    return plan_source(found, tp_size, strict=strict, prove=prove)


def plan_source(source: Source, tp_size: int, *, strict: bool = False, prove: str = "graph") -> Plan:
    """`plan` for a source that is already resolved."""
    module = source.module()
    captured = capture_source(source, module)
    solution = solve_source(source, captured, tp_size, strict=strict)
    made = make_plan(solution, model=source.name, layers=layers(module))
    if prove == "none" or tp_size == 1:
        return made
    proof = prove_graph(source, made)
    made = replace(made, proof=proof.proof, findings=made.findings + proof.findings, entries=proof.stamp(made.entries))
    return prove_ranks(source, made) if prove == "ranks" else made


def capture_source(source: Source, module: nn.Module) -> Captured:
    """Make example inputs and record what the module does with them."""
    made = make_inputs(module, config=source.config, model_type=source.model_type, inputs=source.inputs)
    return capture_any(module, made.entries, made.notes)


def solve_source(source: Source, captured: Captured, tp_size: int, *, strict: bool = False) -> Solution:
    """Decide the splits; say clearly when the size fits nothing."""
    solution = solve(captured.trace, tp_size)
    if tp_size == 1:
        return solution
    legal = ", ".join(map(str, solution.legal_tp))
    odd = [c for c in solution.classes if not c.split and "does not divide" in c.reason]
    if strict and odd:
        first = odd[0]
        raise IndivisibleError(
            f"{source.name}: an axis of {first.size} units in {first.parameters[0][0]} does not divide by tp={tp_size} "
            f"({len(odd)} such axes)",
            hint=f"choose one of the sizes that divide everything: {legal}",
        )
    if not any(fact.dim is not None for fact in solution.parameters):
        why = odd[0] if odd else None
        unit = f": an axis of {why.size} units in {why.parameters[0][0]} stops it" if why else ""
        raise IndivisibleError(
            f"{source.name}: nothing can be split at tp={tp_size}{unit}",
            hint=f"sizes that divide every axis: {legal}" if odd else "see plan(tp_size=1) for what stays whole and why",
        )
    return solution


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | None = None,
    *,
    gather_logits: bool = False,
    mesh_dims: Mapping[str, str] | None = None,
) -> nn.Module:
    """Shard `model` in place over the mesh's "tp" dim, whole or not at all, and return it.

    Without a `plan` one is made for the mesh's size. Parameters become DTensors under their own names; logits leave
    split over the vocabulary unless `gather_logits`; every other output is whole. `mesh_dims={"tp": name}` names the
    mesh dim differently. `autoplan.applied(model)` says what was done.
    """
    names = dict(mesh_dims or {})
    if plan is None:
        size = mesh[names.get("tp", "tp")].size() if names.get("tp", "tp") in (mesh.mesh_dim_names or ()) else 1
        plan = plan_source(resolve(model), size)
    tp_mesh = tp_mesh_of(mesh, plan, names)
    return model if tp_mesh is None else apply_plan(model, tp_mesh, plan, gather_logits=gather_logits)


def _check_options(tp_size: int, prove: str) -> None:
    if not isinstance(tp_size, int) or tp_size < 1:
        raise AutoplanError(f"tp_size is {tp_size!r}", hint="give a whole number from 1 on")
    if prove not in PROOFS:
        raise AutoplanError(f"prove={prove!r}", hint=f"choose one of {', '.join(PROOFS)}")


def _from_file(path: str, source: Source, tp_size: int) -> Plan:
    """A named plan file replaces inference; it must be for this model and size."""
    if not Path(path).is_file():
        raise AutoplanError(
            f"source={path!r} is neither one of {', '.join(SOURCES)} nor an existing plan file",
            hint="give the path of a file that plan.save wrote",
        )
    loaded = load_plan(path)
    if loaded.tp_size != tp_size:
        raise AutoplanError(f"{path} is a plan for tp={loaded.tp_size}, not {tp_size}", hint="plan again at this size")
    from autoplan.execute.parallelize import check_matches

    check_matches(source.module(), loaded)
    return loaded
