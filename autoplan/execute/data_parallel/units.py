"""The FSDP2 units of a model: which modules are gathered together.

The problem: FSDP2 wraps what it is given. A parameter in two units is silently untied or fails at the first step; two
dtypes in one unit fail too; a module that is a child of several blocks must be one unit, not part of the first. So all
units are decided here, before anything is wrapped:

    1. modules shared by several blocks, and groups of modules that a tied parameter links across units
    2. the parts of a unit whose dtype is not that of its other trainable parameters, and those that hold packed tensors
       where others are cast (kept as they are, never cast)
    3. the blocks of every stack, in call order
    4. the token embedding and the output head, when they are not tied
    5. the model itself: everything else
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.execute.quantised.modules import is_packed
from autoplan.values import Stack

FROZEN = ("units", "root", "ignore")


@dataclass(frozen=True)
class Unit:
    """Modules that are gathered at once. `kept_dtype`: its parameters compute in the dtype they have."""

    names: tuple[str, ...]
    last: bool = False  # of its stack: not freed after forward, since backward begins with it
    kept_dtype: bool = False
    block: bool = False


@dataclass
class Units:
    """All units without the root, inner ones first; the parameters that FSDP2 must ignore; scalars; notes for the
    user."""

    units: list[Unit] = field(default_factory=list)
    ignored: set[nn.Parameter] = field(default_factory=set)
    scalars: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_stack(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a stack of matrices, each of which FSDP2 may shard. Packed tensors are not, nor
    those that tp shards unevenly."""
    if parameter.dim() < 3 or not parameter.is_floating_point():
        return False
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if hasattr(type(local), "__tensor_flatten__"):  # of several tensors, which its own code shards
        return False
    return not isinstance(parameter, DTensor) or all(
        local.shape[placed.dim] * parameter.device_mesh.size(at) == parameter.shape[placed.dim]
        for at, placed in enumerate(parameter.placements) if placed.is_shard()
    )  # fmt: skip


def cut_dim(shape: Sequence[int], ranks: int) -> int:
    """Return the dim in which FSDP2 shards a stack whose local tensor has this shape.

    It is usually the first. With fewer matrices than ranks every rank would allocate a full one, mostly padding: then
    it is the first other divisible dim.
    """
    if shape[0] >= ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % ranks == 0), 0)


def choose_units(model: nn.Module, stacks: tuple[Stack, ...], *, frozen: str = "units", casts: bool = False) -> Units:
    """Return all units of `model`; raise, naming parameters, if a unit cannot have one dtype. `casts`: whether
    parameters compute in another dtype than their own, all but packed ones."""
    if frozen not in FROZEN:
        raise AutoplanError(f"frozen={frozen!r}", hint=f"choose one of {', '.join(FROZEN)}")
    search = _Search(model)
    chosen = Units()
    blocks = search.blocks(stacks, frozen, chosen)
    # FSDP2 cannot shard a scalar: such parameters stay replicated and a hook averages their gradients. Nor can it
    # reduce the gradient of a parameter without elements.
    for name, parameter in search.model.named_parameters():
        if parameter.dim() == 0:
            chosen.scalars.append((name, parameter))
        if parameter.dim() == 0 or not parameter.numel():
            chosen.ignored.add(parameter)
    if chosen.scalars:
        names = ", ".join(name for name, _ in chosen.scalars)
        chosen.notes.append(f"{names}: scalar parameters are replicated")
    ends = search.ends(blocks)
    inner = search.shared(blocks, chosen)
    done = {name for unit in inner for name in unit.names}
    blocks = [unit for unit in blocks if not done.intersection(unit.names)]
    ends = [unit for unit in ends if not done.intersection(unit.names)]
    outer = [*blocks, *ends]
    root = Unit(("",))
    parts: list[Unit] = []
    for unit in [*inner, *outer, root]:
        parts += search.by_dtype(unit, [*inner, *outer, *parts], chosen)
        parts += search.packed(unit, [*inner, *outer, *parts]) if casts else ()
    chosen.units = [*parts, *inner, *outer]
    return chosen


