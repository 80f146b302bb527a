"""Carry a foreign plan out by its own library's code, as a `Sharding` for `check_sharding`.

DeepSpeed's engine cannot run inside simulated ranks, so its layers are imitated here, after release 0.19:

    column   rows of the weight are sharded; the input's gradient is summed; the output stays split (or is gathered)
    row      columns of the weight are sharded; the output is summed, then the whole bias is added
    skip     whole; with `grad_allreduce` its gradient is summed
    others   a module that is no linear layer and no table is left whole, whatever a spec says of it
    counts   a module over cut layers whose attribute is called `num_heads`, `hidden_size` or the like gets its shard

What is not imitated is named by `not_imitated`, and such a plan is not run.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from autoplan.capture.copies import copied
from autoplan.check.audit.lines import reached_by_torch
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.check.verify.compare import error_of, largest_of
from autoplan.check.verify.on_ranks import Sharding, said
from autoplan.common.conventions import conventions
from autoplan.common.nested import flatten_tensors
from autoplan.common.random_values import cast_numbers, inputs_in
from autoplan.common.torch_internals import own_parameters
from autoplan.decide.written_plans.dialects import COUNTS, heads_of, kind_of, spec_for
from autoplan.execute.collectives import RankGroup, all_reduce, copy_to_ranks, gather_over_ranks, sum_over_ranks
from autoplan.hf.own_sharding import (
    context_hooks,
    refuse_old_sharding,
    shard_as_transformers,
    slice_of,
    with_all_positions,
)

Rows = tuple[tuple[int, ...], ...]
_HELD = "_sharded_by_autotp"


def autotp_sharding(config: Mapping[str, Any]) -> Sharding:
    """Return how AutoTP would carry out a config."""
    return Sharding(partial(_shard, config=config), _gather)


def not_imitated(model: nn.Module, config: Mapping[str, Any], tp_size: int) -> str:
    """Return why a config cannot be tried on this model, or an empty string."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, module, spec in _chosen(model, config):
        if not isinstance(module, nn.Linear):
            return f"AutoTP shards {type(module).__name__} {name} in a way that is not emulated"
        if len(owners[id(module.weight)]) > 1:
            return f"the weight of {name} is tied, and AutoTP's handling of it is not emulated"
        if kind_of(spec) == "row" and name.rpartition(".")[2] in heads_of(config):
            return f"{name} is a head sharded along its input, which is not emulated"
        sizes = _parts(module.weight.shape[_dim(spec)], spec)
        if sizes is None or any(size % tp_size for size in sizes):
            sizes = sizes or spec["shape"]
            return f"{name}: {sizes} are not divisible by {tp_size}; AutoTP's rules for that are not emulated"
    return ""


