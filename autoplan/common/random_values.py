"""Draw random numbers that hide no mistake, without changing the caller's random state.

Ones and zeros hide wrong layouts, so every parameter of a tiny clone is random, in the range that its module expects.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn

from autoplan.common.errors import SourceError
from autoplan.common.nested import changed_inside
from autoplan.common.torch_internals import own_buffers

# Held while transformers builds a model, which changes state of the process (the default dtype, the functions of
# nn.init): of two threads at once, each could restore what the other had set.
BUILDING = threading.RLock()

_VECTOR_STD = 0.3
_WEIGHT_STD = 0.12


def drawn_so_far() -> tuple[object, ...]:
    """Return the state of every generator, which differs after a run that drew something."""
    state: Any = numpy.random.get_state()
    return (torch.get_rng_state().numpy().tobytes(), state[1].tobytes(), state[2], random.getstate())


@contextmanager
def untouched_randomness(seed: int | None = None) -> Iterator[None]:
    """Restore torch's CPU generator, numpy's and Python's on exit; inside, they start from `seed`."""
    states = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            numpy.random.seed(seed)
            random.seed(seed)
        yield
    finally:
        torch.set_rng_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])


_GENERATORS = (numpy.random.Generator, numpy.random.RandomState, random.Random, torch.Generator)


def reseed_held(model: nn.Module, number: int) -> None:
    """Seed the generators that modules hold: otherwise a run of a copy goes on where the last one stopped."""
    for module in model.modules():
        for value in vars(module).values():
            if not isinstance(value, _GENERATORS):
                continue
            if isinstance(value, numpy.random.Generator):
                value.bit_generator.state = type(value.bit_generator)(number).state
            elif isinstance(value, torch.Generator):
                value.manual_seed(number)
            else:
                value.seed(number)


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Set random values in every parameter: new ones in weights, noise added to vectors and scalars."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        noise = noise if parameter.dtype.itemsize == 1 else noise.to(parameter.dtype)  # float8 has no multiplication
        if sum(size > 1 for size in parameter.shape) >= 2:
            # The deviation falls with the features summed, or many layers would amplify rounding errors
            summed = parameter.numel() / max(parameter.shape)
            parameter.copy_(min(_WEIGHT_STD, max(summed, 1.0) ** -0.5) * noise)
        else:
            parameter.nan_to_num_(0.0, 0.0, 0.0)
            compared = parameter.dtype.itemsize > 1 and parameter.numel() > 0
            above, below = compared and bool((parameter > 0).all()), compared and bool((parameter < 0).all())
            parameter.add_(_VECTOR_STD * noise)
            # Numbers of one sign keep it: with a negative step or temperature much of a model has no gradient
            if above or below:
                parameter.copy_(parameter.abs() if above else -parameter.abs())


def fill_meta(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a meta module real memory: parameters as their modules reset them, buffers with plausible numbers."""
    buffers_on_meta = {id(b) for b in model.buffers() if b.is_meta}
    named = ((module, name, buffer) for module in model.modules() for name, buffer in own_buffers(module).items())
    owners = [(module, name) for module, name, buffer in named if id(buffer) in buffers_on_meta]
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), untouched_randomness(seed):
        for parameter in model.parameters():
            parameter.zero_() if parameter.dim() >= 2 else parameter.fill_(1.0)
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        for module, name in owners:
            buffer = own_buffers(module)[name]
            assert buffer is not None
            buffer.copy_(_plausible(buffer, generator))
    return model


def _plausible(buffer: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return likely values for a buffer, which has none on meta: a causal mask, positions or positive numbers."""
    if buffer.dtype == torch.bool:
        square = buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2]
        return torch.ones_like(buffer).tril() if square else torch.ones_like(buffer)
    if not buffer.is_floating_point() and not buffer.is_complex():
        last = buffer.shape[-1] if buffer.dim() else 1
        return torch.arange(last).expand(buffer.shape) if buffer.dim() else torch.zeros((), dtype=torch.int64)
    if buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2]:
        return torch.ones(buffer.shape).tril()
    return 0.5 + torch.rand(buffer.shape, generator=generator)


# A model computes in the dtype of its first floating parameter, except float8, which only stores weights next to their
# scales.


def working_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype in which a model computes."""
    return next((parameter.dtype for parameter in model.parameters() if _computes(parameter)), torch.float32)


def tried_dtypes(model: Callable[[], nn.Module]) -> Iterator[torch.dtype]:
    """Yield the dtypes in which a clone is run, the widest first. `model` builds the model to find its own dtype, last
    since that is costly; it may fail."""
    tried = (torch.float64, torch.float32)
    yield from tried
    try:
        own = working_dtype(model())
    except SourceError:
        return
    if own not in tried:
        yield own


def cast_numbers(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating tensors to `dtype`; complex tables stay complex, quantised weights quantised."""
    for parameter in model.parameters():
        if _computes(parameter):
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None and _computes(buffer):
                own_buffers(module)[name] = buffer.to(dtype)


def inputs_in(dtype: torch.dtype, value: Any) -> Any:
    """Return example inputs, which users make for their own model, for a clone on the CPU that computes in `dtype`."""
    if isinstance(value, torch.Tensor):
        tensor = value if value.is_meta else value.cpu()
        return tensor.to(dtype) if tensor.is_floating_point() else tensor
    return changed_inside(value, partial(inputs_in, dtype))


def _computes(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


# Models are tried outside of the caller's modes (a default device, no_grad, inference mode, autocast), under which a
# clone would have no numbers or no gradients.


@contextmanager
def plain_surroundings() -> Iterator[None]:
    """Create tensors on the CPU by default, with gradients, each in its own dtype."""
    with ExitStack() as stack:
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
