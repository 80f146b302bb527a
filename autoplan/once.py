"""A plan made by one rank and handed to all others, which all turn out to hold the same model.

The problem: a thousand ranks that all plan do the same work a thousand times, and one that reads another config, or
runs another version, makes another plan without knowing. So one rank plans; a few bytes of each rank say whether all of
them hold the same model and want the same; and what is sent is the plan as a file holds it, compressed.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

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
    """`autoplan.plan` on the first rank of `group` (of all ranks by default), its plan on every rank.

    Every rank calls it, with its own model and the same `wishes`, which are those of `autoplan.plan`. Raises on all
    ranks where some hold another model or want something else, and where the first cannot plan. Without a process group
    it is `autoplan.plan`.
    """
    if not dist.is_initialized():
        return plan(model, tp_size, **wishes)
    ranks = group.get_group() if isinstance(group, DeviceMesh) else group
    sent: list[Any] = [None]
    with fail_together(_voters(ranks), "plan_once"):
        # A few digits of the model, the wishes and the versions
        if isinstance(model, nn.Module):
            tensors = [(name, list(tensor.shape)) for name, tensor in model.named_parameters()]
            said = f"{type(model).__qualname__} {model_hash(model)} {tensors}"
        else:
            said = str(model.to_dict() if hasattr(model, "to_dict") else model)
        plain = {name: value for name, value in wishes.items() if name not in ("inputs", "cache", "rules")}
        asked = sorted((name, str(value)) for name, value in plain.items())
        text = f"{__version__} {installed_versions()} {said} {tp_size} {asked}"
        mine = hashlib.sha256(text.encode()).hexdigest()[:16]
        meet(
            Alike(
                mine,
                "some ranks hold another model, another version or other wishes than the rest, among them rank "
                f"{dist.get_rank()}",
                "build the same model from the same config on every rank, and pass the same arguments to plan_once",
            )
        )
        if dist.get_rank(ranks) == 0:
            sent = [packed_plan(plan(model, tp_size, **wishes))]
        meet()  # the others wait here: whatever goes wrong, they are told
        dist.broadcast_object_list(sent, group=ranks, group_src=0)
        return unpacked_plan(sent[0])


def _voters(ranks: dist.ProcessGroup | None) -> Voters:
    everyone = Voters.everyone()
    return everyone if ranks is None else Voters((RankGroup.of(ranks),), everyone.device)


def packed_plan(made: Plan) -> bytes:
    """A plan as bytes: what a plan file holds, compressed."""
    return zlib.compress(json.dumps(plan_to_dict(made), ensure_ascii=False, separators=(",", ":")).encode(), 6)


def unpacked_plan(data: bytes) -> Plan:
    """The inverse of `packed_plan`."""
    return plan_from_dict(parse_plain(zlib.decompress(data).decode(), "json", _SENT, NotPlain()), _SENT)
