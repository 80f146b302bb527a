"""Turn "this size should be that" into states in which it may be so.

A size that a failure names belongs to a tensor somewhere inside. Which dim of which argument it came from shows by its
number, since the sizes of arguments differ. If it is none of theirs, it was computed from one: by adding
(concatenated), by multiplying (split, flattened), or from both sides of an image (patches).

Calls that take another path through a model's code, with other sizes or in training, are found here as well. Windows
are shifted only where an image is larger than one, and attention is sparse only where a sequence is long. What one call
never reaches cannot be planned. So calls of two sizes run on a plain copy, and the torch calls that each makes are
compared, by module and place in the code; if the second makes one that the first does not, both are recorded, and the
plan is made for both. The same is done with code that runs in training only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from math import gcd, isqrt, prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.capture.called import PART, TRAINING, has_training_paths, in_training
from autoplan.capture.dry_run import Twin
from autoplan.capture.feeding.wants import BATCH, MASKS, Path, State, Want
from autoplan.capture.feeding.watch import is_direct, origin
from autoplan.common.code.code_place import call_name, code_place
from autoplan.common.errors import OutsideError
from autoplan.common.nested import call_with, flatten_tensors
from autoplan.common.random_values import drawn_so_far
from autoplan.common.torch_internals import DisableTorchFunction

_STEPS = (2, 4)
_SHARED = ("batch", "length", "nodes", "edges")
_FEW = 8  # smallest size that windows may go over
_TOKENS = 17  # one more than the most tokens that are added to patches: of classes, of times, buffers
_LARGEST = {"side": 256, "length": 1024, "samples": 65536, "frames": 64}


def resized(state: State, paths: Iterable[Path], have: int, want: int) -> Iterator[State]:
    """Yield states in which a size that is `have` may come out as `want`."""
    if have == want or want < 1:
        return
    paths = tuple(paths)
    dims: list[tuple[Path, int, int]] = []
    for path, leaf in state.among(paths):
        for dim, size in enumerate(leaf.sizes(state.sizes)):
            if size == have and leaf.shape[dim] != BATCH:
                yield from state.with_dim(path, dim, want)
            elif leaf.shape[dim] != BATCH:
                dims.append((path, dim, size))
    for path in paths:
        yield from _patches(state, path, have, want)
    features = [at for at in dims if at[1] == len(_shape(state, at[0])) - 1]
    if len(paths) == 1:  # with several, the size is that of a concatenation
        yield from _in_ratio(state, features, have, want, _refined)
    yield from _in_ratio(state, dims, have, want, _made_of)
    for path in paths:
        yield from _areas(state, path, have, want)
    yield from _in_ratio(state, dims, have, want, _nearly_made_of)
    for path, dim, size in dims:  # columns of a table, each of which became several numbers of one row
        if len(_shape(state, path)) == 2:
            yield from state.with_dim(path, dim, size + (want - have) // gcd(have, want))


def _in_ratio(
    state: State,
    made: Iterable[tuple[Path, int, int]],
    have: int,
    want: int,
    better: Callable[[int, int, int], Iterable[int]],
) -> Iterator[State]:
    made = list(made)
    for path, dim, size in made:
        for other in better(size, have, want):
            yield from state.with_dim(path, dim, other)
    widths = [
        each for each in made if each[1] == len(_shape(state, each[0])) - 1 and _shape(state, each[0])[-1] != "side"
    ]
    for size in dict.fromkeys(size for _, _, size in widths):  # arguments of one width were concatenated
        alike = [(path, dim) for path, dim, each in widths if each == size]
        for other in better(size, have, want) if len({path for path, _ in alike}) > 1 else ():
            together = [state]
            for path, dim in alike:
                together = [new for each in together for new in each.with_dim(path, dim, other)][-1:]
            yield from together


def _shape(state: State, path: Path) -> tuple[int | str, ...]:
    leaf = state.at(path)
    return () if leaf is None else leaf.shape


def _made_of(size: int, have: int, want: int) -> Iterator[int]:
    if have and size * want % have == 0 and size * want // have != size:
        yield size * want // have
    if size + want - have > 0:
        yield size + want - have


def _refined(size: int, have: int, want: int) -> Iterator[int]:
    """Yield the nearest size for something that went through windows and came out nearly as it should."""
    if have and size >= _FEW and have < 2 * want < 4 * have and size * want % have:
        yield from islice(_nearly_made_of(size, have, want), 1)


def _nearly_made_of(size: int, have: int, want: int) -> Iterator[int]:
    """Yield sizes in about the same ratio, for windows and strides."""
    if have and size >= _FEW and size * want % have:
        near = round(size * want / have)
        yield from (close for close in (near, near + 1, near - 1) if close > 1 and close != size)


def _patches(state: State, path: Path, have: int, want: int) -> Iterator[State]:
    """Yield a state whose image gives the right number of patches, if up to 16 tokens are added to them."""
    leaf = state.at(path)
    if leaf is None or len(leaf.shape) < 4:
        return
    side = leaf.sizes(state.sizes)[-1]
    for more in range(_TOKENS):
        now, then = isqrt(max(have - more, 0)), isqrt(max(want - more, 0))
        if now and then and now**2 == have - more and then**2 == want - more and side * then % now == 0:
            yield _with_sides(state, path, side * then // now)


def _areas(state: State, path: Path, have: int, want: int) -> Iterator[State]:
    """Yield states whose image has sides scaled by the root of the ratio, or halved."""
    leaf = state.at(path)
    if leaf is None or len(leaf.shape) < 4 or not have:
        return
    side = leaf.sizes(state.sizes)[-1]
    near = round(side * (want / have) ** 0.5)
    for close in dict.fromkeys((near, near + 1, near - 1, near + 2, near - 2, side // 2, side // 4)):
        if 1 < close <= _LARGEST["side"] and close != side and leaf.shape[-1] == leaf.shape[-2]:
            yield _with_sides(state, path, close)


def _with_sides(state: State, path: Path, side: int) -> State:
    leaf = state.at(path)
    assert leaf is not None
    if leaf.shape[-1] == "side":
        return state.with_size("side", side)
    return state.with_want(path, replace(leaf, shape=(*leaf.shape[:-2], side, side)))


def multiples(state: State, paths: Iterable[Path], have: int, factor: int) -> Iterator[State]:
    """Yield states in which a size is doubled if a factor then divides it (as all that divided it before), the next
    multiple of the factor, or the factor itself."""
    twice = (2 * have,) if factor > 1 and have % factor and 2 * have % factor == 0 else ()
    for want in (*twice, -(-max(have, 1) // factor) * factor, factor) if factor > 1 else ():
        yield from resized(state, paths, have, want)


def larger(state: State, paths: Iterable[Path]) -> Iterator[State]:
    """Yield states with images and sequences of twice and four times the size."""
    named = {
        str(size)
        for path in paths
        if (leaf := state.at(path)) is not None
        for size in leaf.shape[1:]
        if size in _LARGEST
    }
    for times in _STEPS:
        for name in sorted(named, reverse=True):
            size = 2 ** (state.sizes[name] * times - 1).bit_length()
            if size <= _LARGEST[name]:
                yield state.with_size(name, size)
    for path, leaf in state.among(paths):
        if leaf.shape and isinstance(leaf.shape[-1], int):
            for times in _STEPS if leaf.shape[-1] <= _LARGEST["side"] else ():
                yield from state.with_dim(path, len(leaf.shape) - 1, leaf.shape[-1] * times)


def of_rank(state: State, path: Path, rank: int, channels: int = 0) -> Iterator[State]:
    """Yield states in which an argument has another number of dims. `channels`: its channels, if known."""
    leaf = state.at(path)
    if leaf is None or rank == len(leaf.shape) or not 0 <= rank <= 6:
        return
    kind = leaf.kind if leaf.kind != "ids" or rank < 4 else "float"
    shapes: list[Iterable[int | str]] = list(_shapes(rank, channels, leaf))
    if any(isinstance(key, int) and not state.is_tuple(path[:at]) for at, key in enumerate(path)):
        # items of a list come one by one, without a batch; a batch of images is likelier than one video
        alone = [shape[1:] for shape in _shapes(rank + 1, channels, leaf)]
        shapes = [*alone, *shapes] if rank < 4 else [*shapes, *alone]
        if rank == 1 and leaf.shape[:1] == (BATCH,):  # one number per item
            shapes = [(BATCH,), *shapes]
    if rank == 3 and leaf.kind in MASKS and any("side" in other.shape for _, other in state.leaves()):
        shapes = [(BATCH, "side", "side"), *shapes]  # a mask of images
    lead = leaf.shape[0] if leaf.shape else ""
    if lead in ("nodes", "edges"):  # a graph has no batch: one row of features per node or edge
        widths: tuple[int | str, ...] = (channels,) if channels else ("width", 1)
        shapes = [[lead if size == "batch" else size for size in shape] for shape in shapes]
        shapes = [*([lead, size] for size in widths if rank == 2), *shapes]
    for shape in map(tuple, shapes):
        yield state.with_want(path, replace(leaf, kind=kind, shape=shape))


def of_vectors(state: State, rank: int) -> Iterator[State]:
    """Yield the state in which all vectors are sequences (of 3 dims), or all sequences are vectors (of 2), and masks of
    their positions one number each."""
    other = state
    for path, leaf in state.leaves():
        if rank == 2 and leaf.kind in ("bool", "nowhere") and leaf.shape == (BATCH, "length"):
            other = other.with_want(path, replace(leaf, kind="ones", shape=(BATCH,)))
        if leaf.kind in ("float", "unit") and leaf.shape[:1] == (BATCH,) and len(leaf.shape) == 5 - rank:
            shape = (BATCH, "length", leaf.shape[-1]) if rank == 3 else (BATCH, leaf.shape[-1])
            other = other.with_want(path, replace(leaf, shape=shape))
    if other != state:
        yield other


def alike_or_longer(state: State) -> Iterator[State]:
    """Yield states in which an argument has the shape of another one, then those in which one has a dim more."""
    leaves = list(state.leaves())
    for path, leaf in leaves:
        for other in dict.fromkeys(other.shape for _, other in leaves if other.kind == "float"):
            if leaf.kind != "ids" and other != leaf.shape:
                yield state.with_want(path, replace(leaf, kind="float", shape=other))
    for path, leaf in leaves:
        yield from of_rank(state, path, len(leaf.shape) + 1)


def sizes_vary(state: State, other: State | None) -> bool:
    """Return whether two calls differ in more sizes than that of the batch."""
    return other is not None and any(a.sizes(state.sizes)[1:] != a.sizes(other.sizes)[1:] for _, a in other.leaves())


def _shapes(rank: int, channels: int, leaf: Want) -> Iterator[tuple[int | str, ...]]:
    last = leaf.shape[-1] if len(leaf.shape) > 1 and leaf.shape[-1] not in ("length", "side") else "width"
    several: list[int | str] = [channels] if channels else [last if isinstance(last, int) else 3, 1, 4, "width"]
    if rank < 2:
        if rank and "length" in leaf.shape:
            yield ("length",)
        yield ("batch",)[:rank]
    elif rank == 2:
        yield from (("batch", size) for size in ([channels] if channels else ["length", last]))
    elif rank == 3 and "samples" in leaf.shape:
        yield from (("batch", size, "samples") for size in ([channels] if channels else [1, 2]))
    elif rank == 3:
        wide = channels or last
        yield from (("batch", "length", wide), ("batch", wide, "length"))
        yield from ((("batch", channels, "samples"),) if channels and channels < 3 else ())
    elif rank == 4:
        for size in several:
            yield ("batch", size, "side", "side")
        yield from (("batch", "length", "length", last), ("batch", "length", "frames", last))
        yield ("batch", 1, "width", "length")
        yield ("batch", "side", "side", several[0])
    elif rank == 5:
        for size in several:
            yield ("batch", size, "frames", "side", "side")
            yield ("batch", "frames", size, "side", "side")
        for size in several:
            yield ("batch", size, "side", "side", "side")
    else:
        yield ("batch", 2, "frames", several[0], "side", "side")


def of_shape(state: State, tensor: torch.Tensor, sizes: Sequence[int]) -> Iterator[State]:
    """Yield states for an argument that the model turned, flattened or unsqueezed into a tensor of other sizes."""
    path = next(iter(origin(tensor)), None)
    leaf = state.at(path) if path is not None and len(origin(tensor)) == 1 and is_direct(tensor) else None
    if path is None or leaf is None:
        return
    have, met = leaf.sizes(state.sizes), tuple(tensor.shape)
    dims = [dim for dim, size in enumerate(met) if size != 1]
    if have == met or tensor.dim() == len(sizes) == 1 and prod(have) == met[0]:
        shape = list(sizes)
    elif have == tuple(met[dim] for dim in dims):
        shape = [sizes[dim - len(met)] for dim in dims if dim - len(met) >= -len(sizes)]
    elif sorted(have) == sorted(met) and leaf.shape[0] == BATCH and state.sizes[BATCH] in sizes:
        shape = list(sizes)
        shape.insert(0, shape.pop(shape.index(have[0])))
    else:
        return
    names = {size: name for name, size in state.sizes.items() if name in _SHARED}
    for kind in dict.fromkeys(("float" if leaf.kind == "ids" else leaf.kind, leaf.kind)):
        yield state.with_want(path, replace(leaf, kind=kind, shape=tuple(names.get(size, size) for size in shape)))


def of_kind(state: State, path: Path, kind: str, below: int | None = None) -> Iterator[State]:
    """Yield the state in which an argument is of another kind."""
    leaf = state.at(path)
    if leaf is None or leaf.kind == kind and (below is None or leaf.below == below):
        return
    yield state.with_want(path, replace(leaf, kind=kind, below=below or leaf.below))  # type: ignore[arg-type]


_OTHER_SIZES, _IN_TRAINING = " in other sizes", " in training"  # suffixes of the names of such feeds
_Way = Counter[tuple[str, str, str]]


class OtherPaths(NamedTuple):
    """The feeds with those that take other paths: with other sizes, or in training. A note for each that cannot run on
    a copy, and so is not recorded. Whether training draws random numbers without taking another path."""

    feeds: dict[str, dict[str, Any]]
    notes: tuple[str, ...] = ()
    draws: bool = False


class _Run(NamedTuple):
    """The torch calls of one run, None if it fails on the copy; and whether it drew random numbers."""

    calls: _Way | None
    drew: bool = False


def with_other_paths(
    model: nn.Module,
    feeds: Mapping[str, dict[str, Any]],
    others: Mapping[str, dict[str, Any]],
) -> OtherPaths:
    """Run calls with other sizes, and in training, on a copy, and add those that make other torch calls."""
    main = {name: inputs for name, inputs in feeds.items() if PART not in inputs}
    more = {name + _OTHER_SIZES: (main[name], inputs) for name, inputs in others.items() if name in main}
    if has_training_paths(model):
        more |= {name + _IN_TRAINING: (inputs, {**inputs, TRAINING: True}) for name, inputs in main.items()}
    if not more:
        return OtherPaths(dict(feeds))
    for folded in (True, False):
        twin = Twin(model, folded=folded)
        twin.module.eval()
        ways = {name: (_way(twin, first), _way(twin, second)) for name, (first, second) in more.items()}
        if not twin.folds or not any(run.calls is None for runs in ways.values() for run in runs):
            break
    calls = {name: (first.calls, second.calls) for name, (first, second) in ways.items()}
    # With other sizes a loop may just go on longer; more of the same calls in training go over what only training has.
    another = [
        name
        for name, (first, second) in calls.items()
        if first and second and (second - first if TRAINING in more[name][1] else second.keys() - first.keys())
    ]
    unknown = (name for name, (first, second) in calls.items() if first and second is None)
    notes = tuple(f"{name!r} is not recorded: it does not run on a copy" for name in unknown)
    draws = any(second.drew for name, (_, second) in ways.items() if TRAINING in more[name][1] and name not in another)
    return OtherPaths({**feeds, **{name: more[name][1] for name in another}}, notes, draws)


def _way(twin: Twin, inputs: Mapping[str, Any]) -> _Run:
    calls, keywords = _Calls(), dict(inputs)
    with ExitStack() as stack:
        if keywords.pop(TRAINING, False):
            stack.enter_context(in_training(twin.module))
        for name, module in twin.module.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; its calls count as its caller's
                continue
            stack.callback(module.register_forward_pre_hook(calls.entering(name)).remove)
            stack.callback(module.register_forward_hook(calls.left, always_call=True).remove)
        try:
            with calls:
                drew = twin.run(partial(_drew, twin.module), keywords)
        except OutsideError:
            raise
        except Exception:  # someone else's forward may raise anything; the recording reports it for the first run
            return _Run(None)
    return _Run(calls.found, drew)


def _drew(function: Callable[..., Any], **given: Any) -> bool:
    """Call the function and return whether it drew random numbers."""
    before = drawn_so_far()
    call_with(function, given)
    return drawn_so_far() != before


class _Calls(TorchFunctionMode):
    """Records the module, the function and the place of each torch call."""

    def __init__(self) -> None:
        super().__init__()
        self.found: _Way = Counter()
        self.running = [""]

    def entering(self, name: str) -> Any:
        return lambda module, args: self.running.append(name)

    def left(self, module: nn.Module, args: Any, output: Any) -> None:
        if len(self.running) > 1:
            self.running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = call_name(func)
        if not name.startswith("attr:") and _works(args, kwargs):
            with DisableTorchFunction():
                self.found[self.running[-1], name, code_place()] += 1
        return func(*args, **(kwargs or {}))


def _works(args: Any, kwargs: Any) -> bool:
    """Return whether a call has a tensor with dims; one that draws or compares a single number splits nothing."""
    return any(tensor.dim() for _, tensor in flatten_tensors((args, kwargs or {})))
