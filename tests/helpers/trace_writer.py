"""Traces written by hand, for tests of the analysis: ops with their shapes, as a recorder would note them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from autoplan.analyse.infer import Axes, infer_axes
from autoplan.axes.events import FORBIDDING
from autoplan.axes.terms import Term, find, layout, leaves
from autoplan.values import Op, Ref, TensorInfo, Trace

B, S, D = 2, 5, 12  # batch, positions, residual width: unlike any size of a weight below


class Writer:
    """Writes a trace op by op. Shapes of results are given, as a recorder would see them."""

    def __init__(self) -> None:
        self.tensors: list[TensorInfo] = []
        self.ops: list[Op] = []

    def tensor(self, shape: Sequence[int], kind: Any = "activation", name: str = "", **more: Any) -> Ref:
        more.setdefault("dtype", "float32")
        self.tensors.append(TensorInfo(tuple(shape), kind=kind, names=(name,) if name else (), **more))
        return Ref(len(self.tensors) - 1)

    def weight(self, *shape: int) -> Ref:
        return self.tensor(shape, "parameter")

    def hidden(self) -> Ref:
        return self.tensor((B, S, D), "input")

    def op(self, name: str, *args: Any, shape: Sequence[int] = (), overload: str = "", **kwargs: Any) -> Ref:
        out = self.tensor(shape)
        self.ops.append(Op(name, overload, args, kwargs, (out,), ""))
        return out

    def many(self, name: str, *args: Any, shapes: Sequence[Sequence[int]], **kwargs: Any) -> tuple[Ref, ...]:
        outs = tuple(self.tensor(shape) for shape in shapes)
        self.ops.append(Op(name, "", args, kwargs, outs, ""))
        return outs

    def in_place(self, name: str, target: Ref, *args: Any, **kwargs: Any) -> Ref:
        self.ops.append(Op(name, "", (target, *args), kwargs, (target,), ""))
        return target

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.tensors[ref.id].shape

    def view(self, x: Ref, *shape: int) -> Ref:
        assert prod(shape) == prod(self.shape(x))
        return self.op("view", x, list(shape), shape=shape)

    def transpose(self, x: Ref, i: int, j: int) -> Ref:
        shape = list(self.shape(x))
        shape[i], shape[j] = shape[j], shape[i]
        return self.op("transpose", x, i, j, shape=shape)

    def linear(self, x: Ref, weight: Ref) -> Ref:
        *batch, width = self.shape(x)
        rows, out = prod(batch), self.shape(weight)[0]
        turned = self.op("t", weight, shape=(width, out))
        product = self.op("mm", self.view(x, rows, width), turned, shape=(rows, out))
        return self.view(product, *batch, out)

    def add(self, x: Ref, y: Ref, name: str = "add") -> Ref:
        longest = max(len(self.shape(x)), len(self.shape(y)))
        sides = [(1,) * (longest - len(self.shape(r))) + self.shape(r) for r in (x, y)]
        return self.op(name, x, y, shape=[max(pair) for pair in zip(*sides, strict=True)])

    def split(self, x: Ref, sizes: Sequence[int], dim: int = -1) -> tuple[Ref, ...]:
        shape = self.shape(x)
        dim %= len(shape)
        shapes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
        return self.many("split_with_sizes", x, list(sizes), dim, shapes=shapes)

    def heads(self, x: Ref, count: int) -> Ref:
        """B x S x heads·d becomes B x heads x S x d."""
        return self.transpose(self.view(x, B, S, count, self.shape(x)[-1] // count), 1, 2)

    def shared(self, x: Ref, times: int) -> Ref:
        """Key heads repeated for their query heads, as `repeat_kv` does."""
        b, kv, s, d = self.shape(x)
        wide = self.op("expand", self.view(x, b, kv, 1, s, d), [b, kv, times, s, d], shape=(b, kv, times, s, d))
        return self.op("_unsafe_view", wide, [b, kv * times, s, d], shape=(b, kv * times, s, d))

    def attend(self, q: Ref, k: Ref, v: Ref) -> Ref:
        b, h, s, d = self.shape(q)
        name = "_scaled_dot_product_flash_attention_for_cpu"
        out, _ = self.many(name, q, k, v, shapes=[(b, h, s, d), (b, h, s)])
        return self.view(self.transpose(out, 1, 2), b, s, h * d)

    def axes(self, gathered: frozenset[int] = frozenset()) -> Axes:
        return infer_axes(Trace(tuple(self.tensors), tuple(self.ops), (), (), {}), gathered)


def rows(axes: Axes, weight: Ref, split: Term, dim: int = 0) -> str:
    return layout(axes.of(weight.id)[dim], lambda axis: "!" if axis is find(split) else None)


def only(axes: Axes, weight: Ref, dim: int) -> Term:
    """The largest axis of one dim."""
    return max(leaves(axes.of(weight.id)[dim]), key=lambda axis: axis.size)


def events(axes: Axes, ref: Ref, dim: int) -> set[str]:
    return {event for axis in leaves(axes.of(ref.id)[dim]) for event in axis.events}


def clean(axes: Axes) -> Axes:
    assert not axes.conflicts and not axes.harmless and not axes.unknown
    return axes


def free(term: Term) -> bool:
    return not term.data and not term.events & FORBIDDING
