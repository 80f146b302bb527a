"""Put every parameter of a model on the tp mesh, prepared first and committed as one.

The problem: a model is sharded fully or left as it was. So nothing of the model changes while rules are checked and
shards are cut; `commit` then only swaps references, and `undo` swaps them back.

Every parameter becomes a DTensor: the split ones as `Shard(dim)` holding `Layout.rows` of the original (`held.py`
explains the order), all others as `Replicate`. Optimizers and gradient clipping cannot mix DTensors and plain tensors.
Parameters that are one object stay one object under all their names.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.hooks import RemovableHandle

from autoplan.common.errors import AutoplanError, IndivisibleError, PlanMismatchError
from autoplan.common.layout import Layout, chunk
from autoplan.common.torch_internals import gradient_hooks, is_fake, own_buffers, own_parameters
from autoplan.execute.agreement import meet
from autoplan.execute.collectives import RankGroup, all_gather_rows, mesh_device
from autoplan.execute.parameters.former import mark_replaced, unmark_replaced
from autoplan.execute.parameters.held import Held, ModuleRecord, Reading
from autoplan.execute.parameters.local_views import refresh_flat_weights, view_class
from autoplan.execute.parameters.state_dict import register_hooks
from autoplan.patches.classes import give_class
from autoplan.values import ParameterRule

Rules = Mapping[str, ParameterRule | None]
Swap = tuple[Any, Any, Any, Any]  # a dict or list, the key or index in it, the old value and the new one
_SAMPLES = 16  # elements of each parameter that ranks compare


def prepare_parameters(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    rules: Rules,
    gathering: Container[str] = (),
    *,
    whole: str = "",
    context: RankGroup | None = None,
) -> Prepared:
    """Check `rules` (by full name of a parameter or buffer; absent or None: replicated) and cut all shards.

    Collective: ranks compare samples of their weights, since shards of differently seeded models would train silently.
    `gathering`: modules whose weights are gathered for a call, so that they compute with more than the local shard.
    `whole`: parameters stay replicated, and code of the model reads its rank's part of them; their gradients are
    "summed" over ranks here, or "averaged" elsewhere. `context`: parameters are sharded over tp, and this applies to
    each rank's shard, over these ranks.
    """
    builder = _Builder(tp_mesh, RankGroup.of(tp_mesh), _by_tensor(model, rules), whole, context)
    prepared = Prepared(model)
    reading = Reading(summing=whole == "summed")
    for path, module in model.named_modules():
        if not any(True for _ in module.parameters()) and not any(True for _ in module.buffers(recurse=False)):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            raise AutoplanError(f"{path or 'the model'} is a TorchScript module: its code cannot run on shards")
        record = ModuleRecord(reading, type(module))
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                new, record.parameters[name] = builder.parameter(
                    _join(path, name), parameter, fused=isinstance(module, nn.RNNBase) and path not in gathering
                )
                prepared.swaps.append((own_parameters(module), name, parameter, new))
        for name, buffer in own_buffers(module).items():
            if buffer is None:
                continue
            new_buffer, held = builder.buffer(_join(path, name), buffer)
            if held is not None:
                record.buffers[name] = held
            if new_buffer is not buffer:
                prepared.swaps.append((own_buffers(module), name, buffer, new_buffer))
        kind: Any = type(module)
        prepared.modules.append((module, record, kind, view_class(kind, tuple(record.parameters))))
    _refuse_differing_ranks(builder)
    prepared.replaced += [(fqn, old) for fqn, old in builder.originals if builder.made[id(old)][0] is not old]
    new_of = {id(old): builder.made[id(old)][0] for _, old in prepared.replaced}
    prepared.swaps += [swap for module in model.modules() for swap in held_in(module, new_of)]
    return prepared


_STATE = frozenset(vars(nn.Module()))


class _Cell:
    """A cell of a closure, set as a dict's value is."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    def now(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # empty
            return None

    def __setitem__(self, _: Any, value: Any) -> None:
        self.cell.cell_contents = value


def held_in(module: nn.Module, new_of: Mapping[int, nn.Parameter]) -> Iterator[Swap]:
    """Yield where a module's own lists and dicts, tuples in them, and closures hold one of these parameters (by id)."""
    if type(module).__module__.startswith("torch."):  # recurrent networks make their list anew
        return
    left = [value for key, value in vars(module).items() if key not in _STATE]
    seen: set[int] = set()
    while left:
        container = left.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        places: Iterable[tuple[Any, Any, Any]] = ()
        if type(container) is FunctionType:
            places = ((cell, None, cell.now()) for cell in map(_Cell, container.__closure__ or ()))
        elif type(container) in (list, dict):
            items = container.items() if type(container) is dict else enumerate(container)
            places = ((container, place, item) for place, item in items)
        for where, place, item in places:
            if id(item) in new_of:
                yield where, place, item, new_of[id(item)]
            elif type(item) is tuple and any(id(part) in new_of for part in item):
                yield where, place, item, tuple(new_of.get(id(part), part) for part in item)
            elif type(item) in (list, dict, FunctionType):
                left.append(item)


