"""Apply a plan to a live model: all of it, or none of it.

Everything that can fail comes first: patterns are matched, shards are cut, integers are checked. Then parameters are
swapped, integers set and hooks installed. If a step fails, the model is left as it was (patches/as_it_was.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.layout import chunk
from autoplan.common.options import check_argument
from autoplan.common.patterns import matched_by, nearest
from autoplan.common.torch_internals import flattened, own_parameters
from autoplan.execute.agreement import APPLIED, Voters, meet
from autoplan.execute.collectives import RankGroup, mesh_device
from autoplan.execute.executors import At, Running, execute
from autoplan.execute.fits import check_fits, is_stored_packed, stored_rules
from autoplan.execute.guard.guard import PathGuard, guard_of
from autoplan.execute.hooks.function_mode import guard_kernels
from autoplan.execute.hooks.install import ModuleWork, install, keep_order
from autoplan.execute.hooks.replaced import install_inner_entries, keep_dense, watch_children, watch_no_longer
from autoplan.execute.hooks.root import Root, can_run_whole, is_at_exit
from autoplan.execute.hooks.unseen import watch_unrecorded
from autoplan.execute.parameters.optimizer import stop_following
from autoplan.execute.parameters.shard import prepare_parameters
from autoplan.execute.random_streams import SharedRandomness, draws_in_code, may_draw
from autoplan.execute.reproducible import make_reproducible
from autoplan.execute.weights.methods import leave_methods
from autoplan.patches.as_it_was import whole_or_as_it_was
from autoplan.patches.classes import open_scripts
from autoplan.values import CallRewrite, IntegerEdit, ParameterRule, Plan, RecurrentCall, SplitLogits, VocabularyTable


@dataclass(frozen=True)
class Applied:
    """The record of what was done to a model, in plain data.

    `split`: parameters sharded over tp ranks; `edits`: integers changed (module, attribute, before, after); `hooked`:
    modules where ranks communicate. `checkpointed`: modules whose activations are recomputed; `saved_bytes`: the
    estimated saving per token. `units`: the FSDP2 units, the model itself last; `data_parallel`: (replicas, shards).
    `notes`: what was left out, and why.
    """

    plan: Plan
    tp_size: int
    split: tuple[str, ...]
    edits: tuple[tuple[str, str, int, int], ...]
    hooked: tuple[str, ...]
    checkpointed: tuple[str, ...] = ()
    saved_bytes: int = 0
    units: tuple[tuple[str, ...], ...] = ()
    data_parallel: tuple[int, int] = (1, 1)
    notes: tuple[str, ...] = ()
    undo: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    running: Running | None = field(default=None, repr=False, compare=False)
    voters: Voters = field(default=Voters((), torch.device("cpu")), repr=False, compare=False)


def applied(model: nn.Module) -> Applied | None:
    """Return the record of what `parallelize` did to a model, or None."""
    check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
    return model.__dict__.get(APPLIED)


def tp_mesh_of(mesh: DeviceMesh, plan: Plan, names: dict[str, str] | None = None) -> DeviceMesh | None:
    """Return the 1-D mesh over which the plan splits; None if there is nothing to split over. It is "tp", or "ep" where
    the plan only places experts on different ranks, or "cp" where only the sequence is sharded."""
    purpose = "cp" if plan.cp_size == plan.ranks > 1 else "ep" if plan.tp_size == 1 < plan.ep_size else "tp"
    return _mesh_for(mesh, purpose, plan.cut_over, names)


def context_of(mesh: DeviceMesh, plan: Plan, names: dict[str, str] | None = None) -> dict[str, RankGroup]:
    """Return the groups of a plan that shards the sequence besides another split: its ranks ("cp"), and those of both
    ("all"), where the cp ranks of one rank of the other split are numbered consecutively."""
    split = tp_mesh_of(mesh, plan, names)
    if plan.cp_size in (1, plan.ranks) or split is None:
        return {}
    cut = _mesh_for(mesh, "cp", plan.cp_size, names)
    assert cut is not None and cut.mesh_dim_names is not None and split.mesh_dim_names is not None
    both = tuple(name for name in mesh.mesh_dim_names or () if name in (*cut.mesh_dim_names, *split.mesh_dim_names))
    every = RankGroup.of(flattened(mesh[both], "_".join(both)))
    outer, context = RankGroup.of(split), RankGroup.of(cut)
    return {"cp": context, "all": RankGroup(every.name, every.size, outer.rank * context.size + context.rank)}


def _mesh_for(mesh: DeviceMesh, purpose: str, size: int, names: dict[str, str] | None) -> DeviceMesh | None:
    wanted = (names or {}).get(purpose, purpose)
    dims = mesh.mesh_dim_names or ()
    if wanted in dims:
        submesh = mesh[wanted] if mesh.ndim > 1 else mesh
    elif size == 1:
        return None
    else:
        raise PlanMismatchError(
            f"the plan is for {purpose}={size}, but the mesh has no dim named {wanted!r} (dims: {list(dims)})",
            hint=f'name it: init_device_mesh(device, shape, mesh_dim_names=("{purpose}",)), or pass '
            f'mesh_dims={{"{purpose}": name}}',
        )
    if submesh.size() != size:
        raise PlanMismatchError(
            f"the plan is for {purpose}={size}, but the mesh dim {wanted!r} has {submesh.size()} ranks",
            hint=f"plan again with {purpose}_size={submesh.size()}",
        )
    return submesh


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    *,
    gather_logits: bool | None = None,
    sequence_padding: str = "error",
    reproducible_forward: bool = False,
    path_guard: str = "refuse",
    averaged: bool = False,
    more_groups: dict[str, RankGroup] | None = None,
) -> nn.Module:
    """Shard `model` in place over a 1-D mesh and return it. `averaged`: FSDP2 will average gradients over its ranks.
    `more_groups`: the result of `context_of`."""
    if applied(model) is not None:
        raise PlanMismatchError("the model is already parallelized", hint="build a fresh one")
    check_matches(model, plan)
    if plan.cp_size not in (1, plan.ranks) and not more_groups:
        hint = "autoplan.parallelize accepts a mesh with both dims"
        raise PlanMismatchError(f"the plan is for {plan.over} together", hint=hint)
    group = RankGroup.of(mesh)
    modules = dict(model.named_modules(remove_duplicate=False))
    rules = parameter_rules(model, plan)
    if sequence_padding not in ("error", "pad"):
        raise AutoplanError(f"sequence_padding={sequence_padding!r}", hint="choose 'error' or 'pad'")
    randomness = SharedRandomness(group, mesh_device(mesh))
    running = Running(mesh, group, gather_logits, randomness, sequence_padding=sequence_padding)
    running.context, running.more_groups = plan.cp_size > 1, dict(more_groups or {})
    running.can_run_whole, running.outputs = can_run_whole(plan), plan.runtime.outputs
    running.randomness.apart = running.sequence.rank if running.more_groups else 0
    running.split_loss = not reproducible_forward  # its reductions are over ranks too
    running.branches.apart = reproducible_forward  # keeps the model's own order of additions
    works = _works(modules, plan)
    undo: list[Callable[[], None]] = []
    with whole_or_as_it_was(model):
        edits = _edit_integers(modules, plan, running, undo)
        _localise_padding(modules, works, group, undo)
        gathering = {name for name, work in works.items() if work.of(RecurrentCall)}
        whole = ("averaged" if averaged else "summed") if plan.cp_size > 1 else ""
        prepared = prepare_parameters(model, mesh, rules, gathering, whole=whole, context=running.more_groups.get("cp"))
        undo.append(prepared.undo)
        prepared.commit()
        for name, work in works.items():
            undo.append(install(modules[name], work, running).stop)
        guard = guard_of(model, plan, path_guard, group, edits)
        root = _install_root(model, plan, running, guard)
        for handle in (*root, *watch_unrecorded(modules, plan.runtime, group), *keep_dense(model)):
            undo.append(handle.remove)
        for module in modules.values():
            keep_order(module)
        split = (name.rpartition(".")[0] for name, rule in rules.items() if rule is not None and rule.dim is not None)
        undo.append(partial(watch_no_longer, watch_children(modules, dict.fromkeys((*works, *split)))))
        in_helpers = any(">" in call.site.place for work in works.values() for call in work.of(CallRewrite))
        if in_helpers or (guard is not None and guard.compares):
            undo.append(open_scripts(model))
        guard_kernels(model, (modules[name] for name, work in works.items() if work.communicates), undo)
        if reproducible_forward:  # after the hooks, which read the signature of the original forward
            make_reproducible(modules, plan, rules, undo)
        model.__dict__[APPLIED] = Applied(
            plan=plan,
            tp_size=group.size,
            split=tuple(sorted(name for name, rule in rules.items() if rule is not None and rule.dim is not None)),
            edits=edits,
            hooked=tuple(works),
            undo=lambda: _undo(model, undo),
            running=running,
        )
    return model


def record(model: nn.Module, plan: Plan, **facts: Any) -> None:
    """Update the record of a model with `facts`; create it where nothing was split."""
    before = applied(model) or Applied(plan, plan.tp_size, (), (), ())
    model.__dict__[APPLIED] = replace(before, **facts)


def check_matches(model: nn.Module, plan: Plan) -> None:
    """Raise PlanMismatchError, with the nearest path or the difference, unless every pattern of the plan matches
    something in this model and the plan was made for such code and sizes."""
    check_names(model, plan)
    check_fits(model, plan)


def check_names(model: nn.Module, plan: Plan) -> None:
    """Raise PlanMismatchError, with the nearest path, unless every pattern of the plan matches something."""
    parameter_rules(model, plan)
    modules = dict(model.named_modules(remove_duplicate=False))
    for pattern in dict.fromkeys(instruction.pattern for instruction in plan.runtime.instructions):
        _module_names(pattern, modules)


def _undo(model: nn.Module, undo: list[Callable[[], None]]) -> None:
    stop_following(model)
    leave_methods(model)
    while undo:
        undo.pop()()
    model.__dict__.pop(APPLIED, None)


def parameter_rules(model: nn.Module, plan: Plan) -> dict[str, ParameterRule | None]:
    """Return the rule of every parameter and split buffer by full name; raise if a pattern matches nothing."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    names, stored = list(tensors), stored_rules(tensors, plan)
    rule_of: dict[str, ParameterRule | None] = {}
    for rule in plan.runtime.parameters:
        hits = matched_by(rule.pattern, tensors)
        if not hits and not is_stored_packed(rule.pattern, plan, stored):
            raise _unmatched(rule.pattern, names, f"parameter of {type(model).__name__}")
        for name in hits:
            if name not in rule_of or rule.pattern == name:
                rule_of[name] = rule
    return {**rule_of, **stored}


