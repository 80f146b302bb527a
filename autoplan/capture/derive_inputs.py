"""Derive inputs for an unfamiliar module: search once for a recipe, from which calls of two sizes are drawn.

Nothing says what `forward(x)` takes, but its errors do: an unpacking tells the number of dims, a matmul a width, an
operation on None that an argument is needed (feeding/). The search tries, within a budget, what errors suggest, and
keeps its trail.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoplan.capture.called import PART
from autoplan.capture.dry_run import Twin, tried
from autoplan.capture.feeding.failure import INSTEAD_OF_TRACED
from autoplan.capture.feeding.resize import sizes_vary
from autoplan.capture.feeding.wants import BATCH, SIZES, State
from autoplan.capture.fold import CONTAINERS
from autoplan.common.conventions import conventions
from autoplan.common.errors import CaptureError
from autoplan.common.nested import flatten_tensors
from autoplan.common.random_values import working_dtype
from autoplan.values import Fed

if TYPE_CHECKING:  # most models are fed as their config says: the search is imported only when needed
    from autoplan.capture.feeding.arguments import Arguments
    from autoplan.capture.feeding.failure import Step
    from autoplan.capture.feeding.search import Search

_OF_A_PART = 60  # tries for a submodule
_SHOWN = 8  # tries that a message lists


@dataclass(frozen=True)
class Recipe:
    """Example arguments, also in other sizes, and how they were derived. `training`: with the arguments that make
    forward compute its loss, if it takes them. `dims`: with another number of dims. `masked`: with optional masks.
    `full`: with as many positions as a mask or a table has, if it then takes another path."""

    state: State
    other: State | None
    trail: tuple[Step, ...]
    training: State | None = None
    dims: State | None = None
    masked: State | None = None
    full: State | None = None

    def draw(self, model: nn.Module, seed: int, *, other: bool = False) -> dict[str, dict[str, Any]]:
        """Return keyword arguments by call, in the model's own dtype; `other`: in the other sizes, if there are any."""
        state = self.other if other and self.other is not None else self.state
        calls = {"forward": state}
        if self.training is not None:
            calls["forward with targets"] = replace(self.training, named=state.named)
        if self.masked is not None:
            calls["forward with masks"] = replace(self.masked, named=state.named)
        if self.full is not None:
            calls["forward at full length"] = self.full.with_size(BATCH, state.sizes[BATCH])
        return {name: call.draw(seed, working_dtype(model)) for name, call in calls.items()}

    def fed(self) -> tuple[Fed, ...]:
        """Return what a plan records: each argument in both sizes, and why it was chosen."""
        reasons: dict[str, str] = {}
        last = self.training or self.state
        wants = {**dict(last.wants), **dict(self.masked.wants if self.masked is not None else ())}
        others = dict(self.other.wants) if self.other is not None else {}
        for step in self.trail:
            for name, want in step.state.wants:
                if wants.get(name) == want:
                    reasons.setdefault(name, step.why)
        return tuple(
            Fed(
                name,
                want.text(last.sizes),
                others.get(name, want).text(self.other.sizes) if self.other is not None else "",
                reasons.get(name, "the likeliest"),
            )
            for name, want in wants.items()
        )


def recipe_for(model: nn.Module) -> Recipe:
    """Search for a recipe. Raise CaptureError with signature, tries, the line that failed and a snippet to edit."""
    search, state = _searched(model, 0, first=False, sizes={})
    state = search.marked(search.in_both_modes(state), there=False)
    other = search.other_sizes(state) if state.wants else None
    # A length that must be what it is may be no length: rows of features ran as a sequence by chance.
    varies = sizes_vary(state, other)
    rows = None if varies else search.without_length(state)
    if rows is not None and (larger := search.other_sizes(rows)) is not None:
        state, other = rows, larger
    elif not varies:
        state, other = search.varying(state) or (state, other)
    other = search.marked(other, there=True) if other is not None else None
    steps = tuple(search.steps)
    dims = search.with_other_dims(state) if state != rows else None
    if dims is not None and other is not None and other.sizes[BATCH] == state.sizes[BATCH]:  # nor a batch
        state, other, dims = dims, search.other_sizes(dims), None
    targets, masked = search.with_targets(state, other), search.with_masks(state, other)
    return Recipe(state, other, steps, targets, dims, masked, search.at_full_length(state))


