"""Make what is verified in place of a model: a tiny clone with random weights, and calls that exercise it.

In double precision if possible, so that a difference is a bug and not rounding. Code that asks for single precision
inside gets double (`patches/seeding.py`); only what cannot be traced that way is checked in single precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from autoplan.capture.called import call, calls_the_model
from autoplan.capture.capture import capture_any
from autoplan.capture.copies import copied
from autoplan.capture.dry_run import own
from autoplan.capture.feeding.resize import with_other_paths
from autoplan.check.ranks.common import KeptOutside
from autoplan.check.verify.subject import CANNOT_RUN
from autoplan.common.errors import AutoplanError
from autoplan.common.options import Wish, check_context_size, check_count, check_expert_size
from autoplan.common.random_values import cast_numbers, inputs_in, randomise, tried_dtypes, working_dtype
from autoplan.common.torch_internals import TorchDispatchMode
from autoplan.hf.inputs.make import make_inputs
from autoplan.patches.seeding import Lifted
from autoplan.values import Plan

_OWN_CLONE = 3_000_000  # most parameters of a module that is verified itself


@dataclass(frozen=True)
class Clone:
    """A tiny model to verify, the calls to make, and the same calls with another batch and length.

    `planned`: the calls that its plan is made from, with those of the others that take another path. `outside`: what a
    run changes in the Python modules of its code. `dims`: calls with another number of dims.
    """

    model: Any
    feeds: Mapping[str, Any]
    others: Mapping[str, Any]
    note: str
    planned: Mapping[str, Any]
    outside: tuple[str, ...] = ()
    ranks: tuple[int, int] | None = None  # ranks that its sizes were fitted to (`Source.ranks`)
    lifted: bool = False  # it runs only if code that asks for single precision gets double
    dims: Mapping[str, Any] = field(default_factory=dict)
    recorded: dict[str, Any] = field(default_factory=dict, compare=False)  # its run, shared by all plans tried


def clone_of(source: Any) -> Clone:
    """Return a tiny model to verify, shrunk less if the smallest cannot be built or run."""
    refusal: AutoplanError | None = None
    for candidate in source.ever_larger():
        try:
            return _clone_at_size(candidate)
        except AutoplanError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _clone_at_size(source: Any) -> Clone:
    """Return a clone in double precision, in single if the model refuses that, or else in its own dtype."""
    refusal = ""
    for dtype in tried_dtypes(source.module):
        model, note = _built(source, dtype)
        feeds = feeds_at(source, model, batch=2, length=10)
        try:
            with KeptOutside(model) as outside:
                lifted = _needs_lifting(model, feeds)
            if lifted and not _traced(source, model, feeds):
                raise TypeError("some of its paths can be traced only in single precision")
        except CANNOT_RUN as error:
            refusal = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
            continue
        others = _other_calls(source, model) if source.inputs is None else _shorter(model, feeds, source.config)
        others = {**others, **_of_one_token(model, feeds)}
        if dtype != torch.float64:
            note += f"; in {str(dtype).removeprefix('torch.')}, because it does not run in other dtypes ({refusal})"
        unfamiliar = others if source.recipe is not None else {}
        planned = with_other_paths(model, feeds, unfamiliar).feeds
        other = None if source.recipe is None else source.recipe.dims  # the call with another number of dims
        numbers = working_dtype(model)
        dims = {} if other is None else inputs_in(numbers, {"forward": other.draw(0, numbers)})
        return Clone(model, feeds, others, note, planned, outside.changed, source.ranks, lifted, dims)
    raise AutoplanError(
        f"the tiny clone of {source.name} cannot run unsharded: {refusal}",
        hint="pass inputs= that the model accepts, and let its code take dtypes from its inputs or weights: clones run "
        "in float64, float32 or the dtype of the model's weights",
    )


def _other_calls(source: Any, model: Any) -> dict[str, Any]:
    """Return calls of another batch and an odd length, which ranks do not divide, if it runs; else an even one."""
    odd = feeds_at(source, model, batch=3, length=13)
    try:
        _needs_lifting(model, odd)
    except CANNOT_RUN:
        return feeds_at(source, model, batch=3, length=12)
    return odd


def _shorter(model: Any, feeds: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return a user's calls with an odd number of positions, if they run and take no other path, which the path guard
    would refuse; none for a model that a config describes. Positions: dim 1 of the first token ids or sequence of
    vectors, and all dims of that size."""
    shorter = {}
    for name, feed in calls_the_model(feeds).items() if config is None else ():
        tensors = {key: value for key, value in feed.items() if isinstance(value, torch.Tensor)}
        long = next((x.size(1) for x in tensors.values() if x.dim() == 2 + x.is_floating_point()), 0)
        if long > 5:  # to a length that divides by 4 but for 1, so that a multiple is padded
            shorter[name] = {**feed, **{key: _cropped(x, long, (long - 2) // 4 * 4 + 1) for key, x in tensors.items()}}
    try:
        _needs_lifting(model, shorter)
    except CANNOT_RUN:
        return {}
    taken = with_other_paths(model, feeds, shorter).feeds.values() if shorter else ()
    return {name: call for name, call in shorter.items() if all(call is not other for other in taken)}


class _Listing(TorchDispatchMode):
    """Notes whether the sizes of results depend on numbers: lists of what masks select."""

    lists = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags:
            by = [x for x in args[1] if x is not None] if len(args) > 1 and isinstance(args[1], list) else []
            self.lists = self.lists or not by or any(x.dtype == torch.bool for x in by)
        return func(*args, **(kwargs or {}))


def _of_one_token(model: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return calls in which all positions are alike, where code picks positions (for experts): with few different
    tokens nothing is picked for some, and code may leave out what it does for them."""
    alike = dict[str, Any]()
    with torch.no_grad(), _Listing() as listing, suppress(*CANNOT_RUN):
        for name, feed in calls_the_model(feeds).items():
            call(copied(model), own(dict(feed)))
            items = ((key, x) for key, x in feed.items() if isinstance(x, torch.Tensor))
            first = {key: x[:1, :1].expand_as(x).clone() for key, x in items if x.dim() == 2 + x.is_floating_point()}
            if listing.lists and first:
                call(copied(model), own({**feed, **first}))
                alike[f"{name}, all positions alike"] = {**feed, **first}
    return alike


def _cropped(x: torch.Tensor, long: int, short: int) -> torch.Tensor:
    rows = tuple(slice(short if dim and size == long else None) for dim, size in enumerate(x.shape))
    return x.detach()[rows].clone().requires_grad_(x.requires_grad)


def _traced(source: Any, model: Any, feeds: Mapping[str, Any]) -> bool:
    """Return whether all its paths can be traced unchanged, without lifting anything to double precision."""
    if len(calls_the_model(_made(source, model, 2, 10).feeds)) < len(calls_the_model(feeds)):
        return False
    try:
        capture_any(copied(model), dict(feeds))
    except AutoplanError:
        return False
    return True


def _needs_lifting(model: Any, feeds: Mapping[str, Any]) -> bool:
    """Return whether it runs only if code that asks for single precision gets double; raise if it fails even then."""
    lifted = False
    with torch.no_grad():
        for feed in feeds.values():
            try:
                call(copied(model), own(dict(feed)))
            except CANNOT_RUN:
                lifted = True
                with Lifted():
                    call(copied(model), own(dict(feed)))
    return lifted


def _built(source: Any, dtype: Any) -> tuple[Any, str]:
    passed = source.given
    if passed is not None and is_small_and_real(passed):
        model = copied(passed).cpu()
        cast_numbers(model, dtype)
        randomise(model)
        return model.eval(), "the model itself with random weights"
    model = source.tiny(dtype=dtype, experts="batched_mm")
    return model, f"a clone of {sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def is_small_and_real(model: Any) -> bool:
    """Return whether a model is verified itself, not as a clone."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters) <= _OWN_CLONE and not any(p.is_meta for p in parameters)


def feeds_at(source: Any, model: Any, *, batch: int, length: int) -> dict[str, Any]:
    """Return the calls that exercise a clone of a source, in the clone's own dtype.

    A path that does not run is tried in single precision too, for which models are written.
    """
    example = _made(source, model, batch, length)
    if example.notes:
        probe = copied(model)
        cast_numbers(probe, torch.float32)
        other = _made(source, probe, batch, length)
        example = max(example, other, key=lambda made: len(calls_the_model(made.feeds)))
    return inputs_in(working_dtype(model), example.feeds)


def _made(source: Any, model: Any, batch: int, length: int) -> Any:
    how: Any = {"inputs": source.inputs, "recipe": source.recipe, "batch": batch, "length": length}
    return make_inputs(model, model_type=source.model_type, **how)


# Sizes at which a tiny clone is tried: those of the plan, or others with as much on each rank.
#
# A plan for 64 ranks is tried on few. Code may branch on what a rank holds: one head, or several. So a model that is
# its own clone is tried on as many ranks as its plan is for, up to a bound. A clone that is made from a config has
# numbers of heads and experts that leave on each rank what the plan leaves.

if TYPE_CHECKING:
    from autoplan.hf.source import Source

_FEW, _MOST = 4, 8  # ranks for a clone with a single unit on one of them; most ranks for any
_LARGEST = 60_000_000  # most parameters in the copies of all ranks of a model that is its own clone


@dataclass(frozen=True)
class Sizes:
    """The numbers of ranks that a clone is sharded over: of tp, of ep (equal to tp if both are used), and of cp."""

    tp: int
    ep: int = 1
    cp: int = 1

    def wish(self) -> Wish:
        return Wish(self.tp, self.ep, cp_size=self.cp)

    @staticmethod
    def of_plan(plan: Plan, ep_size: int | None = None) -> Sizes:
        """Return the sizes of a plan."""
        return Sizes(plan.tp_size, ep_size if plan.tp_size == 1 and ep_size else plan.ep_size, plan.cp_size)

    @staticmethod
    def of(tp_size: int, ep_size: int | None, plan: Plan | None, cp_size: int = 1) -> Sizes:
        """Return the sizes as given; with a plan, sizes of the same kinds at this number of ranks."""
        check_count("tp_size", tp_size)
        check_count("cp_size", cp_size)
        if cp_size > 1 or (plan is not None and plan.cp_size > 1):
            alone = plan is None or plan.cp_size == plan.ranks
            cut = cp_size if cp_size > 1 or plan is None else max(tp_size, 2) if alone else plan.cp_size
            tp_size = 1 if plan is not None and alone else tp_size
            apart = (ep_size or 1) > 1 or (plan is not None and plan.ep_size > 1)
            return Sizes(tp_size, tp_size if apart else 1, cut)
        if ep_size is not None:
            check_count("ep_size", ep_size)
        if plan is not None and plan.ep_size > 1:
            return Sizes(tp_size, tp_size) if plan.tp_size > 1 else Sizes(1, ep_size or max(tp_size, 2))
        check_expert_size(tp_size, ep_size or 1)
        return Sizes(tp_size, ep_size or 1)

    @staticmethod
    def of_mesh(mesh: Any, ep_size: int | None, plan: Plan | None) -> Sizes:
        """Return the sizes of real ranks: of the dim "tp", of "ep" if only experts are split, or of "cp"."""
        if "cp" in mesh.mesh_dim_names:
            return Sizes(mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1, 1, mesh["cp"].size())
        if "tp" in mesh.mesh_dim_names or "ep" not in mesh.mesh_dim_names:
            return Sizes.of(mesh["tp"].size(), ep_size, plan)
        return Sizes(1, mesh["ep"].size())

    @property
    def ranks(self) -> int:
        return max(self.tp, self.ep) * self.cp

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "ep": self.ep, "cp": self.cp}
        return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or f"tp={self.tp}"

    def at(self, ranks: int) -> Sizes:
        """Return the same kinds of sizes for so many ranks; with two kinds, at least two ranks of each."""
        both = self.cp > 1 and self.ranks > self.cp
        each = max(2, ranks // 2) if both else ranks
        return Sizes(*(n if n == 1 else min(n, each) if both else each for n in (self.tp, self.ep, self.cp)))


def tried_sizes(source: Source, sizes: Sizes, *, own: bool = False) -> tuple[tuple[Source, Sizes], ...]:
    """Return the clones and numbers of ranks at which a plan is tried; the next is for when one cannot be run.

    `own`: try as many ranks as the plan is for, up to a bound; else a config's clone is tried on as few as show the
    same.
    """
    few = (source, sizes.at(min(sizes.ranks, 2)))
    module = source.given
    itself = module is not None and (is_small_and_real(module) or source.own_clone)
    if numbers := sum(p.numel() for p in module.parameters()) if module is not None and itself else 0:
        fits = 2 < sizes.ranks <= _MOST and numbers * sizes.ranks <= _LARGEST
        return ((source, sizes), few) if fits else (few,)
    single = source.leaves_single_units(sizes.ranks)
    ranks = 2 ** (min(sizes.ranks, _MOST).bit_length() - 1) if own else _FEW if single else 2
    if ranks == 2 and not single and not source.parts_units(sizes.ranks):
        return (few,)
    return (replace(source, ranks=(sizes.ranks, ranks)), sizes.at(ranks)), few


NAMES = ("dp", "dp_shard", "fsdp", "dp_shard_cp", "dp_replicate", "tp", "ep", "cp")


def clone_for(source: Source, sizes: Sizes) -> Clone:
    """Return a clone in which so many ranks split what they split in the model: the heads and experts of a clone are
    divisible by 2 and 4, unless they are fitted to other numbers."""
    ranks = max(sizes.tp, sizes.ep)
    if 4 % ranks or source.parts_units(ranks):
        with suppress(AutoplanError):
            return clone_of(replace(source, ranks=(ranks, ranks)))
    return clone_of(source)


@dataclass(frozen=True)
class MeshSizes:
    """A mesh to simulate: dim names and sizes, in order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def dims(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes, strict=True))

    def size(self, name: str) -> int:
        return self.dims.get(name, 1)

    @property
    def split_size(self) -> int:
        """The number of ranks that share one batch."""
        return self.size("tp") * self.size("ep") * self.size("cp")

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.dims.items())


def parse_mesh(text: str | Mapping[str, int] | MeshSizes) -> MeshSizes:
    """Parse `dp=2,tp=2` into names and sizes; cp comes after data-parallel ranks, and tp (or ep) last.

    >>> parse_mesh("tp=2,dp=4")
    MeshSizes(names=('dp', 'tp'), sizes=(4, 2))
    """
    if isinstance(text, MeshSizes):
        return text
    listed = [_pair(part, text) for part in text.split(",")] if isinstance(text, str) else list(text.items())
    pairs = dict(listed)
    if len(pairs) < len(listed):
        raise AutoplanError(f"mesh {text!r} names a dim twice", hint="write it as dp=2,tp=2")
    for name, size in pairs.items():
        if name not in NAMES or not isinstance(size, int) or isinstance(size, bool) or size < 1:
            what = f"its dim {name!r} has no known name" if name not in NAMES else f"the size of {name} is {size!r}"
            raise AutoplanError(f"mesh {text!r}: {what}", hint=f"sizes from 1, for {', '.join(NAMES)}")
    if pairs.get("tp", 1) > 1 and pairs.get("ep", 1) > 1:
        hint = "omit ep and pass ep_size, or omit tp"
        raise AutoplanError(f"mesh {text!r} has tp and ep: experts use the tp ranks, or a dim of their own", hint=hint)
    check_context_size(pairs.get("cp", 1), pairs.get("tp", 1), pairs.get("ep", 1))
    order = sorted(pairs, key=lambda name: (name in ("tp", "ep"), name == "cp", name != "dp_replicate"))
    return MeshSizes(tuple(order), tuple(pairs[name] for name in order))


def _pair(part: str, text: Any) -> tuple[str, int]:
    name, _, size = part.partition("=")
    if not size.strip().isdecimal() or len(size) > 9:
        raise AutoplanError(f"cannot parse {part!r} in mesh {text!r}", hint="write it as dp=2,tp=2")
    return name.strip(), int(size)