@dataclass
class Prepared:
    """All changes that sharding will make. `commit` and `undo` swap references and cannot fail half way."""

    model: nn.Module
    swaps: list[Swap] = field(default_factory=list)
    modules: list[tuple[nn.Module, ModuleRecord, type[nn.Module], type[nn.Module]]] = field(default_factory=list)
    replaced: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def commit(self) -> None:
        """Shard the model."""
        assert not self._hooks, "committed already"
        for where, name, _, new in self.swaps:
            where[name] = new
        for fqn, old_parameter in self.replaced:
            mark_replaced(old_parameter, fqn)
        for module, record, _, view in self.modules:
            record.attach(module)
            give_class(module, view)
            self._hooks += register_hooks(module)
            refresh_flat_weights(module)

    def undo(self) -> None:
        """Restore the model, with the very same parameter objects."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for where, name, old, _ in self.swaps:
            where[name] = old
        for _, parameter in self.replaced:
            unmark_replaced(parameter)
        for module, _, cls, _ in self.modules:
            give_class(module, cls)
            ModuleRecord.detach(module)
            refresh_flat_weights(module)


class _Builder:
    """A builder that makes each tensor's shard once, however many names it has."""

    def __init__(self, mesh: DeviceMesh, group: RankGroup, rules: dict[int, ParameterRule], whole: str,
                 context: RankGroup | None) -> None:  # fmt: skip
        self.mesh, self.group, self.rules, self.whole, self.context = mesh, group, rules, whole, context
        self.device = mesh_device(mesh)
        self.made: dict[int, tuple[nn.Parameter, Held]] = {}
        self.originals: list[tuple[str, nn.Parameter]] = []

    def parameter(self, fqn: str, parameter: nn.Parameter, *, fused: bool) -> tuple[nn.Parameter, Held]:
        if id(parameter) not in self.made:
            if isinstance(parameter, DTensor):
                raise AutoplanError(f"{fqn} is already a DTensor", hint="shard the model once, before fully_shard")
            if torch.nn.parameter.is_lazy(parameter):
                raise AutoplanError(f"{fqn} is uninitialized", hint="run the lazy module once")
            if type(parameter) is not nn.Parameter and not is_fake(parameter):
                raise AutoplanError(
                    f"{fqn} is a {type(parameter).__name__}: only plain parameters can be sharded",
                    hint="if it is a quantised weight: autoplan.packed_model gives a plain model on meta the packed "
                    "tensors of its plan, and load_weights fills them from the checkpoint",
                )
            if any(gradient_hooks(parameter)):
                text = f"{fqn} has gradient hooks, which would be lost"
                raise AutoplanError(text, hint="register them after sharding")
            held = self._held(fqn, parameter)
            if held.dim is not None and fused:
                raise AutoplanError(
                    f"{fqn} cannot be sharded: a recurrent network computes all gates in one fused call",
                    hint="replicate its parameters, or let autoplan plan it: the call then gets gathered weights",
                )
            self.made[id(parameter)] = (
                (parameter, Held(held.shape, self.group, read=replace(held, averaged=self.whole == "averaged")))
                if self.whole and self.context is None
                else (self._distribute(parameter, held), held)
            )
            self.originals.append((fqn, parameter))
        return self.made[id(parameter)]

    def buffer(self, fqn: str, buffer: torch.Tensor) -> tuple[torch.Tensor, Held | None]:
        """Return the local shard of a split buffer; a replicated one unchanged, but on the mesh's device."""
        held = self._held(fqn, buffer)
        if held.dim is None and (held.read is None or held.read.dim is None):
            return self._to_device(buffer), None
        return self._to_device(held.buffer(buffer.detach())), held

    def _held(self, fqn: str, tensor: torch.Tensor) -> Held:
        rule = self.rules.get(id(tensor), ParameterRule(fqn))
        held = self._laid(fqn, tuple(tensor.shape), rule, self.group)
        if rule.read is None or self.context is None:
            return held
        shape = tuple(held.own if dim == held.dim else size for dim, size in enumerate(held.shape))
        read = self._laid(fqn, shape, rule.read, self.context)
        return replace(held, read=replace(read, averaged=self.whole == "averaged"))

    def _laid(self, fqn: str, shape: tuple[int, ...], rule: ParameterRule, group: RankGroup) -> Held:
        tp = group.size
        if rule.dim is None or rule.layout is None or not Layout.parse(rule.layout).is_split:
            return Held(shape, group, gradient=rule.gradient, divide=rule.divide)
        if not -len(shape) <= rule.dim < len(shape):
            raise PlanMismatchError(f"{fqn} has {len(shape)} dims, but the plan shards dim {rule.dim}")
        held = Held(shape, group, rule.dim % len(shape), rule.layout, rule.gradient, rule.divide)
        # The layout must fit the tensor, cover it, and be as even as an ordinary `Shard`.
        layout = Layout.parse(rule.layout)
        assert held.dim is not None
        where, size = f"{fqn}, dim {held.dim}", held.shape[held.dim]
        if layout.size != size:
            raise PlanMismatchError(f"{where} has {size} rows, but its layout {layout} is for {layout.size}")
        counts = [len(rows) for rows in held.rows]
        missing = size - len({row for rows in held.rows for row in rows})
        if missing:
            raise IndivisibleError(f"{where}: layout {layout} assigns {missing} of {size} rows to no rank at tp {tp}")
        if not layout.is_uneven and counts != [len(chunk(sum(counts), tp, rank)) for rank in range(tp)]:
            raise IndivisibleError(f"{where}: layout {layout} gives ranks {counts} rows at tp {tp}, which is uneven")
        if held.gradient == "sum" and tp > 1 and not held.shared.count:
            raise PlanMismatchError(f"{where}: every row of {layout} is on one rank only: no gradient to sum")
        return held

    def _distribute(self, parameter: nn.Parameter, held: Held) -> nn.Parameter:
        with torch.no_grad():
            local = self._to_device(held.roomy(held.cut(parameter.detach())))
            if held.dim is None:
                shape, stride, placement = local.shape, local.stride(), Replicate()
            else:
                sizes = list(held.shape)
                sizes[held.dim] = sum(held.room)
                shape, stride = torch.Size(sizes), torch.empty(sizes, device="meta").stride()
                placement = Shard(held.dim)
            new: Any = DTensor.from_local(local, self.mesh, [placement], run_check=False, shape=shape, stride=stride)
            # As nn.Parameter does, without its `detach`, which would make DTensor propagate placements again.
            new.requires_grad_(parameter.requires_grad)._is_param = True
        for name, value in vars(parameter).items():  # attributes that libraries set on parameters
            new.__dict__.setdefault(name, value)
        return new

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta or tensor.device == self.device else tensor.to(self.device)


