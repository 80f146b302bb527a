"""A plan made by one rank and handed to all others, which all turn out to hold the same model.

The problem: a thousand ranks that all plan do the same work a thousand times, and one that reads another config, or
runs another version, makes another plan without knowing. So one rank plans; a few bytes of each rank say whether all of
them hold the same model and want the same; and what is sent is the plan as a file holds it, compressed.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.api import plan
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.files.plain import NotPlain, parse_plain
from autoplan.common.requirements import installed_versions
from autoplan.decide.written_plans.plan_file import plan_from_dict, plan_to_dict
from autoplan.execute.fits import model_hash
from autoplan.hf.source import Model
from autoplan.values import Plan
from autoplan.version import __version__

_SENT = "the plan of another rank"

__all__ = ["packed_plan", "plan_once", "unpacked_plan"]


def plan_once(
    model: Model, tp_size: int = 1, *, group: dist.ProcessGroup | DeviceMesh | None = None, **wishes: Any
) -> Plan:
    """`autoplan.plan` on the first rank of `group` (of all ranks by default), its plan on every rank.

    Every rank calls it, with its own model and the same `wishes`, which are those of `autoplan.plan`. Raises on all
    ranks where some hold another model or want something else, and where the first cannot plan. Without a process group
    it is `autoplan.plan`.
    """
    if not dist.is_initialized():
        return plan(model, tp_size, **wishes)
    ranks = group.get_group() if isinstance(group, DeviceMesh) else group
    _refuse_differing(_fingerprint(model, tp_size, wishes), ranks)
    sent: list[Any] = [None]
    if dist.get_rank(ranks) == 0:
        try:
            sent = [packed_plan(plan(model, tp_size, **wishes))]
        except BaseException as error:  # the others wait: they are told, whatever it was
            told = error.message if isinstance(error, AutoplanError) else f"{type(error).__name__}: {error}"
            dist.broadcast_object_list([(told, getattr(error, "hint", ""))], group=ranks, group_src=0)
            raise
    dist.broadcast_object_list(sent, group=ranks, group_src=0)
    if isinstance(sent[0], tuple):
        message, hint = sent[0]
        raise AutoplanError(f"the rank that plans for all could not: {message}", hint=hint)
    return unpacked_plan(sent[0])


def packed_plan(made: Plan) -> bytes:
    """A plan as bytes: what a plan file holds, compressed."""
    return zlib.compress(json.dumps(plan_to_dict(made), ensure_ascii=False, separators=(",", ":")).encode(), 6)


def unpacked_plan(data: bytes) -> Plan:
    """The inverse of `packed_plan`."""
    return plan_from_dict(parse_plain(zlib.decompress(data).decode(), "json", _SENT, NotPlain()), _SENT)


def _fingerprint(model: Model, tp_size: int, wishes: dict[str, Any]) -> str:
    """A few digits of the model, the wishes and the versions."""
    if isinstance(model, nn.Module):
        tensors = [(name, list(tensor.shape)) for name, tensor in model.named_parameters()]
        said = f"{type(model).__qualname__} {model_hash(model)} {tensors}"
    else:
        said = str(model.to_dict() if hasattr(model, "to_dict") else model)
    plain = {name: value for name, value in wishes.items() if name not in ("inputs", "cache", "rules")}
    asked = sorted((name, str(value)) for name, value in plain.items())
    text = f"{__version__} {installed_versions()} {said} {tp_size} {asked}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _refuse_differing(mine: str, ranks: dist.ProcessGroup | None) -> None:
    """Every rank sees what all of them say, so all of them raise."""
    said: list[Any] = [None] * dist.get_world_size(ranks)
    dist.all_gather_object(said, mine, group=ranks)
    if len(set(said)) > 1:
        most = Counter(said).most_common(1)[0][0]
        apart = [rank for rank, one in enumerate(said) if one != most]
        shown = ", ".join(map(str, apart[:8])) + (f" and {len(apart) - 8} more" if len(apart) > 8 else "")
        raise PlanMismatchError(
            f"ranks {shown} of {len(said)} hold another model, another version or other wishes than the rest",
            hint="build the same model from the same config on every rank, and pass the same arguments to plan_once",
        )
