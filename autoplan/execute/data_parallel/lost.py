"""Refuse what FSDP2 loses silently: changes of gathered parameters, hooks on parameters, gradients by them, copies.

FSDP2 gathers the parameters of a unit into memory of its own, and frees it after the forward: what a forward writes
into a parameter (a clamp, a moving average) is gone. It cannot be carried back, since data-parallel ranks write
what their own data says. And FSDP2 sets gradients itself, so that hooks on parameters never run, and gradients that
are asked for by parameters (`torch.autograd.grad`) are those of gathered ones, which the caller has not.

Gathered parameters stay in place after a forward, until its backward (after an evaluation: for good).
`parameters()` of any module and attributes (`model.head.weight`) return the sharded ones in their place: an
optimizer would update copies, whose memory FSDP2 frees. If the sharded ones are changed, they are gathered anew.
Reading frees nothing, since one rank may read alone, and ranks must gather together.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from functools import partial
from itertools import product
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autoplan.common.errors import AutoplanError
from autoplan.common.torch_internals import backward_hooks, is_fake, local_part, own_parameters, version_of
from autoplan.execute.collectives import in_backward
from autoplan.execute.parameters.held import FREE, record_of
from autoplan.patches.tensors import told_of_inputs


def watch_lost(units: Iterable[tuple[str, nn.Module]], ignored: Container[nn.Parameter]) -> None:
    """Check units, inner ones first, at each forward. FSDP2 has wrapped all of them already: these hooks run while
    parameters are gathered. `ignored`: parameters that FSDP2 leaves alone."""
    inside: set[nn.Module] = set()
    for name, unit in units:
        own = [(f"{name}.{path}".strip("."), module) for path, module in unit.named_modules() if module not in inside]
        inside.update(module for _, module in own)
        watched = [
            (f"{path}.{key}".lstrip("."), module, key, parameter)
            for path, module in own
            for key, parameter in own_parameters(module).items()
            if parameter is not None and parameter not in ignored
        ]
        if watched:
            watch = _Watch(watched)
            unit.register_forward_pre_hook(watch.begin)
            unit.register_forward_hook(watch.end, prepend=True)


def _refuse_gradients(inputs: list[Any], outputs: list[Any]) -> None:
    """Refuse gradients that are asked for by parameters: the graph holds what was gathered. And refuse to make a graph
    of gradients through units: their backward frees what such a graph reads."""
    for gathered, x in product(list(_alive), inputs):
        name = next((name for name, place in gathered.names.items() if gathered.sharded[place] is x), None)
        if name is not None:
            raise AutoplanError(
                f"a gradient is asked for by the parameter {name}, which FSDP2 shards: the graph holds gathered copies",
                hint="call backward() without inputs= and read .grad; or leave dp_shard out of the mesh",
            )
    inside = any(gathered.running and gathered.thread == get_ident() for gathered in list(_alive))  # while gathered
    if outputs and not inside and _goes_through_units(outputs):
        raise AutoplanError(
            "create_graph=True for a gradient through FSDP2 units: their backward frees the gathered parameters, which "
            "a second backward would read",
            hint="leave dp_shard out of the mesh",
        )


def _goes_through_units(outputs: list[Any]) -> bool:
    pending, seen = [x.grad_fn for x in outputs], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("RegisterPostBackwardFunction"):
            return True
        seen.add(node)
        pending += [node for node, _ in node.next_functions]
    return False


class _Watch:
    """The parameters of one unit: name, module and key, and the parameter as it lies on ranks."""

    def __init__(self, watched: list[tuple[str, nn.Module, str, nn.Parameter]]) -> None:
        self.watched = watched
        self.versions: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}
        self.sums: dict[str, int] = {}
        self.modes = Counter[tuple[bool, bool]]()

    def begin(self, unit: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        self.versions.clear()
        self.sums.clear()
        self.modes[unit.training, torch.is_grad_enabled()] += 1
        summed = self.modes[unit.training, torch.is_grad_enabled()] <= _SUMMED
        for name, module, key, on_ranks in self.watched:
            if any(not _is_known(hook) for hook in (backward_hooks(on_ranks) or {}).values()):
                raise AutoplanError(
                    f"a hook on the parameter {name} would never run: FSDP2 sets its gradient without it",
                    hint="register_post_accumulate_grad_hook, or change gradients after backward",
                )
            if on_ranks.grad is not None and not isinstance(on_ranks.grad, DTensor):
                raise AutoplanError(
                    f"the gradient of {name} was replaced by a plain tensor; FSDP2 adds to a sharded one",
                    hint="change it in place: parameter.grad.add_(...), or parameter.grad.copy_(...)",
                )
            gathered = own_parameters(module).get(key)
            if gathered is not None and gathered is not on_ranks and not gathered.is_inference():
                self.versions[name] = gathered, _versions(gathered)
                if summed and not gathered.is_meta and not is_fake(gathered):
                    self.sums[name] = _sum_of_bits(gathered)

    def end(self, unit: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for name, (gathered, version) in self.versions.items():
            if _versions(gathered) != version or (name in self.sums and _sum_of_bits(gathered) != self.sums[name]):
                raise AutoplanError(
                    f"the forward of {type(unit).__name__} changes the parameter {name} in place: FSDP2 gathers it "
                    "for the forward and loses the change",
                    hint="change it outside of the forward, after the optimizer's step; or leave dp_shard out of the "
                    "mesh",
                )
        self.versions.clear()
        self.sums.clear()


_SUMMED = 2  # forwards of a unit in each mode in which writes are found that torch does not count (`weight.data.mul_`)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(x: torch.Tensor) -> int:
    local = (local_part(x) if isinstance(x, DTensor) else x).detach()
    local = torch.view_as_real(local) if local.is_complex() else local
    return int(local.contiguous().view(_BITS[local.element_size()]).sum())


def _versions(x: torch.Tensor) -> tuple[int, ...]:
    """Return the versions of a tensor and of a DTensor's shard: a write to one is not counted by the other."""
    if x.is_inference():
        return ()
    return (version_of(x), version_of(local_part(x))) if isinstance(x, DTensor) else (version_of(x),)


