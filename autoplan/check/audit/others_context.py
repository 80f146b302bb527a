"""What another library's context parallelism computes of a model, on simulated ranks: accelerate's hooks over torch's
`context_parallel`.

That exchanges keys and values inside of calls of attention, and nothing else: each rank runs the model's own code on
some of the positions. So do the ranks here, and at each such call they gather what torch's ring would pass round. Where
logits come out otherwise than on one device, the calls of both runs are held against each other, one after the other:
the first value that differs at a rank's own positions was made by a call that reads other positions, or counts them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from autoplan.capture.copies import copied
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.check.verify.compare import error_of, largest_of
from autoplan.check.verify.on_ranks import said
from autoplan.common.conventions import conventions
from autoplan.common.nested import flatten_tensors
from autoplan.common.random_values import cast_numbers, inputs_in
from autoplan.hf.own_sharding import context_hooks, with_all_positions

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
        kept = tuple(one.detach().clone() for _, one in flatten_tensors(result) if one.requires_grad)
        if kept:
            name = str(resolve_name(func) or getattr(func, "__name__", func)).removeprefix("torch.")
            self.calls.append(_Made(name, self.modules[-1], _place(), kept))
        return result

    def _attend(self, args: Any, kwargs: Any) -> torch.Tensor:
        given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        query, key, value = (given[name] for name in _ARGUMENTS[:3])
        if given.get("attn_mask") is not None:
            raise _NotExchanged("attention is given a mask, which torch's ring does not take")
        if not given.get("is_causal"):
            raise _NotExchanged("attention is not causal, which torch refuses where it balances the load")
        assert self.positions is not None
        if query.shape[-2] != key.shape[-2] or key.shape[-2] != self.positions.shape[1]:
            raise _NotExchanged("queries and keys are of other lengths than a rank has positions")
        keys, values = (_of_all_ranks(one) for one in (key, value))
        mask = self.positions[self.rank][:, None] >= self.positions.flatten()[None, :]
        more = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
        found: torch.Tensor = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **more)
        return found


def _of_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    given = tensor.detach().contiguous()
    parts = [torch.empty_like(given) for _ in range(RANKS)]
    dist.all_gather(parts, given)
    return torch.cat(parts, -2)


def _place() -> str:
    """The line of the code that is not torch's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename == _HERE or frame.f_code.co_filename.startswith(_TORCH)
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def outcome_of(model: nn.Module, feed: Mapping[str, Any]) -> Outcome | None:
    """What logits come to on ranks that each have some of the positions; None where the call does not run, or the model
    returns none. `feed`: of sequences of `LENGTH`."""
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
        assert attach is not None, "asked for before"
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
    for one, other in zip(whole, cut, strict=False):
        where = f"{one.name} in {one.module or 'the model'} ({one.place})"
        if one.name != other.name:
            return f"{where}, where a rank calls {other.name}"
        for want, got in zip(one.values, other.values, strict=False):
            if want.dim() != got.dim():
                return where
            for dim, (all_of, some) in enumerate(zip(want.shape, got.shape, strict=True)):
                if (all_of, some) == (LENGTH, len(own)):
                    want = want.index_select(dim, own)
            if want.shape != got.shape or (largest := largest_of(want)) and error_of(got, want, largest) > ALLOWED:
                return where
    return ""
