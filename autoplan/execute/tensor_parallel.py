"""Apply a plan to a live model: all of it, or none of it.

Everything that can fail comes first: patterns are matched, shards are cut, integers are checked. Then parameters are
swapped, integers set and hooks installed. If a step fails, the model is left as it was (patches/as_it_was.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.layout import chunk
from autoplan.common.options import check_argument
from autoplan.common.patterns import matched_by, matches, nearest
from autoplan.common.torch_internals import CONVOLUTIONS, own_parameters
from autoplan.execute.agreement import APPLIED, Voters, meet
from autoplan.execute.collectives import RankGroup, all_gather_rows, mesh_device, take_rows, whole_order
from autoplan.execute.executors import At, Running, execute
from autoplan.execute.fits import check_fits, is_stored_packed, stored_rules
from autoplan.execute.guard.guard import PathGuard, guard_of
from autoplan.execute.hooks.function_mode import guard_kernels
from autoplan.execute.hooks.install import ModuleWork, install, keep_order
from autoplan.execute.hooks.replaced import install_inner_entries, keep_dense, watch_children, watch_no_longer
from autoplan.execute.hooks.root import Root, can_run_whole, is_at_exit
from autoplan.execute.hooks.unseen import watch_unrecorded
from autoplan.execute.parameters.held import Held, record_of
from autoplan.execute.parameters.optimizer import stop_following
from autoplan.execute.parameters.shard import held_in, prepare_parameters
from autoplan.execute.parameters.views import local_view
from autoplan.execute.random_streams import SharedRandomness, draws_in_code, may_draw
from autoplan.execute.weights.methods import leave_methods
from autoplan.patches.as_it_was import whole_or_as_it_was
from autoplan.patches.classes import open_scripts
from autoplan.values import (
    CallRewrite,
    IntegerEdit,
    MeanOverRanks,
    ParameterRule,
    Plan,
    RecurrentCall,
    SplitLogits,
    VocabularyTable,
)


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
    parameters = {id(parameter): parameter for parameter in modules[""].parameters()}
    for name, module in modules.items():
        if any(True for _ in held_in(module, parameters)):
            work(name).holds = True
    for name in [w.name for w in works.values() if w.of(CallRewrite) or w.holds]:
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


# The same forward, bit for bit, at every tensor-parallel size: to find out where two runs diverge.
#
# The problem: a row-parallel product is a sum over ranks, and float sums depend on the number and order of the
# summands. A column-parallel one has no sum, but a library may choose another kernel for another shape. So here every
# product with a sharded weight is computed in full, from gathered shards, exactly as the unsharded model does it. Then
# a rank keeps its columns, or (where its result is a partial sum) the first rank returns all of it and the others
# return zeros, so that the all-reduce rounds nothing. Backward is the ordinary one, on shards. It is slow, and one full
# weight at a time is in memory.
#
# Where partial sums come from something else (experts in one tensor, a norm over a sharded axis) it refuses, by name.


def make_reproducible(
    modules: Mapping[str, nn.Module],
    plan: Plan,
    rules: Mapping[str, ParameterRule | None],
    undo: list[Callable[[], None]],
) -> None:
    """Replace each product with a sharded weight by one with the full weight, once parameters are sharded."""
    cut = {name: rule.dim for name, rule in rules.items() if rule is not None and rule.dim is not None}
    refused = [f"{call.pattern}: {call.site.function}" for call in plan.runtime.of(CallRewrite) if call.reduces]
    refused += [f"{mean.pattern}: a mean over ranks" for mean in plan.runtime.of(MeanOverRanks)]
    for name, dim in cut.items():
        path, _, own = name.rpartition(".")
        module = modules[path]
        parameter = own_parameters(module).get(own)
        # A lookup has one nonzero summand, and a conv sharded by output channel none: nothing is rounded.
        is_table = any(matches(table.pattern, path) for table in plan.runtime.of(VocabularyTable))
        is_lookup = is_table and isinstance(module, nn.Embedding)
        by_channel = isinstance(module, CONVOLUTIONS) and dim == 0
        if parameter is None or parameter.dim() < 2 or is_lookup or by_channel:
            continue
        linear = type(module).forward is nn.Linear.forward or conventions().is_transposed_linear(module)
        if own != "weight" or not linear:
            refused.append(name)
        elif "forward" not in module.__dict__:
            module.__dict__["forward"] = MethodType(_linear, module)
            undo.append(partial(module.__dict__.pop, "forward", None))
    if refused:
        raise AutoplanError(
            f"reproducible_forward: {len(refused)} sums over ranks are not products of a module with its weight, "
            f"first {refused[0]}",
            hint="do not set reproducible_forward; autoplan.verify(rounding=True) measures the spread of the results",
        )


def _linear(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute `nn.Linear.forward`, or that of the transposed linear in GPT-2 and models like it."""
    record = record_of(self)
    assert record is not None
    held, transposed = record.parameters["weight"], conventions().is_transposed_linear(self)
    bias = own_parameters(self).get("bias")
    held_bias = record.parameters.get("bias")
    if held_bias is not None and held_bias.divide:
        bias = local_view(bias, replace(held_bias, divide=False))
    elif bias is not None:
        bias = self.bias
    return _Product.apply(x, self.weight, bias, held, held_bias, transposed)


def _in_full(x: torch.Tensor, held: Held | None, dim: int) -> torch.Tensor:
    """Return the global tensor, its rows in the checkpoint's order."""
    if held is None or held.dim is None:
        return x
    whole = all_gather_rows(x, held.group, dim, [len(rows) for rows in held.rows])
    order = whole_order(held.rows)
    return whole.contiguous() if order is None else take_rows(whole, dim, order)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
        held, held_bias, transposed = how
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.biased = transposed, bias is not None
        assert held.dim is not None
        whole_weight = _in_full(weight, held, held.dim)
        whole_bias = None if bias is None else _in_full(bias, held_bias, 0)
        sums = held.dim == (0 if transposed else 1)
        whole_x = _in_full(x, held, -1) if sums else x
        if transposed:
            product = torch.addmm(whole_bias, whole_x.view(-1, whole_x.shape[-1]), whole_weight)
            product = product.view(*x.shape[:-1], -1)
        else:
            product = F.linear(whole_x, whole_weight, whole_bias)
        group: RankGroup = held.group
        if sums:
            return product if group.rank == 0 else torch.zeros_like(product)
        return take_rows(product, -1, held.rows[group.rank])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of this rank's shards, as if the product had been computed from them."""
        x, weight = ctx.saved_tensors
        rows, of_rows = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        of_x = gradient @ (weight.T if ctx.transposed else weight)
        of_weight = rows.T @ of_rows if ctx.transposed else of_rows.T @ rows
        return of_x, of_weight, of_rows.sum(0) if ctx.biased else None, None, None, None
