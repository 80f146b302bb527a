"""Run a copy of a model to see what happens: without storage where possible, with zeros where values are read.

Modes of fake tensors are made here, also in threads that end. With torch 2.11 built for CUDA, on a machine without a
GPU, the first FakeTensorMode of a process registers a stand-in for CUDA's device guard. It is registered once for the
process, but owned by the thread that entered the mode. When that thread ends, the registry points to freed memory, and
the next mode crashes Python (pytorch/pytorch#178950). So a thread that lives as long as the process enters first. torch
2.13 and 2.14, and CPU builds, are not affected.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode

from autoplan.capture.fold import fold
from autoplan.capture.known_values import KnownValues
from autoplan.capture.outside import refusing_outsiders
from autoplan.common.errors import OutsideError
from autoplan.common.nested import call_with, flatten_tensors, own_argument
from autoplan.common.random_values import untouched_randomness
from autoplan.common.torch_internals import FakeTensorMode
from autoplan.patches.classes import code_lies_open
from autoplan.patches.kernels import where_it_runs

SMALL = 30_000_000  # most parameters of a copy that may be run for real
_MOST_WORK = 2_000_000_000  # likewise, parameters times tokens: a second on a CPU without bfloat16


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have no storage; tensors with storage may enter it."""
    enter_first_in_a_lasting_thread()
    return FakeTensorMode(allow_non_fake_inputs=True)


@cache
def enter_first_in_a_lasting_thread() -> None:
    """Enter a first FakeTensorMode. Call it before any thread that may end enters one, DTensor's own included."""
    if not torch.backends.cuda.is_built() or torch.cuda.is_available():
        return  # torch registers no stand-in
    if threading.current_thread() is threading.main_thread():
        _enter()
        return
    entered = threading.Event()

    def stay() -> None:
        try:
            _enter()
        finally:
            entered.set()
        threading.Event().wait()  # never set: the thread ends with the process

    threading.Thread(target=stay, daemon=True, name="autoplan first fake mode").start()
    entered.wait()


def _enter() -> None:
    with FakeTensorMode():
        pass


def without_storage(model: nn.Module) -> tuple[FakeTensorMode, nn.Module]:
    """Return a fake mode and a copy of the model to be run in it."""
    mode = fake_mode()
    with mode:
        return mode, fold(model, _fake).module


def with_storage(model: nn.Module) -> nn.Module:
    """Return a copy on the CPU with all of its blocks; tensors without values become zeros."""
    return fold(model, _values, fold=False).module


class Twin:
    """A copy on which calls are tried: real for a small model, without storage for a large one or many tokens.

    `folded`: with few of the repeated blocks, which is cheaper, but wrong if the model counts its blocks.
    """

    def __init__(self, model: nn.Module, *, folded: bool = True, supposing: bool = False, tokens: int = 0) -> None:
        self.known: KnownValues | None = None
        size = sum(p.numel() for p in model.parameters())
        if size <= SMALL and size * tokens <= _MOST_WORK:
            copy = fold(model, _values, fold=folded)
        else:
            mode = fake_mode()
            with mode:
                copy = fold(model, _fake, fold=folded)
            self.known = KnownValues(mode, supposing=supposing)
        self.module, self.folds = copy.module, copy.folds

    def run(self, function: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
        """Call the module or a method of it, leaving no trace in it; exceptions pass through."""
        module = self.module
        with untouched_randomness(0), quiet(), where_it_runs(module), torch.no_grad(), refusing_outsiders(module):
            if self.known is None:
                return call_with(function, {name: own(value) for name, value in keywords.items()})
            with code_lies_open(module), self.known as mode:
                return call_with(function, {name: mode.admit(value) for name, value in keywords.items()})


def own(value: Any) -> Any:
    """Return a copy that in-place code may change; inside a fake mode it is a fake tensor."""
    return value.clone() if isinstance(value, torch.Tensor) else own_argument(value, own)


def depends_on_data(error: BaseException) -> bool:
    """Return whether Python looked at the values of a tensor that has none."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


@dataclass(frozen=True)
class Tried:
    """The result of a call: its failure, if any, and the parameters that it read up to then.

    `known` are the parameters of the copy (one of equal blocks stands for all). `complete`: the call ran to its end.
    """

    failure: Exception | None
    used: frozenset[str]
    known: frozenset[str] = frozenset()
    complete: bool = True


def tried(model: nn.Module, keywords: Mapping[str, Any], *others: Mapping[str, Any], supposing: bool = False) -> Tried:
    """Call a copy of the model; `used` are the parameters that it reads and none of the other calls does.

    Without a failure the call works, as far as can be seen without values. `supposing` makes up the outcome of branches
    on values.
    """
    result = Tried(None, frozenset())
    ids = (t for _, t in flatten_tensors(keywords) if not t.is_floating_point())
    tokens = max((t.numel() for t in ids), default=0)
    for folded in (True, False):
        twin = Twin(model, folded=folded, supposing=supposing, tokens=tokens)
        result = _call(twin, keywords)
        if result.failure is None or not twin.folds:
            break
    read_anyway = (_call(twin, other).used for other in others)
    return replace(result, used=result.used.difference(*read_anyway))


def _call(twin: Twin, keywords: Mapping[str, Any]) -> Tried:
    reads = _Reads(twin.module)
    raised: Exception | None = None
    try:
        with reads:
            twin.run(twin.module, keywords)
    except OutsideError:
        raise
    except Exception as error:  # someone else's forward may raise anything
        raised = error
    failure = None if raised is None or depends_on_data(raised) else raised
    return Tried(failure, frozenset(reads.found), frozenset(reads.names.values()), raised is None)


def failure_of(model: nn.Module, keywords: Mapping[str, Any]) -> Exception | None:
    """Return why a call of the model would fail; None if it runs, as far as can be seen without values."""
    return tried(model, keywords).failure


class _Reads(TorchFunctionMode):
    """Records the parameters of a module that are passed to any torch function."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(getattr(func, "__name__", "")).startswith("__get__"):  # a query of dtype or device reads no values
            self.found.update(
                self.names[id(t)] for _, t in flatten_tensors((args, kwargs or {})) if id(t) in self.names
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, and torch's log of a traceback for each failed guess."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_nothing)  # if threads overlap, logging may resume early, but never stays off
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _fake(tensor: torch.Tensor, name: str) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _values(tensor: torch.Tensor, name: str) -> torch.Tensor:
    values = torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().to("cpu", copy=True)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
