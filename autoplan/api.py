"""The path, top to bottom: a model in, a plan out, a plan applied.

    plan:         resolve ── read_source ── proven_plan ── Plan
    parallelize:  read_mesh ── plan_for_mesh ── refuse what is wrong ── shard_model

Every step is one call, which is documented where it lives: hf/source.py, decide/written_plans/read.py,
check/pipeline.py (a trial on simulated ranks, a draft by planning.py, a proof), execute/parallelize.py.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, Unpack

from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.capture.capture import graph_of
from autoplan.check.pipeline import proven_plan
from autoplan.common.errors import AutoplanError
from autoplan.common.files.rule_files import with_rules
from autoplan.common.options import TRIAL_SECONDS, Keywords, Options, Wish, check_argument
from autoplan.common.random_values import plain_surroundings
from autoplan.common.requirements import check_versions
from autoplan.common.stages import seldom_collected
from autoplan.decide.written_plans.read import PlanSource, read_source
from autoplan.execute.agreement import fail_together
from autoplan.execute.data_parallel.mesh_dims import MeshDims, read_mesh, tp_mesh_of
from autoplan.execute.parallelize import shard_model
from autoplan.execute.parameters.held import marked_modules
from autoplan.execute.tensor_parallel import check_matches
from autoplan.hf.source import Model, resolve
from autoplan.hf.stacks import layers
from autoplan.patches.as_it_was import whole_or_as_it_was
from autoplan.plan_cache import keep_plan, kept_plan, place_of
from autoplan.planning import capture_source
from autoplan.values import Plan


@plain_surroundings()
@seldom_collected()
def plan(
    model: Model,
    tp_size: int = 1,
    *,
    ep_size: int = 1,
    cp_size: int = 1,
    sequence_parallel: bool = False,
    source: PlanSource = "auto",
    inputs: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    unmatched: str = "error",
    strict: bool = False,
    uneven: str = "never",
    prove: str = "graph",
    trial_seconds: float = TRIAL_SECONDS,
    trust_remote_code: bool = False,
    rules: str | PathLike[str] | None = None,
    cache: str | PathLike[str] | None = None,
) -> Plan:
    """Read a model and write its plan at `tp_size`. The model is not changed, and no weights are needed.

    `model` is a module on any device (torch.fx's graph modules too), a transformers config, a program of torch.export
    (its plan is for `program.module()`), or a string: a folder with a config.json, "package.module:builder", a model
    type ("llama"), or a hub id.

    `source` decides what is sharded: "auto" (a hand-written plan for the class where it fits, else analysis),
    "inferred" (analysis), "handwritten", "hf" (transformers' own plan), the path of a plan file, the id of a plan in
    rules/plans, a dotted path to a plan or to a function that returns one, or a dict {pattern: style}. `overrides` are
    merged into it. `unmatched`: "list" notes keys and styles that match nothing, "error" raises.

    `ep_size` places whole experts on different ranks instead of sharding each: over those of tp (`ep_size=tp_size`), or
    with `tp_size=1` over a mesh dim "ep". Experts that are modules of their own are left alone; a finding says so.

    `cp_size` shards the sequence over ranks: what mixes positions (attention, scans) runs on all of them for a rank's
    own heads, everything else on the rank's own positions. With `tp_size` too, those are some of the heads of a tp
    rank, and the ranks of cp are additional ones; with tp_size=1 weights are replicated.

    `inputs` are example arguments of the forward, if autoplan cannot make them itself. `sequence_parallel` also shards
    the stream between split regions along the sequence; where a model does not allow it, a finding says why and the
    plan is without. `strict` raises where an axis is not divisible by `tp_size`. Where the blocks of a quantised weight
    are not divisible, `uneven="blocks"` gives some ranks one more than others. `prove` is "graph" (default), "ranks"
    (everything that `verify` does, too) or "none". The trial on simulated ranks may take `trial_seconds`; after that
    the plan says so, and is not proven. `rules` is a folder of your own rules and plans, which take precedence
    (`AUTOPLAN_RULES` names such folders for all calls). `cache` is a folder of saved plans: the same model, code,
    versions and arguments return the plan that was made before (`AUTOPLAN_CACHE` names one for all calls).
    """
    check_versions()
    wish = Wish(tp_size, ep_size, sequence_parallel, strict, prove, trial_seconds, uneven, cp_size)
    if cp_size > 1 and (source not in ("auto", "inferred") or overrides is not None):
        raise AutoplanError(
            f"source={source!r}, overrides={overrides!r} with cp_size={cp_size}: such plans are inferred",
            hint="omit source and overrides",
        )
    source = "inferred" if cp_size > 1 else source
    with with_rules(rules):
        resolved = resolve(model, trust_remote_code=trust_remote_code, inputs=inputs)
        module = resolved.module()
        arguments = {"source": source, "overrides": overrides, "unmatched": unmatched, "inputs": inputs}
        place = place_of(cache, module, resolved.name, vars(wish) | arguments)
        if (cached := kept_plan(place, module)) is not None:
            return cached
        written = read_source(
            source, overrides, module, name=resolved.name, tp_size=tp_size, ep_size=ep_size,
            sequence_parallel=sequence_parallel, unmatched=unmatched,
        )  # fmt: skip
        if isinstance(written, Plan):
            from autoplan.check.audit.gate import held_against_model  # a plan that is made here needs no audit

            check_matches(module, written)
            return held_against_model(module, written, resolved)
        result = proven_plan(resolved, wish, written, module)
        keep_plan(place, result)
        return result


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: PlanSource | None = None,
    *,
    check: bool = True,
    mesh_dims: Mapping[str, str] | None = None,
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> nn.Module:
    """Shard `model` in place over a named mesh, fully or not at all, and return it.

    Tensor parallelism over "tp" (over "ep" with a plan that only places experts on different ranks), then activation
    checkpointing, then FSDP2 over "dp_shard" (also called dp, fsdp or dp_shard_cp; "dp_replicate" before it makes
    HSDP). `mesh_dims={"tp": name}` names mesh dims differently; cp and pp are left alone (cp unless the plan shards the
    sequence: `plan(cp_size=N)`). Without a `plan` one is made for the mesh. It may be anything that `autoplan.plan`
    takes as a source: plans in a foreign dialect are audited first. A plan that failed verification is refused, and one
    that could not be proven warns, unless `check=False`; `strict` refuses any that was not proven (and, where one is
    made here, an indivisible axis). A plan that was edited, or made for other code, is derived once more, and refused
    if it does not follow from the model.

    Logits leave sharded over the vocabulary where gradients are computed and gathered elsewhere, unless `gather_logits`
    decides (`autoplan.gather_logits` changes it later); every other output is replicated. A loss that the model
    computes from labels gathers none (under torch.compile, logits next to a loss carry no gradient).
    `reproducible_forward` gives the same bits at every tp size, slowly. `autoplan.applied(model)` returns what was
    done, and what was not.

    `activation_checkpointing`: True (whole blocks), "submodule", "selective" (every other matmul, attention and sums
    are kept), or a function (name, block) -> any of these or False; `checkpoint_scope`: "all", "text", "vision",
    "audio". `mp_policy`: FSDP2's, "bf16" (sums and outputs in float32), or None: dtypes as they are.
    `reshard_after_forward`: None frees all blocks but the last of each stack. `prefetch`: units ahead, or (forward,
    backward). `frozen`: stacks without trainable parameters are "units", in the "root" unit, or "ignore".

    `options` holds the keywords as one value (`autoplan.Options`).
    """
    from autoplan.check.audit.gate import held_against_model, refuse_disproven, refuse_unproven, warn_unproven

    dims = read_mesh(mesh, mesh_dims)
    with fail_together(dims.voters, "parallelize"):
        check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
        options = _options(options, keywords)
        check_argument("check", check, bool, "choose True or False")
        with whole_or_as_it_was(model):  # making a plan reads the model, but runs its code
            plan = plan if isinstance(plan, Plan) else _plan_for_mesh(model, dims, plan, check, options.strict)
            dims.check_experts(plan.tp_size, plan.ep_size)
            tp_mesh_of(mesh, plan, dims.names)
            if check:
                plan = held_against_model(model, plan)
                refuse_disproven(plan)
            if options.strict:
                refuse_unproven(plan)
            elif check:
                warn_unproven(plan)
            if not plan.layers and not plan.made_for.content:  # written by hand: a run shows which blocks run
                plan = replace(plan, layers=layers(model))
            if marked_modules():  # of an earlier model, which must be gone on every rank or on none: ops look them up
                gc.collect()
            return shard_model(model, mesh, plan, options, dims)


def _options(options: Options | None, keywords: Keywords) -> Options:
    if options is None:
        return Options.of(keywords)
    if not isinstance(options, Options):
        raise AutoplanError(f"options={options!r}", hint="pass autoplan.Options(...), or keywords")
    if keywords:
        raise AutoplanError(
            f"options and the keyword {next(iter(keywords))} were both given", hint="pass it in only one of them"
        )
    return options


@plain_surroundings()
def _plan_for_mesh(model: nn.Module, dims: MeshDims, given: PlanSource | None, check: bool, strict: bool) -> Plan:
    """Return a plan for the mesh. Without a split it only needs the layers, and no run of the model."""
    from autoplan.check.audit.gate import refuse_wrong

    source = resolve(model)
    wish = Wish(dims.tp_size, 1 if dims.tp_size > 1 else dims.ep_size, strict=strict)
    if wish.ranks == 1:
        return Plan(source.name, 1, layers=layers(model))
    if given is None:
        return proven_plan(source, wish)
    audit_findings = refuse_wrong(source, given, wish.tp_size) if check else ()
    written = read_source(given, None, model, name=source.name, tp_size=wish.tp_size, ep_size=None)
    result = written if isinstance(written, Plan) else proven_plan(source, wish, written)
    check_matches(model, result)
    return replace(result, findings=result.findings + audit_findings)


@plain_surroundings()
def fx_graph(model: Model, inputs: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False) -> fx.Graph:
    """Return the recorded run of a model as an FX graph: to print, to draw, to search with FX's own tools.

    Each aten op is a node, in the order in which it ran; `node.meta` has the "module" that called it, "shape" and
    "dtype". Of equal blocks one or two are run. `model` and `inputs` are as for `plan`.
    """
    check_versions()
    source = resolve(model, trust_remote_code=trust_remote_code, inputs=inputs)
    return graph_of(capture_source(source, source.module()).trace)
