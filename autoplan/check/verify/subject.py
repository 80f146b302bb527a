"""The model under test, sharded or not, with everything that a check may do with it.

A check sees the unsharded model and every rank's shard through the same small interface, so that it is written once and
cannot treat them differently by accident. All results are plain tensors in checkpoint names and layout.

What a run leaves in a model is undone. A forward may keep a state (a cache, a memory, a slow copy of its own weights),
and a rank's model goes through all checks, one after the other. Unsharded, each check has a fresh copy. So ranks put
the model back after each.
"""

from __future__ import annotations

import copy
import inspect
import random
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.capture.called import PART, call
from autoplan.capture.dry_run import own
from autoplan.common.conventions import conventions
from autoplan.common.nested import changed_inside, fields_of, flatten_tensors, is_record
from autoplan.common.random_values import reseed_held, untouched_randomness
from autoplan.common.torch_internals import local_part, place_local
from autoplan.execute import random_streams
from autoplan.execute.parameters.held import plain_name
from autoplan.execute.parameters.state_dict import gathered
from autoplan.execute.vocabulary.own_positions import whole_logits
from autoplan.patches.seeding import Lifted, names_an_accelerator, on_one_device

SAME = "computes the same in training and eval mode"  # why there is nothing to check

# Exceptions of a model's own code that does not run on its inputs.
CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, NotImplementedError)

Inputs = Mapping[str, Any]  # keyword arguments of one forward call
Gather = Callable[[nn.Module, bool], Mapping[str, torch.Tensor]]  # (model, gradients?) -> full tensors


@dataclass(frozen=True)
class Group:
    """A kind of tensors that a check compares: its name in reports, and how it is compared.

    `between_ranks`: with rank 0's, since the unsharded model cannot say what is right. `gradient`: a missing one is
    zero. `output`: returned by a forward. `fixed`: with fixed random numbers, so that the unsharded model can. `drawn`:
    random numbers, which must obey laws. `asked`: of inputs that require no gradient where they are given.
    """

    name: str
    between_ranks: bool = False
    gradient: bool = False
    output: bool = False
    fixed: bool = False
    drawn: bool = False
    asked: bool = False


Observation = dict[Group, dict[str, torch.Tensor]]  # group -> name -> tensor


@dataclass
class Subject:
    """`feeds` are the calls to make, `others` the same in another batch and length, `labels` for those that take them.

    `gather` returns parameters and gradients in checkpoint layout; None: the model is not sharded. `lifted`:
    computations in single precision are done in double. `summed`: arguments that may require a gradient. `other_dims`:
    the calls with another number of dims, for the case that those are right. `asks`: the check `forward` asks for the
    gradients of inputs too. `draws`: False if the unsharded model draws nothing in training.
    """

    model: nn.Module
    feeds: Mapping[str, Inputs]
    others: Mapping[str, Inputs] = field(default_factory=dict)
    labels: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gather: Gather | None = None
    rank: int = 0
    lifted: bool = False
    summed: tuple[str, ...] = ()
    other_dims: Mapping[str, Inputs] = field(default_factory=dict)
    asks: bool = False
    draws: bool = True
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return every parameter, gathered."""
        if self.gather is not None:
            return {name: plain(tensor).clone() for name, tensor in self.gather(self.model, False).items()}
        return {name: p.detach().clone() for name, p in self._named()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return every gradient there is, gathered."""
        if self.gather is not None:
            gathered_gradients = {name: g for name, g in self.gather(self.model, True).items() if g is not None}
            return {name: plain(gradient).clone() for name, gradient in gathered_gradients.items()}
        own = {name: p.grad.detach() for name, p in self._named() if p.grad is not None}
        return {name: gradient.to_dense() if gradient.is_sparse else gradient.clone() for name, gradient in own.items()}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.model.named_parameters(remove_duplicate=False)  # a tied parameter under each of its names
        return ((plain_name(name), parameter) for name, parameter in named)

    def forward(self, inputs: Inputs) -> Any:
        """Call the model on copies of the inputs. Caches, which are local to a rank, are off unless asked for."""
        for buffer in self.model.buffers():
            if buffer.grad_fn is not None:  # a cache from the last run, whose graph is gone
                buffer.detach_()
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        keywords = _placed(own(dict(inputs)), device)
        switch = conventions().cache_switch
        if switch in self.signature and switch not in keywords and PART not in keywords:
            keywords[switch] = False
        with self.precision(), self._afresh():
            return call(self.model, keywords)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward as the forward was, which a model that checkpoints its own blocks runs again here. (Function
        modes are off inside a torch function of a tensor, as `loss.backward()` is. Of an edge it is none.)"""
        named = names_an_accelerator(self.model)
        with self.precision(), on_one_device(self.model):
            torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss) if named else loss)

    def precision(self) -> AbstractContextManager[Any]:
        return Lifted() if self.lifted else nullcontext()

    @contextmanager
    def _afresh(self) -> Iterator[None]:
        """Make a call in eval mode independent of earlier ones: it draws the same numbers as every other call, and a
        change of modes clears what a model caches from weights in eval mode."""
        if self.model.training:
            yield
            return
        self.model.train()
        self.model.eval()
        with random_streams.fork(), untouched_randomness():
            # Ranks start with different streams, and share rank 0's, which is the unsharded model's. Python's and
            # numpy's generators are seeded identically on every rank.
            random_streams.manual_seed(self.rank)
            _seed_host(0)
            reseed_held(self.model, 0)
            yield

    def forward_and_backward(self, inputs: Inputs, *, gather: bool = True) -> dict[str, dict[str, torch.Tensor]]:
        """Return outputs and every gradient of one call, under a loss in which each output element has its own weight;
        without `gather`, leave gradients where they are.

        Also the gradients of inputs that require one; of a submodule called alone, those of all inputs, since other
        modules of the model depend on them.
        """
        from autoplan.check.ranks.run import count_collectives

        self.model.zero_grad(set_to_none=True)
        asking = _asking(inputs)
        with count_collectives() as forward:
            result = self.forward({**inputs, **asking})
        outputs = tensors_in(result, integers=True)
        loss = weighted_sum(outputs)
        if loss is not None:
            with count_collectives() as backward:
                self.backward(loss)
            self.collectives = {"forward": dict(forward), "backward": dict(backward)}
        gradients = self.gradients() if gather and loss is not None else {}
        seen = {name: tensor.detach().clone() for name, tensor in outputs.items()}
        of_inputs = {name: tensor.grad for name, tensor in asking.items() if tensor.grad is not None}
        seen |= {gradient_of(name): gradient for name, gradient in of_inputs.items()}
        return {"outputs": seen, "gradients": gradients, "inputs": of_inputs}

    def seed(self, number: int, *, alike: bool = False) -> None:
        """Seed this rank, differently from the others unless `alike`; Python and numpy are seeded identically."""
        random_streams.manual_seed(1000 * number + (0 if alike else self.rank))
        _seed_host(number)
        reseed_held(self.model, number)

    @property
    def signature(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.model.forward).parameters


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor: a DTensor is gathered (its gradient flows back), any other is returned."""
    return gathered(tensor) if isinstance(tensor, DTensor) else whole_logits(tensor)


