"""autoplan reads a model it has never seen and writes the plan that parallelises it.

    plan = autoplan.plan("llama", tp_size=8)
    model = autoplan.parallelize(model, mesh, plan)

Names are loaded on first use: importing the package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoplan import conveniences as _conveniences  # noqa: F401 - implements methods of plans
from autoplan.common.errors import (
    AutoplanError,
    CaptureError,
    IndivisibleError,
    OutsideError,
    PlanFileError,
    PlanMismatchError,
    PlanRefusedError,
    SourceError,
    UnprovenPlanWarning,
    UntestedVersionWarning,
)
from autoplan.deprecated import Renamed, successor
from autoplan.values import (
    Change,
    Cost,
    CutsOf,
    Drawn,
    Entry,
    Fed,
    Finding,
    FlowPart,
    MadeFor,
    Obstacle,
    Plan,
    Proof,
    Replicated,
    Report,
    Runtime,
    Stack,
    Traffic,
    Trial,
)
from autoplan.values.estimate import Estimate, MemoryParts, Sent, StepTime
from autoplan.values.quantised import PackedWeight
from autoplan.version import __version__

if TYPE_CHECKING:
    from autoplan.api import fx_graph, parallelize, plan
    from autoplan.check.audit import audit
    from autoplan.check.verify.verify import verify
    from autoplan.common.options import Checkpointing, DataParallel, Keywords, Options, TensorParallel, Wish
    from autoplan.decide.written_plans.plan_file import load_plan
    from autoplan.decide.written_plans.read import PlanSource, register_plan
    from autoplan.emit.exports.export import Exported
    from autoplan.emit.exports.expressible import ExportError
    from autoplan.emit.pages.markup import WhatIf
    from autoplan.execute.collectives import RankGroup
    from autoplan.execute.data_parallel.gradients import clip_gradients, global_norm, to_local, unshard
    from autoplan.execute.data_parallel.megatron import MegatronCall, megatron_call
    from autoplan.execute.parameters.buffers import full_tensors, rebuild_buffers
    from autoplan.execute.quantised.modules import packed_model
    from autoplan.execute.tensor_parallel import Applied, applied
    from autoplan.execute.vocabulary.logprobs import (
        gather_logits,
        vocab_parallel_logprobs,
        vocab_parallel_logprobs_from_hidden,
    )
    from autoplan.execute.vocabulary.own_batch import shard_batch
    from autoplan.execute.vocabulary.sampling import (
        TopLogits,
        vocab_parallel_argmax,
        vocab_parallel_gather,
        vocab_parallel_sample,
        vocab_parallel_topk,
    )
    from autoplan.execute.vocabulary.shards import (
        Ranks,
        vocab_parallel_cross_entropy,
        vocab_parallel_entropy,
    )
    from autoplan.execute.weights.load import load_weights
    from autoplan.execute.weights.save import save_weights
    from autoplan.forecast.choose import Choice, choose
    from autoplan.forecast.devices import Device
    from autoplan.forecast.dry_run import DryRun, dry_run
    from autoplan.forecast.estimate import estimate
    from autoplan.frameworks import hand_over
    from autoplan.hf.source import Model
    from autoplan.hf.stacks import layers
    from autoplan.once import plan_once

__all__ = [
    "Applied",
    "AutoplanError",
    "CaptureError",
    "Change",
    "Checkpointing",
    "Choice",
    "Cost",
    "CutsOf",
    "DataParallel",
    "Device",
    "Drawn",
    "DryRun",
    "Entry",
    "Estimate",
    "ExportError",
    "Exported",
    "Fed",
    "Finding",
    "FlowPart",
    "IndivisibleError",
    "Keywords",
    "MadeFor",
    "MegatronCall",
    "MemoryParts",
    "Model",
    "Obstacle",
    "Options",
    "OutsideError",
    "PackedWeight",
    "Plan",
    "PlanFileError",
    "PlanMismatchError",
    "PlanRefusedError",
    "PlanSource",
    "Proof",
    "RankGroup",
    "Ranks",
    "Replicated",
    "Report",
    "Runtime",
    "Sent",
    "SourceError",
    "Stack",
    "StepTime",
    "TensorParallel",
    "TopLogits",
    "Traffic",
    "Trial",
    "UnprovenPlanWarning",
    "UntestedVersionWarning",
    "WhatIf",
    "Wish",
    "__version__",
    "applied",
    "audit",
    "choose",
    "clip_gradients",
    "dry_run",
    "estimate",
    "full_tensors",
    "fx_graph",
    "gather_logits",
    "global_norm",
    "hand_over",
    "layers",
    "load_plan",
    "load_weights",
    "megatron_call",
    "packed_model",
    "parallelize",
    "plan",
    "plan_once",
    "rebuild_buffers",
    "register_plan",
    "save_weights",
    "shard_batch",
    "to_local",
    "unshard",
    "verify",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_gather",
    "vocab_parallel_logprobs",
    "vocab_parallel_logprobs_from_hidden",
    "vocab_parallel_sample",
    "vocab_parallel_topk",
]

_RENAMED: dict[str, Renamed] = {}  # names that were replaced since a release
_HOMES = {
    "Choice": "autoplan.forecast.choose",
    "Device": "autoplan.forecast.devices",
    "DryRun": "autoplan.forecast.dry_run",
    "RankGroup": "autoplan.execute.collectives",
    "ExportError": "autoplan.emit.exports.expressible",
    "Exported": "autoplan.emit.exports.export",
    "Keywords": "autoplan.common.options",
    "Model": "autoplan.hf.source",
    "PlanSource": "autoplan.decide.written_plans.read",
    "Ranks": "autoplan.execute.vocabulary.shards",
    "Checkpointing": "autoplan.common.options",
    "DataParallel": "autoplan.common.options",
    "Options": "autoplan.common.options",
    "TensorParallel": "autoplan.common.options",
    "WhatIf": "autoplan.emit.pages.markup",
    "Wish": "autoplan.common.options",
    "Applied": "autoplan.execute.tensor_parallel",
    "applied": "autoplan.execute.tensor_parallel",
    "audit": "autoplan.check.audit",
    "choose": "autoplan.forecast.choose",
    "dry_run": "autoplan.forecast.dry_run",
    "estimate": "autoplan.forecast.estimate",
    "clip_gradients": "autoplan.execute.data_parallel.gradients",
    "full_tensors": "autoplan.execute.parameters.buffers",
    "fx_graph": "autoplan.api",
    "gather_logits": "autoplan.execute.vocabulary.logprobs",
    "global_norm": "autoplan.execute.data_parallel.gradients",
    "hand_over": "autoplan.frameworks",
    "layers": "autoplan.hf.stacks",
    "load_plan": "autoplan.decide.written_plans.plan_file",
    "load_weights": "autoplan.execute.weights.load",
    "MegatronCall": "autoplan.execute.data_parallel.megatron",
    "megatron_call": "autoplan.execute.data_parallel.megatron",
    "packed_model": "autoplan.execute.quantised.modules",
    "parallelize": "autoplan.api",
    "plan": "autoplan.api",
    "plan_once": "autoplan.once",
    "rebuild_buffers": "autoplan.execute.parameters.buffers",
    "register_plan": "autoplan.decide.written_plans.read",
    "save_weights": "autoplan.execute.weights.save",
    "shard_batch": "autoplan.execute.vocabulary.own_batch",
    "to_local": "autoplan.execute.data_parallel.gradients",
    "unshard": "autoplan.execute.data_parallel.gradients",
    "verify": "autoplan.check.verify.verify",
    "vocab_parallel_argmax": "autoplan.execute.vocabulary.sampling",
    "vocab_parallel_cross_entropy": "autoplan.execute.vocabulary.shards",
    "vocab_parallel_entropy": "autoplan.execute.vocabulary.shards",
    "vocab_parallel_gather": "autoplan.execute.vocabulary.sampling",
    "vocab_parallel_logprobs": "autoplan.execute.vocabulary.logprobs",
    "vocab_parallel_logprobs_from_hidden": "autoplan.execute.vocabulary.logprobs",
    "vocab_parallel_topk": "autoplan.execute.vocabulary.sampling",
    "TopLogits": "autoplan.execute.vocabulary.sampling",
    "vocab_parallel_sample": "autoplan.execute.vocabulary.sampling",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None and (now := successor(name, _RENAMED)) is not None:
        return globals().get(now) or __getattr__(now)
    if home is None:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
