"""Optional kernels: a plan is read and proven on a CPU, on the path that a model takes without them.

Scans, convolutions and delta rules come as kernels for GPUs, with a reference in plain torch that computes the same.
transformers takes the kernel wherever its library is installed, also for tensors on a CPU or without storage, on which
it cannot run; for an exporter it takes the reference. So models are inspected as if they were exported. Other code
checks the device itself. Either way the plan says which reference was read.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from autoplan.common.stages import set_inside
from autoplan.patches.patched import Alone, Hold, Patch, Place, hold, patch, patched
from autoplan.patches.seeding import on_one_device

_HOME = "transformers.integrations.hub_kernels"
_COMPILER = "torch._dynamo.eval_frame"
_ASKED = "is_torchdynamo_exporting"  # transformers checks this before it takes a kernel
_MASKS, _PACKED = "transformers.masking_utils", "find_packed_sequence_indices"
_KEPT = ("is_new_implementation", "torch_function")  # variables in the decorator's closure
_NO_KERNELS = ("torch", "transformers", "numpy", *sys.stdlib_module_names)
_LIBRARIES, _MODELS = ("torch.", "builtins", "transformers."), "transformers.models."
_unpacked: ContextVar[bool] = ContextVar("autoplan_unpacked", default=False)
_alone = Alone()  # Python 3.11 cannot parse in two threads at once


@patch(
    name="reference path of optional kernels",
    replaces=f"{_HOME}.{_ASKED}",
    why="GPU kernels do not run on a CPU or without storage; their reference in plain torch computes the same",
    scope="while a copy of a model runs on a CPU: recording, trial, checks on ranks",
    undone="the function is restored",
)
def reference_path_patch() -> bool:
    """Return whether a decorated function has the expected closure, and takes its reference for an exporter."""
    home = importlib.import_module(_HOME)
    decorator = getattr(home, "use_kernel_func_from_hub_with_fallback", None)
    if decorator is None:  # this version has no such kernels: nothing is replaced
        return not hasattr(home, _ASKED)

    @decorator("sqrt", "math")  # `math.sqrt` plays an installed kernel
    def decorated(x: Any) -> str:
        return "reference"

    kernel = _kernel_of(home, "sqrt", decorated)
    with on_reference_path():
        inside = decorated(4.0)
    matches = kernel == OptionalKernel(home, "sqrt", "math", "sqrt", True, inspect.unwrap(decorated))
    return matches and (inside, decorated(4.0)) == ("reference", 2.0)


@patch(
    name="compiled functions",
    replaces=f"{_COMPILER}._stance",
    why="a function that the model's code compiles (`@torch.compile`) hides its ops from a recording, and with "
    "`fullgraph=True` is refused beside modes of ours; run eagerly it computes the same",
    scope="while a copy of a model runs on a CPU (recording, trial, checks on ranks); on ranks, in modules in whose "
    "code calls are rewritten, and in calls that the path guard follows",
    undone="torch's own is restored",
)
def eager_patch() -> bool:
    """Return whether a compiled function runs eagerly, and compiles again afterwards."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    twice = torch.compile(lambda x: x + x, fullgraph=True, backend=backend)
    importlib.import_module(_COMPILER)
    with on_reference_path():
        twice(torch.ones(1))
    eager = not compiled
    twice(torch.ones(1))
    return eager and len(compiled) == 1


def _stands_in_the_file() -> bool:
    """Return whether a function that a file calls by its name is looked up there at each call."""
    home = ModuleType("file_of_a_model")
    vars(home)["kernel"] = lambda: "kernel"
    forward = FunctionType((lambda: kernel()).__code__, vars(home))  # type: ignore[name-defined]  # noqa: F821
    with patched(KERNEL_GUARDS, [Place(home, "kernel", lambda original: lambda: ("guarded", original()))]):
        inside = forward()
    return bool((inside, forward()) == (("guarded", "kernel"), "kernel"))