def tensors_in(value: Any, path: str = "", *, integers: bool = False) -> dict[str, torch.Tensor]:
    """Return float tensors of a result by path, gathered; with `integers` all tensors and plain numbers. Objects that
    are no containers (caches) are not entered."""
    if isinstance(value, torch.Tensor):
        counts = integers or value.is_floating_point() or value.is_complex()
        return {path or "output": plain(value)} if counts else {}
    if integers and isinstance(value, int | float):
        return {path or "output": torch.tensor(float(value), dtype=torch.float64)}
    items: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
    if isinstance(value, list | tuple):
        items = dict(enumerate(value))
    elif is_record(value) and not isinstance(value, Mapping):
        items = fields_of(value)
    tensors: dict[str, torch.Tensor] = {}
    for key, item in items.items():
        tensors.update(tensors_in(item, f"{path}.{key}" if path else str(key), integers=integers))
    return tensors


def weighted_sum(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return a loss that every wrong element changes: fixed random weights over every output with a gradient."""
    total: torch.Tensor | None = None
    for name, tensor in outputs.items():
        if not tensor.requires_grad:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{tuple(tensor.shape)}".encode()))
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        finite = torch.isfinite(tensor)
        tensor = tensor if bool(finite.all()) else tensor.masked_fill(~finite, 0)
        term = (tensor * weights.to(tensor.device, tensor.real.dtype)).sum()
        term = term.real if term.is_complex() else term
        total = term if total is None else total + term
    return total


def _asking(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the float inputs that require gradients; of a submodule called alone, all float inputs."""
    floats = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    floats = {name: x for name, x in floats.items() if PART in inputs or x.requires_grad}
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in floats.items()}


def gradient_of(name: str) -> str:
    """Return the name of an input's gradient among outputs."""
    return f"gradient of {name}"


def may_ask(subject: Subject, given: Inputs) -> dict[str, torch.Tensor]:
    """Return the float inputs of a feed that require no gradient but may, requiring one."""
    floats = {name: given[name] for name in subject.summed if PART not in given and name in given}
    return {
        name: value.detach().clone().requires_grad_()
        for name, value in floats.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.requires_grad
    }


def _seed_host(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)