def _chosen(model: nn.Module, config: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module, Mapping[str, Any]]]:
    """Modules with a matrix that a spec cuts; AutoTP looks up no specs for those of other classes."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None) if is_cut_by_autotp(module) else None
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            spec = spec_for(config, f"{name}.weight")
            if spec is not None and kind_of(spec) != "skip":
                yield name, module, spec


def is_cut_by_autotp(module: nn.Module | None) -> bool:
    """Return whether AutoTP looks up a spec for a module of this class."""
    linear = isinstance(module, (nn.Linear, nn.Embedding))
    return linear or module is not None and conventions().is_transposed_linear(module)


def _dim(spec: Mapping[str, Any]) -> int:
    return int(spec.get("partition_dim", 0 if kind_of(spec) == "column" else 1))


def _parts(size: int, spec: Mapping[str, Any]) -> list[int] | None:
    """The packed segments of the cut dim; None where the shape does not fit it."""
    shape = spec.get("shape")
    segments = shape[_dim(spec)] if shape else 1
    if isinstance(segments, (list, tuple)):
        return list(segments) if sum(segments) == size else None
    if segments == -1:
        return [size]
    return [size // segments] * segments if size % segments == 0 else None


def _shard(model: nn.Module, mesh: Any, *, config: Mapping[str, Any]) -> nn.Module:
    group = RankGroup.of(mesh)
    pieces: dict[str, tuple[int, Rows, RankGroup]] = {}
    for name, module, spec in list(_chosen(model, config)):
        assert isinstance(module, nn.Linear)
        dim = _dim(spec)
        rows = _rows(_parts(module.weight.shape[dim], spec) or [], group.size)
        pieces[f"{name}.weight"] = (dim, rows, group)
        _keep(module, "weight", dim, rows[group.rank])
        if kind_of(spec) == "row":
            module.forward = partial(_row, module, group)
            continue
        if module.bias is not None:
            pieces[f"{name}.bias"] = (0, rows, group)
            _keep(module, "bias", 0, rows[group.rank])
        module.forward = partial(_column, module, group, rows if spec.get("gather_output") else None)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (spec_for(config, name) or {}).get("grad_allreduce"):
            parameter.register_hook(partial(all_reduce, group=group))
    # Attributes that look like counts of what is cut, by name, on every module over a cut layer.
    for name, module in model.named_modules():
        own = getattr(module, "weight", None)
        is_layer = isinstance(own, torch.Tensor) and own.dim() == 2
        near = [*module.parameters(recurse=False), *(p for c in module.children() for p in c.parameters(recurse=False))]
        above = any(parameter.startswith(f"{name}.") for parameter in pieces)
        if not name or is_layer or not above or any(parameter.dim() >= 3 for parameter in near):
            continue
        for attribute in COUNTS:
            value = getattr(module, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool):
                setattr(module, attribute, value // group.size)
    model.__dict__[_HELD] = pieces
    return model


def _rows(sizes: list[int], tp: int) -> Rows:
    pieces = torch.arange(sum(sizes)).split(sizes)
    return tuple(tuple(torch.cat([piece.view(tp, -1)[rank] for piece in pieces]).tolist()) for rank in range(tp))


def _keep(module: nn.Module, name: str, dim: int, rows: tuple[int, ...]) -> None:
    whole = own_parameters(module)[name]
    own = whole.detach().index_select(dim, torch.tensor(rows))
    own_parameters(module)[name] = nn.Parameter(own, requires_grad=whole.requires_grad)


def _column(module: nn.Linear, group: RankGroup, gathered: Rows | None, x: torch.Tensor) -> torch.Tensor:
    out = F.linear(copy_to_ranks(x, group), module.weight, module.bias)
    return out if gathered is None else gather_over_ranks(out, group, -1, gathered)


def _row(module: nn.Linear, group: RankGroup, x: torch.Tensor) -> torch.Tensor:
    out = sum_over_ranks(F.linear(x, module.weight), group)
    return out if module.bias is None else out + module.bias


def _gather(model: nn.Module, grads: bool) -> dict[str, torch.Tensor]:
    """Every parameter or gradient, whole, under each of its names."""
    whole = _tensors(model, grads)
    for name, (dim, rows, group) in model.__dict__[_HELD].items():
        if name in whole:
            whole[name] = gather_over_ranks(whole[name].detach(), group, dim, rows)
    return whole


def _tensors(model: nn.Module, grads: bool) -> dict[str, torch.Tensor]:
    """Every parameter or gradient, as it lies on this rank, under each of its names."""
    named = model.named_parameters(remove_duplicate=False)
    tensors = {name: parameter.grad if grads else parameter.detach() for name, parameter in named}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def transformers_sharding(plan: Mapping[str, str]) -> Sharding:
    """transformers' tensor parallelism, as `from_pretrained(distributed_config=…)` applies it."""
    refuse_old_sharding()
    return Sharding(partial(shard_as_transformers, plan=dict(plan)), _gathered)


def torch_sharding(plan: Mapping[str, Any]) -> Sharding:
    """torch's `parallelize_module` with a dict of styles; each rank gets style objects of its own."""
    return Sharding(partial(_shard_as_torch, plan=dict(plan)), _gathered)


def _shard_as_torch(model: Any, mesh: Any, *, plan: dict[str, Any]) -> Any:
    ends = [getattr(model, end)() for end in conventions().ends if hasattr(model, end)]
    is_tied = len(ends) == 2 and len({id(getattr(end, "weight", end)) for end in ends}) == 1
    model = parallelize_module(model, mesh, {pattern: copy.deepcopy(style) for pattern, style in plan.items()})
    # Automodel's style only marks such a module: its training loop sums the gradients. It ties tied ends again, too
    marking = [key for key, style in plan.items() if type(style).__name__ == "ReplicatedWithGradAllReduce"]
    marked = [module for name, module in model.named_modules() if any(reached_by_torch(key, name) for key in marking)]
    for parameter in (parameter for module in marked for parameter in module.parameters(recurse=False)):
        parameter.register_hook(partial(all_reduce, group=RankGroup.of(mesh)))
    if is_tied and any(type(style).__module__.startswith("nemo_automodel.") for style in plan.values()):
        ends[1].weight = ends[0].weight
    return model