def derive(model: nn.Module, batch: int, length: int, seed: int, *, first: bool = False) -> dict[str, Any]:
    """Return keyword arguments for one forward. `first`: for a submodule, whose first argument is passed even if it is
    optional; there may be many submodules, so each gets fewer tries."""
    most = _OF_A_PART if first else None
    _, state = _searched(model, seed, first=first, sizes={"batch": batch, "length": length}, most=most)
    return state.draw(seed, working_dtype(model))


def _searched(
    model: nn.Module, seed: int, *, first: bool, sizes: dict[str, int], most: int | None = None
) -> tuple[Search, State]:
    from autoplan.capture.feeding.arguments import Arguments
    from autoplan.capture.feeding.search import MOST_TRIES, Search

    arguments = Arguments.of(model, first=first)
    start = arguments.start()
    for name, size in sizes.items():
        if size != SIZES[name]:
            start = start.with_size(name, size)
    search = Search(arguments, seed, MOST_TRIES if most is None else most)
    state = search.run(start) if start.wants or arguments.open else start
    if state is None:
        raise _not_found(arguments, search)
    return search, state


def _not_found(arguments: Arguments, search: Search) -> CaptureError:
    best = max(search.steps, key=lambda step: step.reached)
    where = f"\n  failed at {best.where}" if best.where else ""
    if search.untraceable:
        return CaptureError(
            f"{arguments.signature} cannot be recorded: it runs code that torch.compile must trace (flex_attention, "
            f"torch.cond), and that fails with {best.failed}{where}",
            hint=INSTEAD_OF_TRACED,
        )
    sizes = best.state.sizes
    guess = ", ".join(f"{name!r}: {want.code(sizes)}" for name, want in best.state.wants)
    lines = ""
    for step in sorted(search.steps, key=lambda step: -step.reached)[:_SHOWN]:
        tried_with = ", ".join(f"{name}={want.text(step.state.sizes)}" for name, want in step.state.wants)
        lines += f"\n    {tried_with} -> {step.failed[:120] or 'ran'}"
    return CaptureError(
        f"no inputs could be inferred for {arguments.signature}: after {len(search.steps)} tries the "
        f"closest attempt fails with {best.failed}{where}\n  tried, most successful first:{lines}",
        hint=f"edit the best guess and pass it: inputs={{{guess}}}",
    )


# Submodules that the model's own forward never runs are called alone.
#
# Decoders of image tokens, heads of a second task, codecs: methods of a model run them, its forward does not, and yet
# their weights fill memory. A feed with the key "@module" calls that module in place of the model. Its inputs are
# derived as for any plain module. Its results, and the gradients of its inputs, must be replicated, whoever calls it.
#
# If a router chose some of the equal members of a list, the others are left alone: what follows their siblings' results
# was recorded, and the same must follow theirs.
#
# A module with other methods that run its children (`encode`, `decode`) is not called itself, since its forward need
# not do what they do. Its children are.


_SIDES = (4, 8, 16)  # of example images
_WORTH = 0.001  # share of the model's weights below which a submodule is not fed, and stays replicated


Make = Callable[[str, nn.Module], dict[str, Any] | None]  # inputs of a submodule, if a rule describes them


