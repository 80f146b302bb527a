"""autoplan reads a model it has never seen and writes the plan that parallelises it.

    plan = autoplan.plan("llama", tp_size=8)
    model = autoplan.parallelize(model, mesh, plan)

Names are loaded on first use: importing the package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoplan.errors import AutoplanError
from autoplan.values import Change, Entry, Finding, Plan, Proof, Report, Stack
from autoplan.version import __version__

if TYPE_CHECKING:
    from autoplan.api import parallelize, plan
    from autoplan.check.audit import audit
    from autoplan.check.verify import verify
    from autoplan.emit.plan_file import load_plan
    from autoplan.execute.gather import full_tensors
    from autoplan.execute.gradients import clip_gradients, global_norm, to_local, unshard
    from autoplan.execute.losses import vocab_parallel_cross_entropy, vocab_parallel_entropy, vocab_parallel_logprobs
    from autoplan.execute.parallelize import Applied, applied
    from autoplan.execute.sampling import vocab_parallel_argmax, vocab_parallel_sample
    from autoplan.execute.weights import load_weights
    from autoplan.stacks import layers

__all__ = [
    "Applied",
    "AutoplanError",
    "Change",
    "Entry",
    "Finding",
    "Plan",
    "Proof",
    "Report",
    "Stack",
    "__version__",
    "applied",
    "audit",
    "clip_gradients",
    "full_tensors",
    "global_norm",
    "layers",
    "load_plan",
    "load_weights",
    "parallelize",
    "plan",
    "to_local",
    "unshard",
    "verify",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_logprobs",
    "vocab_parallel_sample",
]

_HOMES = {
    "Applied": "autoplan.execute.parallelize",
    "applied": "autoplan.execute.parallelize",
    "audit": "autoplan.check.audit",
    "clip_gradients": "autoplan.execute.gradients",
    "full_tensors": "autoplan.execute.gather",
    "global_norm": "autoplan.execute.gradients",
    "layers": "autoplan.stacks",
    "load_plan": "autoplan.emit.plan_file",
    "load_weights": "autoplan.execute.weights",
    "parallelize": "autoplan.api",
    "plan": "autoplan.api",
    "to_local": "autoplan.execute.gradients",
    "unshard": "autoplan.execute.gradients",
    "verify": "autoplan.check.verify",
    "vocab_parallel_argmax": "autoplan.execute.sampling",
    "vocab_parallel_cross_entropy": "autoplan.execute.losses",
    "vocab_parallel_entropy": "autoplan.execute.losses",
    "vocab_parallel_logprobs": "autoplan.execute.losses",
    "vocab_parallel_sample": "autoplan.execute.sampling",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