def _module_names(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    hits = matched_by(pattern, modules)
    if not hits:
        raise _unmatched(pattern, modules, "module")
    return hits


def _unmatched(pattern: str, names: Iterable[str], what: str) -> PlanMismatchError:
    close = nearest(pattern, names)
    hint = f"the nearest is {close[0]!r}" if close else "the plan was made for another model"
    return PlanMismatchError(f"the plan's pattern {pattern!r} matches no {what}", hint=hint)


def _works(modules: dict[str, nn.Module], plan: Plan) -> dict[str, ModuleWork]:
    """Return the work of each module; an object that has several names appears once."""
    works: dict[str, ModuleWork] = {}
    names: dict[int, str] = {}

    def work(name: str) -> ModuleWork:
        instance = names.setdefault(id(modules[name]), name)
        return works.setdefault(instance, ModuleWork(instance))

    for instruction in plan.runtime.instructions:
        elsewhere = isinstance(instruction, IntegerEdit) or is_at_exit(instruction)
        for name in () if elsewhere else _module_names(instruction.pattern, modules):
            if all(instruction is not other for other in work(name).instructions):  # once per module object
                work(name).instructions.append(instruction)
    # An embedding that shares the weight of a planned table (T5's `shared`), which `get_input_embeddings` returns, has
    # the same work.
    tables = {id(own_parameters(modules[n]).get("weight")): w for n, w in works.items() if w.of(VocabularyTable)}
    for name, module in modules.items():
        weight = own_parameters(module).get("weight") if isinstance(module, nn.Embedding) else None
        planned = tables.get(id(weight)) if weight is not None else None
        if planned is not None and all(modules[other] is not module for other in works):
            works[name] = replace(planned, name=name, instructions=list(planned.instructions))
    for name in [w.name for w in works.values() if w.of(CallRewrite)]:
        for inner, module in modules.items():
            if inner.startswith(f"{name}." if name else "") and inner != name and module is not modules[name]:
                work(inner).framed = True
    for kind, patterns in (("split", plan.runtime.random), ("whole", plan.runtime.random_whole)):
        for pattern in patterns:
            for name in _module_names(pattern, modules):
                work(name).random = work(name).random or kind  # the model itself may draw on split values
    return works


def _edit_integers(
    modules: dict[str, nn.Module], plan: Plan, running: Running, undo: list[Callable[[], None]]
) -> tuple[tuple[str, str, int, int], ...]:
    done: dict[Any, tuple[str, str, int, int]] = {}
    for edit in plan.runtime.of(IntegerEdit):
        for name in _module_names(edit.pattern, modules):
            key = (id(modules[name]), edit.name, edit.index)
            if key not in done:
                undo.append(execute(edit, At(modules[name], name, (), running)))
                done[key] = name, edit.name, edit.old, edit.on_rank(running.groups[edit.over].rank)
    return tuple(done.values())


def _localise_padding(
    modules: dict[str, nn.Module], works: dict[str, ModuleWork], group: RankGroup, undo: list[Callable[[], None]]
) -> None:
    """Set `padding_idx` of a sharded table: the padding row lives on one rank, where its index is local."""
    for name, work in works.items():
        state = modules[name].__dict__
        padding = state.get("padding_idx")
        for table in work.of(VocabularyTable) if padding is not None else ():
            own = chunk(table.rows, group.size, group.rank)
            state["padding_idx"] = padding - own.start if padding in own else None
            undo.append(partial(state.__setitem__, "padding_idx", padding))


def _install_root(model: nn.Module, plan: Plan, running: Running, guard: PathGuard | None) -> list[Any]:
    seen = bool(plan.runtime.random or plan.runtime.random_whole)
    unseen = draws_in_code(model)
    running.draws_unseen = not seen and "always" in unseen
    random, always = seen or bool(unseen), plan.runtime.draws  # a rate of 0 may be raised at any time
    if random or always:
        meet()
        running.randomness.agree()
    running.draws = always or (random and may_draw(model))
    running.randomness.always = always
    handles = Root(model, running, (random, always), plan.runtime, guard).listen(model)
    return handles + install_inner_entries(model, plan.runtime.of(SplitLogits), running, (random, always))