def _placed(value: Any, device: torch.device) -> Any:
    """Return inputs on the model's device."""
    return value.to(device) if isinstance(value, torch.Tensor) else changed_inside(value, lambda x: _placed(x, device))


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Put back parameters, buffers, attributes of modules and parameters, and what is in their containers."""
    same: dict[int, Any] = {id(part): part for part in (*model.modules(), *_tensors(model))}
    owners = (*model.modules(), *model.parameters())
    undo = [*map(_of_tensor, _tensors(model)), *(_of_container(vars(owner), same) for owner in owners)]
    try:
        yield
    finally:
        with torch.no_grad():
            for put_back in reversed(undo):
                put_back()


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    stored = (value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    return list({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *stored)}.values())


def _of_tensor(tensor: torch.Tensor) -> Callable[[], None]:
    local = local_part(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    values = local.clone()

    def put_back() -> None:
        if isinstance(tensor, DTensor):
            place_local(tensor, local)  # `.data = x` replaces it
        now = local if isinstance(tensor, DTensor) else tensor.detach()
        if now.shape == values.shape and not torch.equal(now, values):
            now.copy_(values)

    return put_back


def _of_container(container: Any, same: dict[int, Any]) -> Callable[[], None]:
    """Return the function that puts back the items of a container, and of what is in it: the same objects but for
    iterators. `same`: what copies of these share."""
    if not container:  # most are: a module's hooks
        return container.clear
    values = list(container.values() if isinstance(container, dict) else container)
    inner = [undo for value in values if (undo := _of_value(value, same)) is not None]
    values = [_standing_still(value, same) if type(value).__module__ in _ITERATORS else value for value in values]
    items = list(zip(container, values, strict=True)) if isinstance(container, dict) else values

    def put_back() -> None:
        for put_inner_back in inner:
            put_inner_back()
        now = list(container.items()) if isinstance(container, dict) else list(container)
        parts = _flat(now), _flat(items)
        if len(parts[0]) != len(parts[1]) or any(a is not b for a, b in zip(*parts, strict=True)):
            container.clear()
            container.extend(items) if isinstance(container, list | deque) else container.update(items)

    return put_back


# Hooks are put back too: a library may set them in its first forward, and keep an attribute that says so
_CONTAINERS = (dict, OrderedDict, list, set, deque)
_ITERATORS = ("builtins", "itertools")  # modules whose iterators can be copied, but for generators
# packages whose objects are left alone, and whose functions are
_OTHERS = ("autoplan", "builtins", "functools", "itertools", "torch", "transformers", "weakref")


def _of_value(value: Any, same: dict[int, Any]) -> Callable[[], None] | None:
    """Return the function that puts back a container, what a function closes over, or the attributes of an object of a
    plain class, where it was not met before; None for other values."""
    if type(value) in _CONTAINERS:
        return _of_container(value, same)
    home = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    if str(home).partition(".")[0] in _OTHERS or isinstance(value, nn.Module | type) or id(value) in same:
        return None
    same[id(value)] = value
    if isinstance(value, FunctionType):
        return _of_cells(value.__closure__ or (), same)
    attributes = getattr(value, "__dict__", None)
    return _of_container(attributes, same) if type(attributes) is dict else None


def _of_cells(cells: tuple[CellType, ...], same: dict[int, Any]) -> Callable[[], None]:
    full = [(cell, cell.cell_contents) for cell in cells if cell != CellType()]
    inner = [undo for _, contents in full if (undo := _of_value(contents, same)) is not None]

    def put_back() -> None:
        for put_inner_back in inner:
            put_inner_back()
        for cell, contents in full:
            cell.cell_contents = contents

    return put_back


def _standing_still(value: Any, same: dict[int, Any]) -> Any:
    """Return a copy of an iterator, which will be where this one is now; any other value itself."""
    if not isinstance(value, Iterator):
        return value
    try:
        return copy.deepcopy(value, same)
    except TypeError:
        return value


def _flat(items: list[Any]) -> list[Any]:
    return [part for item in items for part in (item if isinstance(item, tuple) else (item,))]


def kept_in(model: nn.Module) -> dict[tuple[str, ...], Any]:
    """Return copies of buffers, tensors in plain attributes of modules and parameters by identity, and plain values in
    such attributes."""
    values: dict[tuple[str, ...], Any] = {
        (name,): buffer.detach().clone() for name, buffer in model.named_buffers() if not isinstance(buffer, DTensor)
    }
    for name, owner in (*model.named_modules(), *model.named_parameters()):
        for key, value in vars(owner).items():
            if key in _OF_TORCH:
                continue
            if isinstance(value, bool | int | float | str):
                values[name, key] = value
            elif isinstance(value, (torch.Tensor, dict, list, tuple)):
                values[name, key] = [id(tensor) for _, tensor in flatten_tensors(value)]
    return values


def unchanged(before: dict[tuple[str, ...], Any], after: dict[tuple[str, ...], Any]) -> bool:
    return before.keys() == after.keys() and all(
        torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key]
        for key, value in before.items()
    )


_OF_TORCH = frozenset(vars(nn.Module()))  # parameters, buffers, modules, hooks