def _gathered(model: Any, grads: bool) -> dict[str, Any]:
    """Every parameter or gradient, whole, under each of its names."""
    return {name: _whole(tensor) for name, tensor in _tensors(model, grads).items()}


def _whole(tensor: Any) -> Any:
    if not any(type(placement).__name__ == "_StridedShard" for placement in getattr(tensor, "placements", ())):
        return tensor.full_tensor() if hasattr(tensor, "placements") else tensor
    # A weight sharded in interleaved pieces: every rank's rows, put back where they came from
    local = tensor.to_local().contiguous()
    places = torch.arange(tensor.numel(), dtype=torch.int64).reshape(tensor.shape)
    mine = slice_of(tensor, places).contiguous()
    group = tensor.device_mesh.get_group()
    pieces = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    where = [torch.empty_like(mine) for _ in pieces]
    dist.all_gather(pieces, local, group=group)
    dist.all_gather(where, mine, group=group)
    whole = torch.zeros(tensor.numel(), dtype=local.dtype)
    for piece, place in zip(pieces, where, strict=True):
        whole[place.flatten()] = piece.flatten()
    return whole.reshape(tensor.shape)


# What another library's context parallelism computes of a model, on simulated ranks: accelerate's hooks over torch's
# `context_parallel`.
#
# That exchanges keys and values inside of calls of attention, and nothing else: each rank runs the model's own code on
# some of the positions. So do the ranks here, and at each such call they gather what torch's ring would pass round.
# Where logits come out otherwise than on one device, the calls of both runs are held against each other, one after the
# other: the first value that differs at a rank's own positions was made by a call that reads other positions, or counts
# them.

RANKS = 2
LENGTH = 16  # in twice as many pieces as ranks: one from the front and one from the back, as torch deals them out
ALLOWED = 1e-4  # of the largest value; in single precision
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_TORCH, _HERE = str(Path(torch.__file__).parent), __file__


class _NotExchanged(Exception):
    """torch refuses this call of attention."""


@dataclass(frozen=True)
class Outcome:
    """`error`: the largest of the logits, as a part of the largest logit; None where it cannot be run, and `why`.
    `attends`: how often attention was called. `first`: the first value that differs: what made it, in which module,
    where that is written."""

    error: float | None
    why: str = ""
    attends: int = 0
    first: str = ""


@dataclass(frozen=True)
class _Made:
    """One call, and what of its results depends on parameters."""

    name: str
    module: str
    place: str
    values: tuple[torch.Tensor, ...]


