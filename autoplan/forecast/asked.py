"""The mesh and how a step is run on it; what cannot be answered is refused here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.errors import AutoplanError
from autoplan.common.options import (
    MOST_RANKS,
    DataParallel,
    Request,
    check_argument,
    check_context_size,
    check_count,
    check_expert_size,
)
from autoplan.common.patterns import matches
from autoplan.emit.words import bytes_text
from autoplan.execute.data_parallel.mesh_dims import ALIASES, LEFT_ALONE
from autoplan.forecast.step import Loss, Setting, Steps, inputs_of, size_priced
from autoplan.forecast.trained import OPTIMIZERS
from autoplan.values.estimate import TRAIN

_HINT = "write it like dp_shard=8,tp=8"


def mesh_sizes(
    mesh: DeviceMesh | Mapping[str, int] | str, *, priced: tuple[str, ...] = ()
) -> tuple[tuple[str, int], ...]:
    """Return (("dp_shard", 8), ("tp", 8)) of a mesh, a dict, or "dp_shard=8,tp=8". `priced`: dims that others run."""
    if isinstance(mesh, DeviceMesh):
        sizes = tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    elif isinstance(mesh, Mapping):
        for name, size in mesh.items():
            check_argument("a name of a mesh dim", name, str, 'write the mesh like {"dp_shard": 8, "tp": 8}')
            check_count(f"mesh[{name!r}]", size)
        sizes = tuple(mesh.items())
    else:
        check_argument("mesh", mesh, str, "pass a DeviceMesh, a dict of sizes, or text like dp_shard=8,tp=8")
        sizes = tuple(_parsed(mesh, part) for part in mesh.split(","))
    _check(sizes, priced)
    return sizes


def _parsed(mesh: str, part: str) -> tuple[str, int]:
    name, _, size = (text.strip() for text in part.partition("="))
    if not (size.isascii() and size.isdigit() and len(size) < 9) or int(size) < 1:
        raise AutoplanError(f"the mesh {mesh!r}: the size of {name!r} must be a whole number from 1 on", hint=_HINT)
    return name, int(size)


def check_experts(sizes: tuple[tuple[str, int], ...], ep: int) -> None:
    """Raise where the ranks that experts are to be placed on are neither those of tp nor those of a dim ep."""
    mesh = dict(sizes)
    tp, own = mesh.get("tp", 1), mesh.get("ep", 1)
    check_expert_size(tp, ep)
    if tp == 1 and ep not in (1, own):
        raise AutoplanError(f"ep_size={ep} on the mesh {mesh}", hint=f"add the dim ep={ep} to the mesh")


def _check(sizes: tuple[tuple[str, int], ...], priced: tuple[str, ...]) -> None:
    """Raise for what `parallelize` would refuse and for what is not supported in estimates."""
    names = [name for name, _ in sizes]
    _refuse(not names, "the mesh has no dims", "for one rank write dp_shard=1")
    for purpose, aliases in ALIASES.items():
        same = [name for name in names if name in aliases]
        _refuse(len(same) > 1, f"the mesh dims {', '.join(same)} could all be {purpose!r}", "name one of them")
    mesh_dims = (*(name for aliases in ALIASES.values() for name in aliases), "cp", *priced)
    for name, size in sizes:
        _refuse(size > 1 and name in LEFT_ALONE and name not in (*priced, "cp"),
                f"the mesh dim {name!r} is not supported in estimates", "omit it, and describe one stage")  # fmt: skip
        _refuse(size > 1 and name not in mesh_dims, f"the mesh dim {name!r} of {size} ranks has no known purpose",
                f"known are {', '.join(mesh_dims)}")  # fmt: skip
    purposes = {purpose: size for purpose, aliases in ALIASES.items() for name, size in sizes if name in aliases}
    replicas, tp, ep = (purposes.get(purpose, 1) for purpose in ("dp_replicate", "tp", "ep"))
    _refuse(replicas > 1 and "dp_shard" not in purposes,
            "the mesh has 'dp_replicate' and no dim to shard over", "add dp_shard=1, or more")  # fmt: skip
    _refuse(tp > 1 and ep > 1, f"the mesh has {tp} 'tp' ranks and {ep} 'ep' ranks",
            "experts are placed on the tp ranks (ep_size=), or on ranks of their own with tp=1")  # fmt: skip
    check_context_size(dict(sizes).get("cp", 1), tp, ep)
    shard = next((name for name in names if name in ALIASES["dp_shard"]), None)
    _refuse("cp" in names and shard is not None and names.index("cp") != names.index(shard) + 1,
            f"the mesh has separate dims {shard!r} and 'cp', but parameters are sharded over both",
            f"put 'cp' right after {shard!r}")  # fmt: skip
    ranks = prod(size for _, size in sizes)
    _refuse(ranks > MOST_RANKS, f"the mesh has {ranks} ranks", f"the limit is {MOST_RANKS}")


def _refuse(when: Any, what: str, hint: str) -> None:
    if when:
        raise AutoplanError(what, hint=hint)


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
    compiled: bool = False  # elementwise ops between products are one kernel
    gradient_sync: str = "each"  # "last": earlier micro-batches keep unsharded gradients
    virtual_stages: int = 1  # pieces of the model that a rank of the pipeline has

    def __post_init__(self) -> None:
        _refuse(self.train not in TRAIN, f"train={self.train!r}", f"choose one of {', '.join(TRAIN)}")
        is_known = isinstance(self.optimizer, str) and self.optimizer in OPTIMIZERS
        _refuse(not is_known, f"optimizer={self.optimizer!r}", f"choose one of {', '.join(OPTIMIZERS)}")
        for name in ("batch", "sequence", "accumulate"):
            check_count(name, getattr(self, name))
        _refuse(self.sequence < 2, f"sequence={self.sequence}", "a sequence has at least two tokens")
        for name in ("sequence_parallel", "experts", "updates", "cpu_offload", "shard_optimizer", "chunked_loss",
                     "compiled"):  # fmt: skip
            check_argument(name, getattr(self, name), bool, "choose True or False")
        mesh = dict(self.mesh)
        _refuse(self.cp > 1 and self.train == "inference",
                f"train='inference' on {mesh}: context parallelism is priced only for training",
                "shard the model over tp, using that dim instead of cp")  # fmt: skip
        if self.concurrency != 0 or isinstance(self.concurrency, bool):
            check_count("concurrency", self.concurrency)
        _refuse(self.cache_dtype is not None and self.cache_dtype not in tuple(CACHE_DTYPES),
                f"cache_dtype={self.cache_dtype!r}", f"choose one of {', '.join(CACHE_DTYPES)}")  # fmt: skip
        passed = f"concurrency={self.concurrency}" if self.concurrency else "a cache dtype"
        _refuse((self.concurrency or self.cache_dtype) and self.train != "inference",
                f"{passed} with train={self.train!r}", 'only "inference" has a KV cache')  # fmt: skip
        _refuse(0 < self.concurrency < self.batch,
                f"{passed} with batch={self.batch}", "concurrency must be at least batch")  # fmt: skip
        self._check_what_others_run()
        _refuse(self.cpu_offload and not self.data_parallel, f"cpu_offload=True on {mesh} with train={self.train!r}",
                "FSDP2 offloads its shards in training: use a mesh with dp_shard")  # fmt: skip
        DataParallel(mp_policy=self.mp_policy, reshard_after_forward=self.reshard_after_forward)
        if self.reshard_after_forward is not None:
            check_argument("reshard_after_forward", self.reshard_after_forward, bool,
                           "estimates support None, True and False")  # fmt: skip
        _refuse(self.loss is not None and not callable(self.loss),
                f"loss={self.loss!r}", "pass a function of outputs and labels")  # fmt: skip

    def _check_what_others_run(self) -> None:
        _refuse(self.matmuls not in (None, "fp8"), f"matmuls={self.matmuls!r}", 'choose "fp8", or omit it')
        sync, mesh, still = self.gradient_sync, dict(self.mesh), self.train == "inference"
        _refuse(sync not in ("each", "last"), f"gradient_sync={sync!r}", 'choose "each" or "last"')
        check_count("exchange_experts", self.exchange_experts)
        check_count("virtual_stages", self.virtual_stages)
        _refuse(self.virtual_stages > 1 and (self.stages == 1 or self.accumulate % self.stages),
                f"virtual_stages={self.virtual_stages} on {mesh} with {self.accumulate} micro-batches",
                "it needs a dim pp, and a number of micro-batches (accumulate) that its size divides")  # fmt: skip
        ranks, others = self.exchange_experts, self.ep
        _refuse(ranks > 1 and (self.shards % ranks or others > 1 or not self.data_parallel),
                f"exchange_experts={ranks} on {mesh}" + (f" with ep {others}" if others > 1 else ""),
                "use a mesh whose dp_shard is divisible by it, without ep")  # fmt: skip
        _refuse(self.shard_optimizer and (self.shards > 1 or self.size("dp_replicate") == 1 or still),
                f"shard_optimizer=True on {mesh} with train={self.train!r}",
                "it is sharded over dp_replicate, in training, with dp_shard=1")  # fmt: skip
        _refuse(self.chunked_loss and self.cp > 1,
                f"chunked_loss=True on {mesh}: each cp rank has logits of its own positions only",
                "omit one of them")  # fmt: skip
        _refuse(self.chunked_loss and (self.loss is not None or still),
                "chunked_loss=True with a custom loss, or none",
                "it prices the loss that the model computes")  # fmt: skip
        _refuse(self.shard_optimizer and self.cpu_offload,
                "cpu_offload=True with shard_optimizer=True", "FSDP2 offloads, ZeRO-1 does not")  # fmt: skip
        _refuse(self.shard_optimizer and self.mp_policy, f"mp_policy={self.mp_policy!r} with shard_optimizer=True",
                'FSDP2 casts, plain data parallelism does not: pass weights="bfloat16", '
                'optimizer="adamw_master"')  # fmt: skip

    @property
    def run_by(self) -> str:
        """Return whose engine runs what is priced and autoplan does not run."""
        engines = []
        if self.stages > 1:
            each = f", {self.virtual_stages} on each rank" if self.virtual_stages > 1 else ""
            stages = self.stages * self.virtual_stages
            who = "vLLM or SGLang" if self.train == "inference" else "torchtitan or Megatron-LM"
            engines.append(f"a pipeline of {stages} stages{each}: {who}")
        if self.exchange_experts > 1:
            engines.append(f"experts on {self.exchange_experts} ranks that exchange tokens: torchtitan or Megatron-LM")
        if self.shard_optimizer:
            engines.append("states sharded over dp_replicate: torch's ZeroRedundancyOptimizer, Megatron-LM")
        if self.matmuls:
            engines.append("matmuls in float8: torchao or Transformer Engine")
        if self.chunked_loss:
            engines.append("a loss in chunks: torchtune, Liger, or a loop with vocab_parallel_logprobs_from_hidden")
        return "; ".join(engines)

    @property
    def how(self) -> tuple[str, ...]:
        """Return what was requested besides sizes, dtypes and the optimizer, as text."""
        again = self.activation_checkpointing if self.train != "inference" else False
        dtype = "bfloat16" if self.mp_policy in ("bf16", True) else getattr(self.mp_policy, "param_dtype", None)
        texts = {
            f"{self.accumulate} micro-batches a step": self.accumulate > 1,
            f"checkpointing {'blocks' if again is True else again}": again,
            "sequence parallel": self.sequence_parallel and self.size("tp") > 1,
            "experts apart": self.experts and self.size("tp") > 1,
            f"computed in {str(dtype).removeprefix('torch.')}" if dtype else "mixed precision":
                self.mp_policy and self.data_parallel,
            f"{'' if self.reshard_after_forward else 'no '}reshard after forward":
                self.reshard_after_forward is not None and self.data_parallel,
            "gradients summed with the last micro-batch": self.summed_late,
            "logits gathered": self.gather_logits and self.size("tp") > 1,
            "with the loss that was given": self.loss is not None and self.train != "inference",
            "a loss in chunks": self.chunked_loss,
            "compiled (memory as if not)": self.compiled,
            "offloaded to the host": self.cpu_offload,
            f"matmuls in {self.matmuls}": self.matmuls,
            f"experts exchanged among {self.exchange_experts} ranks": self.exchange_experts > 1,
            "states sharded over dp_replicate": self.shard_optimizer,
            f"{self.virtual_stages} stages on each rank of pp": self.virtual_stages > 1,
            f"keys and values in {self.cache_dtype}": self.cache_dtype,
        }  # fmt: skip
        return tuple(text for text, applies in texts.items() if applies)

    @property
    def unused(self) -> tuple[str, ...]:
        """Return what was requested but has no effect on such a step."""
        still, alone = self.train == "inference", not self.data_parallel
        untrained, unsharded = "nothing is trained", "the mesh has no dim of data parallelism"
        why = untrained if still else unsharded
        texts = {
            f"optimizer={self.optimizer}: {untrained}": still and self.optimizer != "adamw",
            f"checkpointing: {untrained}": still and self.activation_checkpointing,
            f"loss: {untrained}": still and self.loss is not None,
            f"mixed precision: {why}": self.mp_policy and alone,
            f"reshard_after_forward: {why}": self.reshard_after_forward is not None and alone,
            f"gradient_sync=last: {why if still or alone else 'a step has one micro-batch'}":
                self.gradient_sync == "last" and not self.summed_late,
            "sequence_parallel: the mesh has no tp": self.sequence_parallel and self.size("tp") == 1,
        }  # fmt: skip
        return tuple(text for text, applies in texts.items() if applies)

    @property
    def summed_once(self) -> bool:
        """Return whether weights are gathered and gradients summed once per step, not per micro-batch."""
        return self.stages > 1 or self.shard_optimizer

    @property
    def summed_late(self) -> bool:
        """Return whether gradients of earlier micro-batches wait unsharded (`set_requires_gradient_sync(False)`)."""
        return self.gradient_sync == "last" and self.data_parallel and self.accumulate > 1

    @property
    def stages(self) -> int:
        return self.size("pp")

    @property
    def waiting(self) -> float:
        """Return the most micro-batches that wait for backward, besides one: of 1F1B, or of its interleaved form."""
        first, pieces = self.stages - 1, self.virtual_stages
        ahead = first if pieces == 1 else (2 * first + (pieces - 1) * self.stages) / pieces
        return min(ahead, self.accumulate - 1)

    @property
    def copies(self) -> int:
        """Return the number of copies of the model; each takes other sequences."""
        return self.ranks // (self.size("tp") * self.size("ep") * self.cp * self.stages)

    def size(self, *names: str) -> int:
        return next((size for name, size in self.mesh if name in names), 1)

    @property
    def ep(self) -> int:
        return self.size("tp") if self.experts else self.size("ep")

    @property
    def cp(self) -> int:
        return self.size("cp")

    @property
    def ranks(self) -> int:
        return prod(size for _, size in self.mesh)

    @property
    def shards(self) -> int:
        """Ranks that FSDP2 shards over: with context parallelism those of both dims."""
        return self.size("dp_shard", "dp", "fsdp", "dp_shard_cp") * self.cp

    @property
    def data_parallel(self) -> bool:
        dims = ("dp_shard", "dp", "fsdp", "dp_shard_cp")
        return self.train != "inference" and any(name in dims for name, _ in self.mesh)


# Where the question that is priced differs from the one that was asked


def not_applied(steps: Steps, setting: Setting) -> dict[str, str]:
    """Return what of the requested parallelism the plan does not apply, with its sentence."""
    if setting.ep == 1 and not setting.sequence_parallel:
        return {}
    plan = steps.plan(setting.tp, setting.ep, setting.sequence_parallel, setting.cp)
    kinds = {"experts": "experts apart", "sequence": "sequence parallel"}
    return {kinds[f.check]: f.message for f in plan.findings if f.level == "warn" and f.check in kinds}


def how_priced(steps: Steps, question: Asked, setting: Setting) -> tuple[str, ...]:
    """Return what was requested besides sizes, dtypes and the optimizer, as far as the plan applies it."""
    missing = not_applied(steps, setting)
    return tuple(text for text in question.how if text not in missing)


def notes_on_question(
    steps: Steps, question: Asked, setting: Setting, pairs: Mapping[str, float], most: int = 0
) -> Iterator[str]:
    """Yield what the step has of the values of sequence × sequence that the plan names (`pairs`: see `Tape`), and where
    the priced question differs from the requested one, or its size exceeds the config's. Raise where one such value
    exceeds `most` bytes."""
    size = setting.tp, setting.ep, setting.sequence_parallel, setting.cp
    for finding in steps.plan(*size).findings if pairs else ():
        largest = max((held for name, held in pairs.items() if matches(finding.where, name)), default=0.0)
        if finding.kind == "pairs" and largest:
            text = f"{finding.where}: {finding.message}; in this step {bytes_text(int(largest))}"
            if 0 < most < largest:
                hint = "load the model with fused attention (sdpa), or take shorter sequences"
                raise AutoplanError(f"{text}, and the device has {bytes_text(most)}", hint=hint)
            yield text
    positions, (batch, tokens) = steps.check_length(question.sequence), size_priced(steps, setting)
    if 0 < positions < tokens:
        yield f"{tokens:,} tokens exceed the config's {positions:,} positions: it runs, but was not trained for that"
    if not tokens:
        yield f"the inputs have no token dim: sequence={question.sequence} has no effect, and speed is in samples"
    if batch != question.batch or tokens not in (0, question.sequence):
        yield (f"{question.batch} × {question.sequence} tokens were requested, but inputs of that size cannot be made; "
               f"all figures are for {batch} × {tokens or 'samples'}")  # fmt: skip
    users = steps.inputs if steps.inputs is not None else steps.source.inputs
    example = {} if users is not None else inputs_of(steps, replace(setting, batch=1))
    sizes = {name: value.shape for name, value in example.items() if getattr(value, "is_floating_point", bool)()}
    if sizes:
        shapes = ", ".join(f"{name} of {' × '.join(map(str, shape))}" for name, shape in sizes.items())
        yield f"{'each sequence comes with' if tokens else 'a sample is'} {shapes}"
    yield from (f"no effect: {text}" for text in (*question.unused, *not_applied(steps, setting).values()))
