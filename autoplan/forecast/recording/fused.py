"""Fused kernels of other libraries: what each makes, keeps and holds, read from rules/kernels.

No such kernel runs without a GPU. `KernelFile.run` makes what the kernel makes on tensors without storage, and autograd
keeps what the kernel saves; the reference in plain torch would keep a hundred times as much.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.common.files.rule_files import rules_folders

Dims = Mapping[str, int]
Work = Callable[[int, str], None]
_NUMBERS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: lambda left, other: -(-left // other),
}  # fmt: skip


@dataclass(frozen=True)
class KernelFile:
    """One kernel; rules/kernels/README.md says what the fields are."""

    kernel: str
    package: str
    source: str
    arguments: Mapping[str, Any]
    makes: Mapping[str, str]
    saves: tuple[tuple[str, ...], ...]
    returns: tuple[tuple[str, ...], ...]
    dims: Mapping[str, str]
    forward: tuple[tuple[str, ...], ...] = ()
    backward: tuple[tuple[str, ...], ...] = ()
    flops: tuple[str, ...] = ()
    again: float = 2.0
    copied: str = ""
    pair: bool = False
    of_layers: bool = False

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]] | None:
        """Its arguments by name, and the sizes of their dims; None where they are not what the file says."""
        named = dict(zip(self.arguments, args, strict=False)) | {k: v for k, v in kwargs.items() if k in self.arguments}
        dims: dict[str, int] = {}
        for name, form in self.arguments.items():
            value = named.get(name)
            if isinstance(form, list) and isinstance(value, int):
                dims[form[0]] = value
            elif form and isinstance(value, torch.Tensor) and not _fits(form, value.shape, dims):
                return None
        try:
            dims |= {name: _number(text, dims) for name, text in self.dims.items()}
        except KeyError:  # of an argument that was not given
            return None
        return named, dims

    def run(self, named: dict[str, Any], dims: dict[str, int], work: Work | None) -> Any:
        tensors = [name for name, form in self.arguments.items() if isinstance(form, str) and form]
        passed = tuple(name for name, value in named.items() if value is not None and value is not False)
        out = _Kernel.apply(self, dims, passed, work, *(named.get(name) for name in tensors))
        out = out if isinstance(out, tuple) else (out,)
        return (*out, None)[:2] if self.pair else out[0] if len(out) == 1 else out

    def operations(self, dims: Dims) -> int:
        return sum(_number(text, dims) for text in self.flops)


class _Kernel(torch.autograd.Function):
    """Makes, keeps and lets go what the kernel does; computes nothing."""

    @staticmethod
    def forward(ctx: Any, kernel: KernelFile, dims: Dims, passed: tuple[str, ...], work: Work | None,
                *values: Any) -> Any:  # fmt: skip
        names = [name for name, form in kernel.arguments.items() if isinstance(form, str) and form]
        here = {n: _copied(kernel.copied, v) for n, v in zip(names, values, strict=True) if v is not None}
        first = next(iter(here.values()))

        def empty(text: str) -> torch.Tensor:
            sizes, _, dtype = text.partition(":")
            shape = tuple(_number(size, dims) for size in sizes.split())
            return first.new_empty(shape, dtype=_dtype(dtype.strip(), here))

        for name, text in kernel.makes.items():
            form, _, condition = text.partition(" if ")
            if not condition or condition in passed:
                here[name] = empty(form)
        for moment in kernel.forward:
            list(map(empty, moment))  # all of them at once, and then none
        ctx.save_for_backward(*(here.get(_first(names, here)) for names in kernel.saves))
        ctx.kernel, ctx.dims, ctx.work = kernel, dims, work
        ctx.like = [None if v is None else (v.shape, v.dtype) for v in values]
        ctx.dtypes = {name: tensor.dtype for name, tensor in here.items()}
        if work is not None:
            work(kernel.operations(dims), str(first.dtype).removeprefix("torch."))
        out = tuple(here[name] for name in (_first(names, here) for names in kernel.returns) if name in here)
        return out if len(out) > 1 else out[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _, kernel = ctx.saved_tensors, ctx.kernel
        first = next(gradient for gradient in gradients if gradient is not None)

        def empty(text: str) -> torch.Tensor:
            sizes, _, dtype = text.partition(":")
            shape = tuple(_number(size, ctx.dims) for size in sizes.split())
            return first.new_empty(shape, dtype=ctx.dtypes.get(dtype.strip()) or _dtype(dtype.strip(), {}))

        wanted = zip(ctx.like, ctx.needs_input_grad[4:], strict=True)
        results = [first.new_empty(like[0], dtype=like[1]) if needed and like else None for like, needed in wanted]
        for moment in kernel.backward:
            list(map(empty, moment))
        if ctx.work is not None:
            ctx.work(int(kernel.again * kernel.operations(ctx.dims)), str(first.dtype).removeprefix("torch."))
        return (None, None, None, None, *results)


def _first(names: tuple[str, ...], there: Mapping[str, Any]) -> str:
    return next((name for name in names if name in there), "")


def _copied(how: str, value: torch.Tensor) -> torch.Tensor:
    if how == "all" or how == "last" and value.dim() and value.stride(-1) != 1:
        return value.contiguous()
    return value


def _dtype(name: str, there: Mapping[str, torch.Tensor]) -> torch.dtype:
    return there[name].dtype if name in there else getattr(torch, name)


def _fits(forms: str, shape: torch.Size, dims: dict[str, int]) -> bool:
    """Return whether a tensor has one of these forms; if so, what its dims are is known."""
    for form in forms.split(" or "):
        names = form.split()
        if len(names) == len(shape) and all(dims.get(n, size) == size for n, size in zip(names, shape, strict=True)):
            dims.update(zip(names, shape, strict=True))
            return True
    return False


@lru_cache(maxsize=512)
def _tree(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _number(text: str | ast.expr, dims: Dims) -> int:
    node = _tree(text) if isinstance(text, str) else text
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return dims[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _NUMBERS:
        return _NUMBERS[type(node.op)](_number(node.left, dims), _number(node.right, dims))
    raise AutoplanError(f"a kernel dim is {ast.unparse(node)}", hint="write products, sums and quotients of names")


def kernel_files() -> Mapping[tuple[str, str], KernelFile]:
    """Return the files by package and function; the user's folder takes precedence."""
    return _read(rules_folders())