class _Search:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.owners: dict[int, list[nn.Module]] = {}
        self.first_name: dict[int, str] = {}
        for name, module in self.modules.items():
            if id(module) in self.first_name:
                continue
            self.first_name[id(module)] = name
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.owners.setdefault(id(parameter), []).append(module)

    def blocks(self, stacks: tuple[Stack, ...], frozen: str, chosen: Units) -> list[Unit]:
        units: list[Unit] = []
        seen: set[int] = set()
        for stack in stacks:
            names = [n for n in stack.fqns if self._parameters(n) and id(self.modules[n]) not in seen]
            seen.update(id(self.modules[n]) for n in names)
            if frozen != "units" and not any(p.requires_grad for n in names for p in self._parameters(n)):
                where = "belong to the model's own unit" if frozen == "root" else "are replicated"
                chosen.notes.append(f"{stack.name}: {len(names)} frozen blocks {where}")
                if frozen == "ignore":
                    chosen.ignored.update(p for n in names for p in self._parameters(n))
                continue
            units += [Unit((n,), last=place == len(names) - 1, block=True) for place, n in enumerate(names)]
        return units

    def ends(self, blocks: list[Unit]) -> list[Unit]:
        """Return units for the token embedding and the output head: neither is needed while the blocks run."""
        inside = {id(m) for unit in blocks for n in unit.names for m in self.modules[n].modules()}
        units: list[Unit] = []
        for getter, last in zip(conventions().ends, (False, True), strict=True):
            try:
                module: object = getattr(self.model, getter, lambda: None)()
            except (NotImplementedError, AttributeError):  # not supported by this model
                continue
            if not isinstance(module, (nn.Embedding, nn.Linear)) or id(module) in inside or not blocks:
                continue
            if id(module) not in self.first_name or self.first_name[id(module)] == "":
                continue
            if all(self.owners[id(p)] == [module] for p in module.parameters()):
                units.append(Unit((self.first_name[id(module)],), last=last))
        return units

    def shared(self, blocks: list[Unit], chosen: Units) -> list[Unit]:
        """Return units for modules shared by several blocks, and for modules that are linked by a tied parameter."""
        homes: dict[int, set[str]] = {}
        for unit in blocks:
            for below in self.modules[unit.names[0]].modules():
                homes.setdefault(id(below), set()).add(unit.names[0])
        unique = (self.modules[name] for name in self.first_name.values())
        several = [m for m in unique if len(homes.get(id(m), ())) > 1 and any(True for _ in m.parameters())]
        below_shared = {id(b) for m in several for b in m.modules() if b is not m}
        units = [Unit((self.first_name[id(m)],)) for m in several if id(m) not in below_shared]
        for unit in units:
            chosen.notes.append(f"{unit.names[0]} is shared by several blocks: a unit of its own")
        in_units = {id(b) for m in several for b in m.modules()}
        groups: dict[frozenset[str], None] = {}
        for owners in self.owners.values():
            where = {next(iter(homes.get(id(o), {""}))) for o in owners}
            if len(where) > 1 and not any(id(o) in in_units for o in owners):
                groups[self._climbed(frozenset(self.first_name[id(o)] for o in owners))] = None
        for names in _merged(list(groups)):
            chosen.notes.append(f"{', '.join(names)} share a parameter: one unit together")
            units.append(Unit(tuple(names)))
        return units

    def _climbed(self, names: frozenset[str]) -> frozenset[str]:
        """Return the largest modules around these that all hold the same parameters."""
        while True:
            parents = frozenset(name.rpartition(".")[0] for name in names)
            parameters_of = {frozenset(map(id, self._parameters(parent))) for parent in parents}
            containers = any(isinstance(self.modules[p], (nn.ModuleList, nn.ModuleDict)) for p in parents)
            if len(parents) < len(names) or len(parameters_of) > 1 or "" in parents:
                return names
            if containers:  # a container has no forward: look past it, or stay
                further = self._climbed(parents)
                return names if further == parents else further
            names = parents

    def by_dtype(self, unit: Unit, others: list[Unit], chosen: Units) -> list[Unit]:
        """Return the inner units that leave `unit` with trainable parameters of one dtype."""
        elsewhere = {id(self.modules[n]) for other in others if other != unit for n in other.names if n}
        units: list[Unit] = []
        own = [p for n in unit.names for m in self._own(n, elsewhere) for p in _direct(m, chosen.ignored)]
        dtypes = Counter[torch.dtype]()
        for parameter in {id(p): p for p in own}.values():
            dtypes[parameter.dtype] += parameter.numel()
        if len(dtypes) < 2:
            return []
        main = dtypes.most_common(1)[0][0]
        for name in unit.names:
            self._split(name, main, elsewhere, chosen.ignored, units)
        for part in units:
            chosen.notes.append(f"{part.names[0]} keeps its own dtype: a unit of its own")
        return units

    def packed(self, unit: Unit, others: list[Unit]) -> list[Unit]:
        """Return one unit for the modules that hold packed tensors, whose bits a cast would destroy."""
        elsewhere = {id(self.modules[n]) for other in others if other != unit for n in other.names if n}
        own = {id(m): m for n in unit.names for m in self._own(n, elsewhere) if is_packed(m)}
        names = tuple(self.first_name[number] for number in own)
        return [Unit(names, kept_dtype=True)] if names and names != unit.names else []

    def _split(
        self, name: str, main: torch.dtype, elsewhere: set[int], ignored: set[nn.Parameter], found: list[Unit]
    ) -> None:
        module = self.modules[name]
        dtypes = {p.dtype for p in _direct(module, ignored)}
        odd = [k for k, p in module._parameters.items() if p is not None and p.requires_grad and p.dtype != main]
        odd = [k for k in odd if module._parameters[k] not in ignored]
        if odd and len(dtypes) > 1:
            full = ", ".join(f"{name}.{k}" if name else k for k in odd)
            raise AutoplanError(
                f"FSDP2 gathers parameters of one dtype at once, but {full} "
                f"({', '.join(sorted({str(module._parameters[k].dtype) for k in odd}))}) are in one module with {main}",
                hint="cast them to one dtype (model.to), or freeze the odd ones",
            )
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if id(child) in elsewhere:
                continue
            kinds = {p.dtype for m in self._own(path, elsewhere) for p in _direct(m, ignored)}
            if len(kinds) == 1 and kinds != {main} and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                found.append(Unit((path,), kept_dtype=True))
            elif kinds - {main}:
                self._split(path, main, elsewhere, ignored, found)
        if odd and len(dtypes) == 1:
            if not name:
                raise AutoplanError(
                    f"the model's own parameters {', '.join(odd)} are not {main} like the rest",
                    hint="cast them to one dtype",
                )
            found.append(Unit((name,), kept_dtype=True))

    def _own(self, name: str, elsewhere: set[int]) -> Iterable[nn.Module]:
        """Yield the modules of a unit without those of units inside it."""
        pending, seen = [self.modules[name]], set[int]()
        while pending:
            module = pending.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield module
                pending += [child for child in module.children() if id(child) not in elsewhere]

    def _parameters(self, name: str) -> list[nn.Parameter]:
        return list(self.modules[name].parameters())


def _direct(module: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Parameter]:
    """Return the trainable parameters that a module holds itself."""
    parameters = (p for p in module._parameters.values() if p is not None)
    return [p for p in parameters if p.requires_grad and p not in ignored]


def _merged(groups: list[frozenset[str]]) -> list[list[str]]:
    """Merge groups that overlap."""
    merged: list[set[str]] = []
    for group in groups:
        touching = [other for other in merged if other & group]
        merged = [other for other in merged if not other & group]
        merged.append(set(group).union(*touching))
    return [sorted(group) for group in merged]
