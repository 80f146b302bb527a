"""One question: the mesh, and how a step is run on it. What cannot be answered is refused when it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoplan.common.errors import AutoplanError
from autoplan.common.options import DataParallel, Request, check_argument, check_count
from autoplan.forecast.optimizers import OPTIMIZERS
from autoplan.forecast.step import Loss
from autoplan.values.estimate import TRAIN

CACHE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}  # bytes of a key's or a value's number


@dataclass(frozen=True)
class Asked:
    """See `estimate`."""

    mesh: tuple[tuple[str, int], ...]
    batch: int = 1
    sequence: int = 2048
    activation_checkpointing: Request = False
    mp_policy: Any = None
    optimizer: str = "adamw"
    train: str = "full"
    reshard_after_forward: bool | None = None
    sequence_parallel: bool = False
    accumulate: int = 1
    gather_logits: bool = False
    exact: bool = True  # record at this very batch, rather than read it off two smaller ones
    experts: bool = False  # whole ones on the ranks of tp
    updates: bool = True  # look at the optimizer's step as well
    loss: Loss | None = None
    cpu_offload: bool = False
    concurrency: int = 0  # sequences whose keys and values are held; 0: those of the batch
    cache_dtype: str | None = None
    chunked_loss: bool = False  # logits are there for a chunk of tokens at a time
    matmuls: str | None = None  # of layers in blocks: "fp8"; None: in the dtype of the step
    exchange_experts: int = 1  # data-parallel ranks that hold whole experts and exchange tokens
    shard_optimizer: bool = False  # over the ranks of dp_replicate

    def __post_init__(self) -> None:
        if self.train not in TRAIN:
            raise AutoplanError(f"train={self.train!r}", hint=f"choose one of {', '.join(TRAIN)}")
        if not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZERS:
            raise AutoplanError(f"optimizer={self.optimizer!r}", hint=f"choose one of {', '.join(OPTIMIZERS)}")
        for name in ("batch", "sequence", "accumulate"):
            check_count(name, getattr(self, name))
        if self.sequence < 2:
            raise AutoplanError(f"sequence={self.sequence}", hint="a sequence has two tokens at least")
        for name in ("sequence_parallel", "experts", "updates", "cpu_offload", "shard_optimizer", "chunked_loss"):
            check_argument(name, getattr(self, name), bool, "choose True or False")
        if self.concurrency != 0 or isinstance(self.concurrency, bool):
            check_count("concurrency", self.concurrency)
        if self.cache_dtype is not None and self.cache_dtype not in tuple(CACHE_DTYPES):
            raise AutoplanError(f"cache_dtype={self.cache_dtype!r}", hint=f"choose one of {', '.join(CACHE_DTYPES)}")
        if (self.concurrency or self.cache_dtype) and self.train != "inference":
            raise AutoplanError(f"a cache with train={self.train!r}", hint='keys and values are held by "inference"')
        if 0 < self.concurrency < self.batch:
            raise AutoplanError(
                f"concurrency={self.concurrency} with batch={self.batch}", hint="the batch is among the sequences held"
            )
        self._check_what_others_run()
        if self.cpu_offload and not self.data_parallel:
            raise AutoplanError(
                f"cpu_offload=True on {dict(self.mesh)} with train={self.train!r}",
                hint="FSDP2 offloads what it shards in training: give a mesh with dp_shard",
            )
        DataParallel(mp_policy=self.mp_policy, reshard_after_forward=self.reshard_after_forward)
        if self.reshard_after_forward is not None:
            check_argument("reshard_after_forward", self.reshard_after_forward, bool,
                           "estimates know of None, True and False")  # fmt: skip
        if self.loss is not None and not callable(self.loss):
            raise AutoplanError(f"loss={self.loss!r}", hint="give a function of outputs and labels")

    def _check_what_others_run(self) -> None:
        if self.matmuls not in (None, "fp8"):
            raise AutoplanError(f"matmuls={self.matmuls!r}", hint='choose "fp8", or leave it out')
        check_count("exchange_experts", self.exchange_experts)
        ranks, others = self.exchange_experts, self.ep
        if ranks > 1 and (self.shards % ranks or others > 1 or not self.data_parallel):
            raise AutoplanError(
                f"exchange_experts={ranks} on {dict(self.mesh)}" + (f" with ep {others}" if others > 1 else ""),
                hint="give a mesh with a dp_shard that is divisible by it, and no ep",
            )
        if self.shard_optimizer and (self.shards > 1 or self.size("dp_replicate") == 1 or self.train == "inference"):
            raise AutoplanError(
                f"shard_optimizer=True on {dict(self.mesh)} with train={self.train!r}",
                hint="it is sharded over the ranks of dp_replicate, in training, with dp_shard=1",
            )
        if self.chunked_loss and (self.loss is not None or self.train == "inference"):
            raise AutoplanError(
                "chunked_loss=True with a loss of your own, or none", hint="it prices the loss that the model computes"
            )
        if self.shard_optimizer and self.mp_policy:
            raise AutoplanError(
                f"mp_policy={self.mp_policy!r} with shard_optimizer=True",
                hint='FSDP2 casts, plain data parallelism does not: say weights="bfloat16", optimizer="adamw_master"',
            )

    @property
    def run_by(self) -> str:
        """Whose engine runs what autoplan does not, and the price is of."""
        engines = []
        if self.stages > 1:
            engines.append(f"a pipeline of {self.stages} stages: torchtitan or Megatron-LM")
        if self.exchange_experts > 1:
            engines.append(f"experts on {self.exchange_experts} ranks that exchange tokens: torchtitan or Megatron-LM")
        if self.shard_optimizer:
            engines.append("states sharded over dp_replicate: torch's ZeroRedundancyOptimizer, Megatron-LM")
        if self.matmuls:
            engines.append("products in float8: torchao or Transformer Engine")
        if self.chunked_loss:
            engines.append("a loss in chunks: torchtune, Liger, or a loop with vocab_parallel_logprobs_from_hidden")
        return "; ".join(engines)

    @property
    def summed_once(self) -> bool:
        """Are weights gathered, and gradients summed, once a step rather than in each micro-batch?"""
        return self.stages > 1 or self.shard_optimizer

    @property
    def stages(self) -> int:
        return self.size("pp")

    @property
    def copies(self) -> int:
        """Of the model; each takes other sequences."""
        return self.ranks // (self.size("tp") * self.size("ep") * self.stages)

    def size(self, *names: str) -> int:
        return next((size for name, size in self.mesh if name in names), 1)

    @property
    def ep(self) -> int:
        return self.size("tp") if self.experts else self.size("ep")

    @property
    def ranks(self) -> int:
        total = 1
        for _, size in self.mesh:
            total *= size
        return total

    @property
    def shards(self) -> int:
        return self.size("dp_shard", "dp", "fsdp", "dp_shard_cp")

    @property
    def data_parallel(self) -> bool:
        known = ("dp_shard", "dp", "fsdp", "dp_shard_cp")
        return self.train != "inference" and any(name in known for name, _ in self.mesh)
