"""A plan that one rank makes for all others, which must hold the same model.

The problem: a thousand ranks that all plan do the same work a thousand times, and a rank that reads another config, or
runs another version, unknowingly makes another plan. So one rank plans; a few bytes of each rank tell whether all of
them hold the same model and ask for the same; and the plan is sent as in a plan file, compressed.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from autoplan.api import plan
from autoplan.common.files.plain import NotPlain, parse_plain
from autoplan.common.requirements import installed_versions
from autoplan.decide.written_plans.plan_file import plan_from_dict, plan_to_dict
from autoplan.execute.agreement import Alike, Voters, fail_together, meet
from autoplan.execute.collectives import RankGroup
from autoplan.execute.fits import model_hash
from autoplan.hf.source import Model
from autoplan.values import Plan
from autoplan.version import __version__

_SENT = "the plan of another rank"


def plan_once(
    model: Model, tp_size: int = 1, *, group: dist.ProcessGroup | DeviceMesh | None = None, **wishes: Any
) -> Plan:
    """Run `autoplan.plan` on the first rank of `group` (by default of all ranks), and return its plan on every rank.

    Every rank calls it, with its own model and the same `wishes`, which are arguments of `autoplan.plan`. Raise on all
    ranks if some hold another model or other arguments, or if the first cannot plan. Without a process group it is
    `autoplan.plan`.
    """
    if not dist.is_initialized():
        return plan(model, tp_size, **wishes)
    ranks = group.get_group() if isinstance(group, DeviceMesh) else group
    sent: list[Any] = [None]
    with fail_together(_voters(ranks), "plan_once"):
        # A digest of the model, the wishes and the versions.
        if isinstance(model, nn.Module):
            tensors = [(name, [] if is_lazy(p) else list(p.shape)) for name, p in model.named_parameters()]
            description = f"{type(model).__qualname__} {model_hash(model)} {tensors}"
        else:
            description = str(model.to_dict() if hasattr(model, "to_dict") else model)
        plain = {name: value for name, value in wishes.items() if name not in ("inputs", "cache", "rules")}
        arguments = sorted((name, str(value)) for name, value in plain.items())
        text = f"{__version__} {installed_versions()} {description} {tp_size} {arguments}"
        mine = hashlib.sha256(text.encode()).hexdigest()[:16]
        meet(
            Alike(
                mine,
                f"some ranks, among them rank {dist.get_rank()}, have a different model, version or arguments",
                "build the same model from the same config on every rank, and pass the same arguments to plan_once",
            )
        )
        if dist.get_rank(ranks) == 0:
            sent = [packed_plan(plan(model, tp_size, **wishes))]
        meet()  # the others wait here, and learn of any failure
        dist.broadcast_object_list(sent, group=ranks, group_src=0)
        return unpacked_plan(sent[0])


def _voters(ranks: dist.ProcessGroup | None) -> Voters:
    everyone = Voters.everyone()
    return everyone if ranks is None else Voters((RankGroup.of(ranks),), everyone.device)


def packed_plan(made: Plan) -> bytes:
    """Return a plan as bytes: the contents of a plan file, compressed."""
    return zlib.compress(json.dumps(plan_to_dict(made), ensure_ascii=False, separators=(",", ":")).encode(), 6)


def unpacked_plan(data: bytes) -> Plan:
    """Return the plan of `packed_plan`'s bytes."""
    return plan_from_dict(parse_plain(zlib.decompress(data).decode(), "json", _SENT, NotPlain()), _SENT)