@lru_cache(maxsize=8)
def _read(folders: tuple[Path, ...]) -> Mapping[tuple[str, str], KernelFile]:
    paths = [path for folder in reversed(folders) for path in sorted((folder / "kernels").glob("*.toml"))]
    return {(kernel.package, kernel.kernel): kernel for kernel in map(_of_file, paths)}


def _of_file(path: Path) -> KernelFile:
    data = read_plain(path, NotPlain("kernel file"), notation="toml")
    several: dict[str, Any] = {
        key: tuple(map(_names, data.pop(key, ()))) for key in ("saves", "returns", "forward", "backward")
    }
    try:
        return KernelFile(
            arguments=data.pop("arguments"), makes=data.pop("makes", {}), dims=data.pop("dims", {}),
            flops=tuple(data.pop("flops", ())), **several, **data,
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        what = f"the kernel file {path} is incomplete: {error}"
        raise AutoplanError(what, hint="see rules/kernels/README.md") from error


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


# Bytes that a compiled step moves: elementwise ops between two products are one kernel.


@dataclass
class Fusion:
    """`kernel`: products and messages so far. `unwritten`: storages of elementwise results that no other kernel has
    read, and the kernel that makes each."""

    kernel: int = 0
    unwritten: dict[int, int] = field(default_factory=dict)

    def moved(self, read: Iterable[tuple[int, int]], made: Iterable[tuple[int, int]], product: bool) -> int:
        """Return the bytes that one op adds. `read`, `made`: number (-1: unknown) and bytes of each storage."""
        self.kernel += product
        size = 0
        for number, own in read:
            maker = self.unwritten.get(number)
            if maker != self.kernel:
                size += own if maker is None else 2 * own  # written by its maker first
                self.unwritten.pop(number, None)
        for number, own in made:
            if product or number < 0:
                size += own
            else:
                self.unwritten[number] = self.kernel
        return size