def part_feeds(
    model: nn.Module, feeds: Mapping[str, Mapping[str, Any]], described: Make, size: tuple[int, int, int]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return a feed for each large submodule that no given feed reads, and a note for each that cannot be fed.

    `size`: batch, length and seed of derived inputs.
    """
    part_inputs: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    reads = _Reads.of(model, feeds)
    waiting = list(reads.unread_parts(model, ""))
    while waiting:
        name, part = waiting.pop(0)
        try:
            arguments = described(name, part)
            part_inputs[name] = {PART: name, **(_derived(part, size) if arguments is None else arguments)}
        except CaptureError as error:
            inside = list(reads.unread_parts(part, f"{name}."))
            if not inside:
                notes.append(f"no feed for {name}, which forward does not run: {error.message}")
            waiting = inside + waiting
    return part_inputs, notes


def _derived(part: nn.Module, size: tuple[int, int, int]) -> dict[str, Any]:
    """Return arguments for a submodule; images as small as it takes, since an image generator's outputs are large."""
    arguments = derive(part, *size, first=True)
    for side in _SIDES:  # images and videos are cropped to their corner
        smaller = {
            name: value[..., :side, :side].contiguous()
            if isinstance(value, torch.Tensor) and value.dim() > 3
            else value
            for name, value in arguments.items()
        }
        try:
            twin = Twin(part)
            results = flatten_tensors(twin.run(twin.module, smaller))
        except Exception:  # someone else's forward, tried on a guess, may raise anything
            continue
        if all(min(tensor.shape, default=2) > 1 for _, tensor in results):
            arguments = smaller
            break
    run = tried(part, arguments, supposing=True)
    if not run.complete:  # the search works on shapes alone and stops where values are read
        raise CaptureError(str(run.failure or "it reads values of its inputs"))
    return arguments


@dataclass(frozen=True)
class _Reads:
    """The parameters that some feed reads, and those that none does; one of a set of folded blocks stands for all."""

    read: frozenset[str]
    unread: frozenset[str]
    worth: float

    @staticmethod
    def of(model: nn.Module, feeds: Mapping[str, Mapping[str, Any]]) -> _Reads:
        """Run the feeds. No parameter counts as unread if a run stopped halfway."""
        runs = [tried(model, feed, supposing=True) for feed in feeds.values()]
        read = frozenset[str]().union(*(run.used for run in runs))
        parameters = frozenset[str]().union(*(run.known for run in runs))
        unread = parameters - read if all(run.complete for run in runs) else frozenset[str]()
        return _Reads(read, unread, _WORTH * sum(p.numel() for p in model.parameters()))

    def unread_parts(self, model: nn.Module, above: str) -> Iterator[tuple[str, nn.Module]]:
        """Yield the outermost submodules that no feed reads and that can be called by themselves."""
        for short, part in model.named_children():
            name = f"{above}{short}"
            sizes = {f"{name}.{own}": parameter.numel() for own, parameter in part.named_parameters()}
            unread = sizes.keys() & self.unread
            if not unread or sum(sizes.values()) < self.worth:
                continue
            partly_read = bool(sizes.keys() & self.read)
            if not partly_read and isinstance(model, CONTAINERS):
                # If a member of the same container and class is read, this one follows it
                siblings = tuple(f"{above}{key}." for key, own in model.named_children() if type(own) is type(part))
                if any(name.startswith(siblings) for name in self.read):
                    continue
            if partly_read or not _is_called(part):
                yield from self.unread_parts(part, f"{name}.")
            else:
                yield name, part


def _is_called(part: nn.Module) -> bool:
    """Return whether a module has a forward and no other public method that runs its children."""
    if type(part).forward is nn.Module.forward:
        return False
    children = {name for name, _ in part.named_children()}
    for base in type(part).__mro__:
        if base.__module__.startswith("torch.") or conventions().is_base(base) or base is object:
            continue
        for name, method in vars(base).items():
            if isinstance(method, FunctionType) and not name.startswith(("_", "set_")) and name != "forward":
                method = inspect.unwrap(method)
                if len(inspect.signature(method).parameters) > 1 and not children.isdisjoint(method.__code__.co_names):
                    return False
    return True
