"""A failed run: its error, the model's own frames, and the arguments to blame."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from autoplan.capture.feeding.arguments import Arguments
from autoplan.capture.feeding.wants import Path, State, is_nothing
from autoplan.capture.feeding.watch import Demand, Watch, demand_of, origin, outside_torch
from autoplan.common.nested import flatten_tensors

INSTEAD_OF_TRACED = "use another implementation (scaled_dot_product_attention, a branch in Python)"


class NothingRead(ValueError):
    """A run that ended without reading a weight: it used nothing of its inputs."""

    def __init__(self) -> None:
        super().__init__("it reads no weight")


class NotFiniteError(ValueError):
    """A run that ended with infinities or NaNs."""


@dataclass(frozen=True)
class Failure:
    """A run that raised."""

    state: State
    error: Exception
    watch: Watch
    arguments: Arguments

    @property
    def model(self) -> torch.nn.Module:
        return self.arguments.model

    @cached_property
    def text(self) -> str:
        return str(self.error)

    @property
    def demand(self) -> Demand | None:
        """Return what the failed call demands of a tensor."""
        demand = demand_of(self.watch.failed) if self.watch.failed is not None else None
        return demand if demand is not None and isinstance(demand.tensor, torch.Tensor) else None

    @property
    def is_untraceable(self) -> bool:
        """Return whether torch's compiler refuses what an op of the model lets it trace (`flex_attention`,
        `torch.cond`): no input changes that."""
        kinds = type(self.error).__mro__
        refused = ("Unsupported", "UncapturedHigherOrderOpError")
        return any(kind.__module__ == "torch._dynamo.exc" and kind.__name__ in refused for kind in kinds)

    @cached_property
    def places(self) -> list[Place]:
        return places_of(self.error)

    @cached_property
    def _of_call(self) -> list[Path]:
        call = self.watch.failed
        return [path for tensor in call.tensors() for path in origin(tensor)] if call is not None else []

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The arguments that the failure may be about, the surest first; all of them if nothing is known."""
        of_places = [path for place in reversed(self.places) for path in place.paths()]
        every = [path for path, _ in self.state.leaves()]
        candidates = [path for path in (*self._of_call, *of_places, *self.watch.last, *every) if path in every]
        return tuple(dict.fromkeys(candidates))

    @cached_property
    def blamed(self) -> tuple[Path, ...]:
        """The arguments that went into the call or the expression that failed."""
        of_place = self.places[-1].paths() if self.places else ()
        return tuple(dict.fromkeys(path for path in (*self._of_call, *of_place) if self.state.at(path) is not None))

    @property
    def first_line(self) -> str:
        return next(iter(self.text.strip().splitlines()), "")


@dataclass(frozen=True)
class Step:
    """One try: what changed and why, how far it came, its failure and where, as text, since frames hold tensors."""

    state: State
    why: str
    reached: int
    failed: str = ""
    where: str = ""
    read: frozenset[str] = frozenset()
    ended: bool = False  # it ran to its end, though with a result that is not finite


# Where in the model's own code a run failed: the frame, the expression, and the arguments in it.


@dataclass(frozen=True)
class Place:
    """One frame on the way to a failure, with the code that was running in it."""

    frame: FrameType
    line: int
    spot: tuple[int | None, int | None, int | None, int | None]

    @property
    def text(self) -> str:
        return linecache.getline(self.frame.f_code.co_filename, self.line).strip()

    @property
    def where(self) -> str:
        code = self.frame.f_code
        return f"{'/'.join(code.co_filename.split('/')[-2:])}:{self.line}, in {code.co_qualname}"

    def statement(self) -> ast.stmt | None:
        """Return the innermost statement that was running."""
        tree = _tree(self.frame.f_code)
        if tree is None:
            return None
        inside = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.stmt) and node.lineno <= self.line <= (node.end_lineno or node.lineno)
        ]
        return max(inside, key=lambda node: (node.lineno, -(node.end_lineno or 0), node.col_offset), default=None)

    def expression(self) -> ast.AST | None:
        """Return the expression that was running, as exactly as Python knows it."""
        tree = _tree(self.frame.f_code)
        line, end, column, end_column = self.spot
        if tree is None or line is None or column is None:
            return self.statement()
        cut = _indent(self.frame.f_code)
        exact = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.expr | ast.stmt)
            and (node.lineno, node.end_lineno, node.col_offset + cut, (node.end_col_offset or 0) + cut)
            == (line, end, column, end_column)
        ]
        return exact[0] if exact else self.statement()

    def condition(self) -> ast.expr | None:
        """Return the condition that led here: an assertion's, or that of the `if` around a raise."""
        statement, tree = self.statement(), _tree(self.frame.f_code)
        if isinstance(statement, ast.Assert):
            return statement.test
        called = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(called, ast.Call) and called.args and "assert" in ast.unparse(called.func).lower():
            return called.args[0]
        if not isinstance(statement, ast.Raise) or tree is None:
            return None
        tests = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
        around = [node for node in tests if any(inner is statement for inner in ast.walk(node))]
        nearest = max(around, key=lambda node: node.lineno, default=None)
        return None if nearest is None else nearest.test

    def names(self) -> list[str]:
        """Return the names in the running expression, in the order in which they are written."""
        node = self.expression()
        names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)] if node is not None else []
        return list(dict.fromkeys(name.id for name in sorted(names, key=lambda n: (n.lineno, n.col_offset))))

    def value(self, name: str) -> Any:
        return self.frame.f_locals.get(name, self.frame.f_globals.get(name))

    def paths(self) -> tuple[Path, ...]:
        """Return the arguments that the names in the running expression were computed from."""
        tensors = [tensor for name in self.names() for _, tensor in flatten_tensors(self.value(name))]
        return tuple(dict.fromkeys(path for tensor in tensors for path in origin(tensor)))


def current_place() -> Place:
    """Return the innermost frame of the model's own code that runs now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not outside_torch(frame.f_code.co_filename):
        frame = frame.f_back
    return Place(frame, frame.f_lineno, (None,) * 4)


def places_of(error: BaseException) -> list[Place]:
    """Return the frames of the model's own code, from its forward to the failure."""
    places = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if outside_torch(code.co_filename):
            spots = list(code.co_positions())
            at = trace.tb_lasti // 2
            spot = spots[at] if 0 <= at < len(spots) else (None,) * 4
            places.append(Place(trace.tb_frame, trace.tb_lineno, spot))
        trace = trace.tb_next
    return places


@lru_cache(maxsize=256)
def _tree(code: CodeType) -> ast.Module | None:
    try:
        lines, start = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    return ast.increment_lineno(tree, max(start, 1) - 1)


@lru_cache(maxsize=256)
def _indent(code: CodeType) -> int:
    try:
        first = inspect.getsourcelines(code)[0][0]
    except (OSError, TypeError, IndexError):
        return 0
    return len(first) - len(first.lstrip())


def none_names(place: Place) -> list[str]:
    """Return the names in the running statement that are None or an empty tuple."""
    return [name for name in place.names() if name in place.frame.f_locals and is_nothing(place.value(name))]


def empty_rest(places: list[Place]) -> list[str]:
    """Return the names of each `*rest` that got nothing."""
    codes = [(place.frame.f_code, place) for place in places if place.frame.f_code.co_flags & inspect.CO_VARARGS]
    names = [(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], place) for code, place in codes]
    return [name for name, place in names if place.value(name) == ()]