KERNEL_GUARDS = Patch(
    name="kernel guards",
    replaces="optional kernels in the files of a sharded model",
    why="a fused kernel that takes a layer's weight would skip the all-reduce of that layer",
    scope="while a sharded model lives whose code may call the kernel",
    undone="the kernel is restored when the plan is undone or the model is collected",
    where="autoplan/execute/hooks/function_mode.py",
    canary=_stands_in_the_file,
)


KERNEL_STAND_INS = Patch(
    name="kernel stand-ins",
    replaces="optional kernels in the files of a model",
    why="an estimate must record what the kernel saves for backward, not what its reference in plain torch saves",
    scope="while a step is recorded on a copy without storage; other threads and real tensors are unaffected",
    undone="the function is restored",
    where="autoplan/forecast/recording/kernels.py",
    canary=_stands_in_the_file,
)


@patch(
    name="rows of one sequence",
    replaces=f"{_MASKS}.{_PACKED}",
    why="without values, position ids do not show that a row is one sequence: a mask over all token pairs, "
    "which a GPU never allocates, and non-causal attention would be recorded",
    scope="while a step is recorded on a copy without storage; other threads are unaffected",
    undone="the function is restored",
    where="autoplan/forecast/step.py",
)
def unpacked_patch() -> bool:
    """Return whether the function returns None for a row of one sequence, and is looked up for each mask."""
    home = importlib.import_module(_MASKS)
    if not hasattr(home, _PACKED):  # this version has no such function: nothing is replaced
        return True
    single, packed = torch.arange(4)[None], torch.tensor([[0, 1, 0, 1]])
    with one_sequence_a_row():
        inside = getattr(home, _PACKED)(packed)
    return getattr(home, _PACKED)(single) is None and inside is None and getattr(home, _PACKED)(packed) is not None


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Treat every row as one sequence while this thread is inside the block."""
    home = sys.modules.get(_MASKS)
    present = home is not None and hasattr(home, _PACKED)

    def unpacked(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda positions: None if _unpacked.get() else original(positions)

    with set_inside(_unpacked, True), patched(unpacked_patch, [Place(home, _PACKED, unpacked)] if present else []):
        yield


@contextmanager
def on_reference_path(*, compiled: bool = False) -> Iterator[None]:
    """Make transformers' functions with a kernel take their reference while any thread is inside the block; and
    compiled functions run eagerly, unless `compiled`."""
    home = sys.modules.get(_HOME)
    present = home is not None and hasattr(home, _ASKED)  # else this version has no such kernels
    reference = [Place(home, _ASKED, lambda _: lambda: True)] if present else []
    with patched(reference_path_patch, reference), nullcontext() if compiled else eager_code():
        yield


def eager_code() -> Hold:
    """Run compiled functions eagerly until the hold is released. (Threads cannot nest torch's own `set_stance`.)"""
    compiler = sys.modules.get(_COMPILER)  # None: nothing was compiled in this process
    places = [] if compiler is None else [Place(compiler, "_stance", lambda _: compiler.DynamoStance("force_eager"))]
    return hold(eager_patch, places)


@contextmanager
def where_it_runs(model: nn.Module) -> Iterator[None]:
    """Run a model on the CPU on its reference path and on that one device; change nothing for one on a GPU."""
    first = next(model.parameters(), None)
    on_cpu = first is None or first.device.type in ("cpu", "meta")
    with on_reference_path() if on_cpu else nullcontext(), on_one_device(model) if on_cpu else nullcontext():
        yield


@dataclass(frozen=True)
class OptionalKernel:
    """A function that a file of the model has under `name` if its library is installed. `home`: the file. `reference`:
    its fallback; None where there is none, or where the code checks the device itself."""

    home: ModuleType
    name: str
    package: str
    function: str
    installed: bool
    reference: Callable[..., Any] | None = None


def optional_kernels(model: nn.Module) -> list[OptionalKernel]:
    """Return the optional kernels that the files of the model's classes may use; those of base libraries have none."""
    names = {cls.__module__ for part in model.modules() for cls in type(part).__mro__}
    own = (name for name in sorted(names) if not name.startswith(_LIBRARIES) or name.startswith(_MODELS))
    kernels: list[OptionalKernel] = []
    for home in (sys.modules.get(name) for name in own):
        if isinstance(home, ModuleType):
            # transformers' decorator keeps its arguments in a closure.
            decorated = (_kernel_of(home, name, value) for name, value in list(vars(home).items()))
            kernels += [kernel for kernel in decorated if kernel is not None]
            kernels += _optional_imports(home)
    return kernels


def kernel_note(model: nn.Module) -> str:
    """Return a note of the model's optional kernels and whether they are installed; "" if there are none."""
    functions_of: dict[str, set[str]] = defaultdict(set)
    kernels = optional_kernels(model)
    for kernel in kernels:
        if kernel.reference is not None or not kernel.installed:
            functions_of[kernel.package].add(kernel.function)
    if not functions_of:
        return ""
    listed = ", ".join(f"{package} ({', '.join(sorted(functions_of[package]))})" for package in sorted(functions_of))
    missing = sorted({kernel.package for kernel in kernels if not kernel.installed})
    state = f"not installed: {', '.join(missing)}" if missing else "all are installed"
    outcome = "the plan was traced and verified with their plain torch reference, which computes the same"
    return f"optional kernels of {listed}: {outcome} ({state})"


def _kernel_of(home: ModuleType, name: str, value: Any) -> OptionalKernel | None:
    function = inspect.unwrap(value, stop=_decorated) if isinstance(value, FunctionType) else None
    if function is None or not _decorated(function):
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    new, reference = (cells[word].cell_contents for word in _KEPT)
    names: list[str] = []
    if {"func_name", "package"} <= cells.keys():
        names += [str(cells[word].cell_contents) for word in ("func_name", "package")]
    else:  # older versions of transformers do not keep them
        _alone.run(lambda: names.extend(_decorator_names(reference)))
    return OptionalKernel(home, name, names[1], names[0], bool(new), reference)


@lru_cache(maxsize=256)
def _decorator_names(reference: Callable[..., Any]) -> tuple[str, str]:
    """Return the kernel and its package, as the file of a model gives them to transformers' decorator."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(reference))).body
        calls = (node for node in vars(function).get("decorator_list", ()) if isinstance(node, ast.Call))
        texts = ([node.value for node in call.args if isinstance(node, ast.Constant)] for call in calls)
        kernel, package = next((str(first), str(second)) for first, second, *_ in texts)
    except (OSError, SyntaxError, ValueError, StopIteration):
        return reference.__name__, "a package that is not known"
    return kernel, package


def _decorated(function: Any) -> bool:
    return isinstance(function, FunctionType) and set(_KEPT) <= set(function.__code__.co_freevars)


def _optional_imports(home: ModuleType) -> Iterator[OptionalKernel]:
    """Yield functions whose import may be skipped or fail: `try: from x import f`, with `f = None` otherwise."""
    imports: list[tuple[str, str, str]] = []
    _alone.run(lambda: imports.extend(_conditional_imports(home.__name__)))
    for package, function, name in imports:
        value = vars(home).get(name, _decorated)
        if value is None or callable(value) and not isinstance(value, type) and value is not _decorated:
            yield OptionalKernel(home, name, package, function, value is not None)


@lru_cache(maxsize=256)
def _conditional_imports(home: str) -> tuple[tuple[str, str, str], ...]:
    """Return package, function and its name in the file, of each conditional import of another library."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[home]))
    except (OSError, SyntaxError, TypeError):
        return ()
    nodes = (node for part in tree.body if isinstance(part, ast.If | ast.Try) for node in ast.walk(part))
    found = (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level)
    imports = [(str(node.module).partition(".")[0], alias) for node in found for alias in node.names]
    return tuple((top, alias.name, alias.asname or alias.name) for top, alias in imports if top not in _NO_KERNELS)