def _is_known(hook: Any) -> bool:
    """Return whether a hook is autoplan's (for gradients that do not come from the forward) or a tool's of torch."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] in ("autoplan", "torch")


def list_sharded(model: nn.Module, ignored: Container[nn.Parameter]) -> None:
    """Let `parameters()`, `named_parameters()` and attributes return sharded parameters also after a forward, and
    refuse gradients that are asked for by them. `ignored`: as for `watch_lost`."""
    gathered = _Gathered(model, ignored)
    _alive.add(gathered)
    told_of_inputs(_refuse_gradients).until_gone(model)
    vars(model)[FREE] = gathered.free
    for module in model.modules():
        vars(module)["named_parameters"] = partial(gathered.named_parameters, module)
        record = record_of(module)
        if record is not None:
            record.reading.gathered = gathered
        if own_parameters(module):
            handle = module.register_load_state_dict_pre_hook(lambda *loaded: gathered.free())
            module._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)  # before what reads the placements


class _Gathered:
    """What FSDP2 leaves gathered after a forward (`left`, by id), with the sharded parameter in whose place it is."""

    def __init__(self, model: nn.Module, ignored: Container[nn.Parameter]) -> None:
        self.units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.running: set[nn.Module] = set()
        self.thread = get_ident()  # of a rank that is a thread
        self.sharded: dict[tuple[nn.Module, str], nn.Parameter] = {}
        self.names: dict[str, tuple[nn.Module, str]] = {}
        for path, module in model.named_modules():
            for key, parameter in own_parameters(module).items():
                if parameter is not None:
                    self.sharded[module, key] = parameter
                if parameter is not None and parameter not in ignored:
                    self.names[f"{path}.{key}".lstrip(".")] = module, key
        self.names_in: dict[nn.Module, list[str]] = {unit: [] for unit in self.units}
        homes = {inside: unit for unit in self.units for inside in unit.modules()}  # the innermost unit of each module
        for name, (module, _) in self.names.items():
            self.names_in[homes[module]].append(name)
        self.left: dict[int, tuple[torch.Tensor, nn.Parameter, tuple[int, ...]]] = {}
        for unit in self.units:
            unit.register_forward_pre_hook(self.begin, prepend=True)
            unit.register_forward_hook(self.end, always_call=True)

    def begin(self, unit: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        self._refuse_replaced(unit)
        if not self.running:
            if any(_versions(sharded) != versions for _, sharded, versions in self.left.values()):
                self.free()
            for (module, key), before in self.sharded.items():
                now = own_parameters(module).get(key)
                if now is not None and now is not before and _mesh_dims(now) == _mesh_dims(before):
                    self.sharded[module, key] = now  # replaced, as by `model.to`
        self.running.add(unit)

    def _refuse_replaced(self, unit: nn.Module) -> None:
        """Raise if tensors are put in the place of parameters for a call (`torch.func.functional_call`): FSDP2 gathers
        its own parameters over them."""
        for name in self.names_in[unit]:
            module, key = self.names[name]
            now = own_parameters(module).get(key)
            if now is not None and not isinstance(now, nn.Parameter):
                raise AutoplanError(
                    f"{name} is another tensor in this call of {type(unit).__name__}, an FSDP2 unit, which would "
                    "compute with its own parameter",
                    hint="call the module with its own parameters, or leave dp_shard out of the mesh",
                )

    def end(self, unit: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.running.discard(unit)
        if not self.running:
            self.left.clear()
            for (module, key), sharded in self.sharded.items():
                now = own_parameters(module).get(key)
                if now is not None and now is not sharded:
                    self.left[id(now)] = now, sharded, _versions(sharded)

    def free(self) -> None:
        """Free what is gathered. All ranks must do so, since they gather it again together."""
        if not self.running and not torch.compiler.is_compiling() and not in_backward():
            self.left.clear()
            for unit in self.units:
                unit.reshard()

    def as_sharded(self, parameter: Any) -> Any:
        """Return the sharded parameter in whose place one was gathered, outside of a forward or backward."""
        gathered, sharded, _ = self.left.get(id(parameter), (None, None, ()))
        return sharded if gathered is parameter is not None and not self.running and not in_backward() else parameter

    def named_parameters(self, module: nn.Module, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in type(module).named_parameters(module, *args, **options):
            yield name, self.as_sharded(parameter)


def _mesh_dims(parameter: torch.Tensor) -> int:
    return parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0


_alive = weakref.WeakSet[_Gathered]()


def refuse_copy(memo: Any) -> Any:
    """Say what to do instead of `copy.deepcopy(model)`, which FSDP2 does not support."""
    raise AutoplanError(
        "a model in FSDP2 units cannot be copied: each unit gathers parameters into memory of its own",
        hint="copy the model before autoplan.parallelize and shard the copy too; or average state_dict()s",
    )