class _Run(TorchFunctionMode):
    """Writes each call down; with `positions` of all ranks attention reads the keys and values of all of them."""

    def __init__(self, model: nn.Module, rank: int = 0, positions: torch.Tensor | None = None) -> None:
        super().__init__()
        self.calls: list[_Made] = []
        self.attends, self.rank, self.positions = 0, rank, positions
        self.modules = [""]
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self.modules.append(name))
            module.register_forward_hook(lambda *_: self.modules.__delitem__(-1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attends = func is F.scaled_dot_product_attention
        self.attends += attends
        exchanged = attends and self.positions is not None
        result = self._attend(args, kwargs) if exchanged else func(*args, **kwargs)
        results = tuple(t.detach().clone() for _, t in flatten_tensors(result) if t.requires_grad)
        if results:
            name = str(resolve_name(func) or getattr(func, "__name__", func)).removeprefix("torch.")
            self.calls.append(_Made(name, self.modules[-1], _place(), results))
        return result

    def _attend(self, args: Any, kwargs: Any) -> torch.Tensor:
        arguments = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        query, key, value = (arguments[name] for name in _ARGUMENTS[:3])
        if arguments.get("attn_mask") is not None:
            raise _NotExchanged("attention is given a mask, which torch's ring attention does not support")
        if not arguments.get("is_causal"):
            raise _NotExchanged("attention is not causal, which torch's load balancing does not support")
        assert self.positions is not None
        if query.shape[-2] != key.shape[-2] or key.shape[-2] != self.positions.shape[1]:
            raise _NotExchanged("queries and keys have a different length than a rank's positions")
        keys, values = (_of_all_ranks(piece) for piece in (key, value))
        mask = self.positions[self.rank][:, None] >= self.positions.flatten()[None, :]
        more = {name: arguments[name] for name in ("scale", "enable_gqa") if name in arguments}
        attended: torch.Tensor = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **more)
        return attended


def _of_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().contiguous()
    parts = [torch.empty_like(plain) for _ in range(RANKS)]
    dist.all_gather(parts, plain)
    return torch.cat(parts, -2)


def _place() -> str:
    """The line of the code that is not torch's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def outcome_of(model: nn.Module, feed: Mapping[str, Any]) -> Outcome | None:
    """Return the error of the logits on ranks that each hold some of the positions; None if the call does not run or
    the model returns none. `feed`: of sequences of `LENGTH`."""
    model = copied(model).eval()
    cast_numbers(model, torch.float32)  # which models are written for
    feed = with_all_positions(model, inputs_in(torch.float32, feed), LENGTH)
    switch = conventions().cache_switch
    feed |= {switch: False} if switch in inspect.signature(model.forward).parameters else {}
    whole = copied(model)
    alone = _Run(whole)
    try:
        with alone:
            want = getattr(whole(**feed), conventions().logits, None)
    except Exception:  # someone else's forward may raise anything: of this call nothing is known
        return None
    if not isinstance(want, torch.Tensor) or want.dim() < 2 or want.shape[1] != LENGTH:
        return None
    positions = torch.arange(LENGTH).view(2 * RANKS, -1)
    own = torch.stack([torch.cat([positions[rank], positions[-1 - rank]]) for rank in range(RANKS)])
    copies = [copied(model) for _ in range(RANKS)]

    def on_rank(rank: int) -> tuple[torch.Tensor, _Run]:
        attach = context_hooks()
        assert attach is not None, "also requested earlier"
        attach(copies[rank])
        run = _Run(copies[rank], rank, own)
        cut = {name: _own(value, own[rank]) for name, value in feed.items()}
        with run:
            return getattr(copies[rank](**cut), conventions().logits).detach(), run

    try:
        ran = run_ranks(on_rank, RANKS)
    except Exception as error:  # what the hook, torch or the model's own code raises on some positions is the finding
        cause = error.cause if isinstance(error, RankError) and isinstance(error.cause, Exception) else error
        return Outcome(None, str(cause) if isinstance(cause, _NotExchanged) else said(cause), alone.attends)
    largest = largest_of(want)
    errors = [error_of(got, want.detach()[:, own[rank]], largest) for rank, (got, _) in enumerate(ran)]
    worst = max(range(RANKS), key=lambda rank: errors[rank])
    if errors[worst] <= ALLOWED:
        return Outcome(errors[worst], attends=alone.attends)
    first = _first_difference(alone.calls, ran[worst][1].calls, own[worst])
    return Outcome(errors[worst], attends=alone.attends, first=first)


def _own(value: Any, own: torch.Tensor) -> Any:
    cut = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == LENGTH
    return value[:, own].clone() if cut else value


def _first_difference(whole: list[_Made], cut: list[_Made], own: torch.Tensor) -> str:
    """Calls of whose results none depends on a parameter are not compared: positions are counted otherwise there."""
    for call, other in zip(whole, cut, strict=False):
        where = f"{call.name} in {call.module or 'the model'} ({call.place})"
        if call.name != other.name:
            return f"{where}, where a rank calls {other.name}"
        for want, got in zip(call.values, other.values, strict=False):
            if want.dim() != got.dim():
                return where
            for dim, (all_of, some) in enumerate(zip(want.shape, got.shape, strict=True)):
                if (all_of, some) == (LENGTH, len(own)):
                    want = want.index_select(dim, own)
            if want.shape != got.shape or (largest := largest_of(want)) and error_of(got, want, largest) > ALLOWED:
                return where
    return ""
