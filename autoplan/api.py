"""The path, top to bottom: a model in, a plan out, a plan applied.

    plan:         resolve ── read_source ── proven_plan ── Plan
    parallelize:  read_mesh ── plan_for_mesh ── refuse what is wrong ── shard_model

Every step is one call, which is documented where it lives: hf/source.py, decide/written_plans/read.py,
check/pipeline.py (a trial on simulated ranks, a draft by planning.py, a proof), execute/parallelize.py. `plan_once`
plans on one rank for all of them; `hand_over` gives a sharded model to a training framework.
"""

from __future__ import annotations

import gc
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, TypeVar, Unpack

import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.capture.capture import graph_of
from autoplan.check.pipeline import proven_plan
from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import NotPlain, parse_plain
from autoplan.common.files.rule_files import with_rules
from autoplan.common.options import TRIAL_SECONDS, Keywords, Options, Wish, check_argument
from autoplan.common.random_values import plain_surroundings
from autoplan.common.requirements import check_versions, installed_versions
from autoplan.common.stages import seldom_collected
from autoplan.common.torch_internals import uncompiled
from autoplan.decide.written_plans.plan_file import plan_from_dict, plan_to_dict
from autoplan.decide.written_plans.read import PlanSource, read_source
from autoplan.execute.agreement import Alike, Voters, fail_together, meet
from autoplan.execute.collectives import RankGroup
from autoplan.execute.data_parallel.gradients import clip_gradients
from autoplan.execute.data_parallel.mesh_dims import MeshDims, read_mesh
from autoplan.execute.fits import model_hash
from autoplan.execute.parallelize import shard_model
from autoplan.execute.parameters.picked import marked_modules
from autoplan.execute.tensor_parallel import applied, check_matches, tp_mesh_of
from autoplan.execute.weights.load import load_weights
from autoplan.execute.weights.methods import load_optimizer, save_optimizer
from autoplan.execute.weights.save import save_weights
from autoplan.hf.hosts import Sharded, accelerator_class, trainer_class
from autoplan.hf.source import Model, resolve
from autoplan.hf.stacks import layers
from autoplan.patches.as_it_was import whole_or_as_it_was
from autoplan.plan_cache import keep_plan, kept_plan, place_of
from autoplan.planning import capture_source
from autoplan.values import Plan
from autoplan.version import __version__


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


# A plan that one rank makes for all others, which must hold the same model.
#
# The problem: a thousand ranks that all plan do the same work a thousand times, and a rank that reads another config,
# or runs another version, unknowingly makes another plan. So one rank plans; a few bytes of each rank tell whether all
# of them hold the same model and ask for the same; and the plan is sent as in a plan file, compressed.

_SENT = "the plan of another rank"


def plan_once(
    model: Model, tp_size: int = 1, *, group: dist.ProcessGroup | DeviceMesh | None = None, **wishes: Any
) -> Plan:
    """Run `autoplan.plan` on the first rank of `group` (by default of all ranks), and return its plan on every rank.

    Every rank calls it, with its own model and the same `wishes`, which are arguments of `autoplan.plan`. Raise on all
    ranks if some hold another model or other arguments, or if the first cannot plan. Without a process group it is
    `autoplan.plan`.
    """
    if not dist.is_initialized():
        return plan(model, tp_size, **wishes)
    ranks = group.get_group() if isinstance(group, DeviceMesh) else group
    sent: list[Any] = [None]
    with fail_together(_voters(ranks), "plan_once"):
        # A digest of the model, the wishes and the versions.
        if isinstance(model, nn.Module):
            tensors = [(name, list(tensor.shape)) for name, tensor in model.named_parameters()]
            description = f"{type(model).__qualname__} {model_hash(model)} {tensors}"
        else:
            description = str(model.to_dict() if hasattr(model, "to_dict") else model)
        plain = {name: value for name, value in wishes.items() if name not in ("inputs", "cache", "rules")}
        arguments = sorted((name, str(value)) for name, value in plain.items())
        text = f"{__version__} {installed_versions()} {description} {tp_size} {arguments}"
        mine = hashlib.sha256(text.encode()).hexdigest()[:16]
        meet(
            Alike(
                mine,
                f"some ranks, among them rank {dist.get_rank()}, have a different model, version or arguments",
                "build the same model from the same config on every rank, and pass the same arguments to plan_once",
            )
        )
        if dist.get_rank(ranks) == 0:
            sent = [packed_plan(plan(model, tp_size, **wishes))]
        meet()  # the others wait here, and learn of any failure
        dist.broadcast_object_list(sent, group=ranks, group_src=0)
        return unpacked_plan(sent[0])


def _voters(ranks: dist.ProcessGroup | None) -> Voters:
    everyone = Voters.everyone()
    return everyone if ranks is None else Voters((RankGroup.of(ranks),), everyone.device)


def packed_plan(made: Plan) -> bytes:
    """Return a plan as bytes: the contents of a plan file, compressed."""
    return zlib.compress(json.dumps(plan_to_dict(made), ensure_ascii=False, separators=(",", ":")).encode(), 6)


def unpacked_plan(data: bytes) -> Plan:
    """Return the plan of `packed_plan`'s bytes."""
    return plan_from_dict(parse_plain(zlib.decompress(data).decode(), "json", _SENT, NotPlain()), _SENT)


# Classes of training frameworks, adapted to a sharded model.

Host = TypeVar("Host", bound=type)


def hand_over(host: Host, model: nn.Module | None = None) -> Host:
    """Return a Trainer or an Accelerator class for a model that `parallelize` sharded: no DDP, and full checkpoints.

    `host` is the class: transformers' `Trainer` or a subclass, or accelerate's `Accelerator`, which needs the `model`
    at once. Use the result in its place:

        trainer = autoplan.hand_over(Trainer)(model, args, train_dataset=data)
        trainer.train(resume_from_checkpoint=True)

        accelerator = autoplan.hand_over(Accelerator, model)()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Checkpoints hold the unsharded model's weights, as `save_pretrained` writes them, and the optimizer's state by names
    of parameters: a run can be resumed at another tp size. Every rank saves and loads.
    """
    check_argument("host", host, type, "pass a class: Trainer, a subclass of it, or Accelerator")
    names = {cls.__name__ for cls in host.__mro__}
    adapted: Any = None
    if "Trainer" in names:
        adapted = trainer_class(host, _SHARDED)
    elif "Accelerator" in names:
        if model is None or _sizes(model) is None:
            raise AutoplanError(
                "an Accelerator needs the sharded model before it is created",
                hint="hand_over(Accelerator, model), after autoplan.parallelize(model, ...)",
            )
        adapted = accelerator_class(host, _SHARDED, model)
    if adapted is None:
        raise AutoplanError(f"{host.__name__} is neither a Trainer nor an Accelerator")
    return adapted


def _sizes(model: nn.Module) -> tuple[int, int, int] | None:
    record = applied(uncompiled(model))
    if record is None:
        return None
    plan, (replicas, shards) = record.plan, record.data_parallel
    # FSDP2 shards over cp ranks too, which get the same batches, as tp ranks do
    return replicas, max(1, shards // plan.cp_size), max(plan.tp_size, plan.ep_size) * plan.cp_size


_SHARDED = Sharded(
    _sizes,
    save_weights,
    lambda model, folder: load_weights(uncompiled(model), str(folder)),
    save_optimizer,
    load_optimizer,
    clip_gradients,
    lambda model, doing: fail_together(Voters.everyone(model), doing),
)
