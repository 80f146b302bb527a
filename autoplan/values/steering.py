"""What of a plan steers how a model runs, as one digest: two plans of one digest do the same to a model.

Texts for people (reasons, findings, costs) are not in it. Ranks compare digests, and a plan file holds the digest of
the plan as it was made: after an edit it is another one (check/audit/edited.py).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from autoplan.values.plain import plain
from autoplan.values.plan import Plan

__all__ = ["digest", "steering"]

_LENGTH = 16  # hexadecimal digits


def steering(plan: Plan) -> dict[str, Any]:
    """Everything that decides what happens to a model, by its place in a plan file."""
    made_for = plan.made_for
    return {
        "tp_size": plan.tp_size,
        "ep_size": plan.ep_size,
        "sequence_parallel": plan.sequence_parallel,
        "entries": [
            {"pattern": e.pattern, "parameters": list(e.parameters), "style": e.style, "segments": list(e.segments)}
            for e in plan.entries
        ],
        "layers": [plain(stack) for stack in plan.layers],
        "runtime": plain(plan.runtime, brief=True),
        "packed": plain(plan.packed, brief=True),
        "made_for": {"forwards": plain(made_for.forwards), "sizes": plain(made_for.sizes)},
    }


def digest(plan: Plan) -> str:
    """A short hash of all of it, and of the ways that a sharded model is held against."""
    said = {**steering(plan), **({"paths": plain(plan.paths)} if plan.paths else {})}
    text = json.dumps(said, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]