def _by_tensor(model: nn.Module, rules: Rules) -> dict[int, ParameterRule]:
    """Return the rules by the identity of their tensor; names of one tensor must agree."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    rules_of: dict[int, tuple[str, ParameterRule]] = {}
    for fqn, rule in rules.items():
        if fqn not in tensors:
            near = difflib.get_close_matches(fqn, tensors, n=1)
            raise PlanMismatchError(
                f"the plan names {fqn}, which this model does not have",
                hint=f"the nearest is {near[0]}" if near else "was the plan made for another model?",
            )
        if rule is None:
            continue
        other, first = rules_of.setdefault(id(tensors[fqn]), (fqn, rule))
        if _meaning(first) != _meaning(rule):
            raise PlanMismatchError(f"{other} and {fqn} are one tensor, but the plan shards them differently")
    return {key: rule for key, (_, rule) in rules_of.items()}


def _meaning(rule: ParameterRule) -> tuple[Any, ...]:
    read = None if rule.read is None else _meaning(rule.read)
    return rule.dim, rule.layout, rule.gradient, rule.divide, read


def _refuse_differing_ranks(builder: _Builder) -> None:
    """Compare a few elements of every parameter across ranks, in one exchange."""
    stored = ((fqn, tensor) for fqn, tensor in builder.originals if not (tensor.is_meta or is_fake(tensor)))
    real = [(fqn, tensor.detach()) for fqn, tensor in stored if tensor.numel()]
    if builder.group.size == 1 or not builder.originals:
        return
    samples = []
    for _, tensor in real:
        flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)][: 2 * _SAMPLES]
        samples.append(sample.to(torch.float64).to(builder.device))
    meet()
    group, each = builder.group, [1] * builder.group.size
    numbers = torch.tensor([[len(real), sum(map(len, samples))]], device=builder.device)
    counts = all_gather_rows(numbers, group, 0, each).tolist()
    if any(count != counts[0] for count in counts):
        shown = ", ".join(f"rank {rank} of {group.size}: {count}" for rank, (count, _) in enumerate(counts))
        raise AutoplanError(
            f"the tp ranks hold weights in different subsets of the {len(builder.originals)} parameters: {shown}",
            hint="build the model with its weights on every rank of a tp group, or on meta on every one",
        )
    if not real:
        return
    all_ranks = all_gather_rows(torch.cat(samples)[None], group, 0, each)
    wrong = (~torch.isclose(all_ranks, all_ranks[:1], rtol=0, atol=0, equal_nan=True)).any(0)
    if not bool(wrong.any()):
        return
    flags = wrong.split([len(sample) for sample in samples])
    names = [fqn for (fqn, _), flag in zip(real, flags, strict=True) if bool(flag.any())]
    raise AutoplanError(
        f"the ranks hold different values in {len(names)} of {len(real)} parameters, first {names[0]}",
        hint="build the model from one seed or one checkpoint on every rank of a tp group",
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
