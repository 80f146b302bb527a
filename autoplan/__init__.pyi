from autoplan.api import fx_graph as fx_graph, parallelize as parallelize, plan as plan
from autoplan.check.audit import audit as audit
from autoplan.check.verify.verify import verify as verify
from autoplan.common.errors import (
    AutoplanError as AutoplanError,
    CaptureError as CaptureError,
    IndivisibleError as IndivisibleError,
    OutsideError as OutsideError,
    PlanFileError as PlanFileError,
    PlanMismatchError as PlanMismatchError,
    PlanRefusedError as PlanRefusedError,
    SourceError as SourceError,
    UnprovenPlanWarning as UnprovenPlanWarning,
    UntestedVersionWarning as UntestedVersionWarning,
)
from autoplan.common.options import (
    Checkpointing as Checkpointing,
    DataParallel as DataParallel,
    Keywords as Keywords,
    Options as Options,
    TensorParallel as TensorParallel,
    Wish as Wish,
)
from autoplan.decide.written_plans.plan_file import load_plan as load_plan
from autoplan.decide.written_plans.read import PlanSource as PlanSource, register_plan as register_plan
from autoplan.emit.exports.export import Exported as Exported
from autoplan.emit.exports.expressible import ExportError as ExportError
from autoplan.emit.pages.markup import WhatIf as WhatIf
from autoplan.execute.collectives import RankGroup as RankGroup
from autoplan.execute.data_parallel.gradients import (
    clip_gradients as clip_gradients,
    global_norm as global_norm,
    to_local as to_local,
    unshard as unshard,
)
from autoplan.execute.parallelize import MegatronCall as MegatronCall, megatron_call as megatron_call
from autoplan.execute.parameters.buffers import full_tensors as full_tensors, rebuild_buffers as rebuild_buffers
from autoplan.execute.quantised.modules import packed_model as packed_model
from autoplan.execute.tensor_parallel import Applied as Applied, applied as applied
from autoplan.execute.vocabulary.logprobs import (
    gather_logits as gather_logits,
    vocab_parallel_logprobs as vocab_parallel_logprobs,
    vocab_parallel_logprobs_from_hidden as vocab_parallel_logprobs_from_hidden,
)
from autoplan.execute.vocabulary.own_positions import shard_batch as shard_batch
from autoplan.execute.vocabulary.sampling import (
    TopLogits as TopLogits,
    vocab_parallel_argmax as vocab_parallel_argmax,
    vocab_parallel_gather as vocab_parallel_gather,
    vocab_parallel_sample as vocab_parallel_sample,
    vocab_parallel_topk as vocab_parallel_topk,
)
from autoplan.execute.vocabulary.shards import (
    Ranks as Ranks,
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
    vocab_parallel_entropy as vocab_parallel_entropy,
)
from autoplan.execute.weights.load import load_weights as load_weights
from autoplan.execute.weights.save import save_weights as save_weights
from autoplan.forecast.choose import Choice as Choice, choose as choose
from autoplan.forecast.devices import Device as Device
from autoplan.forecast.dry_run import DryRun as DryRun, dry_run as dry_run
from autoplan.forecast.estimate import estimate as estimate
from autoplan.frameworks import hand_over as hand_over
from autoplan.hf.source import Model as Model
from autoplan.hf.stacks import layers as layers
from autoplan.once import plan_once as plan_once
from autoplan.values import (
    Change as Change,
    Cost as Cost,
    CutsOf as CutsOf,
    Drawn as Drawn,
    Entry as Entry,
    Fed as Fed,
    Finding as Finding,
    FlowPart as FlowPart,
    MadeFor as MadeFor,
    Obstacle as Obstacle,
    Plan as Plan,
    Proof as Proof,
    Replicated as Replicated,
    Report as Report,
    Runtime as Runtime,
    Stack as Stack,
    Traffic as Traffic,
    Trial as Trial,
)
from autoplan.values.estimate import (
    Estimate as Estimate,
    MemoryParts as MemoryParts,
    Sent as Sent,
    StepTime as StepTime,
)
from autoplan.values.quantised import PackedWeight as PackedWeight
from autoplan.version import __version__ as __version__
