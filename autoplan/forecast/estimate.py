"""What one step costs on one rank of a mesh: memory at its peak, messages, operations, seconds.

estimate ── Steps.at (a recording) ── Walk (memory, messages of data parallelism) ── tally ── step time ── Estimate
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError, SourceError
from autoplan.common.options import Request
from autoplan.common.random_values import working_dtype
from autoplan.execute.data_parallel.fsdp import default_precision
from autoplan.forecast.asked import CACHE_DTYPES, Asked, check_experts, how_priced, mesh_sizes, notes_on_question
from autoplan.forecast.devices import Device, load_device
from autoplan.forecast.memory import DataRanks, Walk, alike, held_bytes
from autoplan.forecast.sharded import UnitSize
from autoplan.forecast.step import Loss, Setting, Steps, size_priced
from autoplan.forecast.steptime import (
    HIDDEN,
    HOST_LINK,
    HOST_MEMORY,
    Load,
    decoding_time,
    exchanged,
    in_float8,
    one_stage,
    step_time,
    unread,
    zero_1,
)
from autoplan.forecast.trained import LORA_RANK, OPTIMIZERS, Optimizer, check_adapters, targets_of
from autoplan.hf.source import Model, resolve
from autoplan.values import Plan
from autoplan.values.estimate import Estimate, MemoryParts

_CHUNKS = 8  # of a sequence: torchtune's default
_PASSING = (
    "layers with a sliding window cache its tokens alone; {:.2f} GiB of those before, of the prompts that are read, "
    "are held until the next token, and counted as temporary"
)
_BARS = (
    ("memory", 0.05, "torch's MemTracker on the sharded model without storage; excludes allocator overhead. On a GPU, "
     "up to 13 % more was measured where attention biases are trained (T5)"),
    ("messages", 0.0, "counted on ranks that communicate by gloo"),
    ("flops", 0.02, "torch's formulas for each op that ran"),
    ("time", 0.4, "a roofline from data sheets, without kernel launches; compared with published layouts "
     "(docs/estimate.md)"),
)  # fmt: skip


def estimate(
    model: Model | Plan,
    *,
    mesh: DeviceMesh | Mapping[str, int] | str,
    batch: int = 1,
    sequence: int = 2048,
    activation_checkpointing: Request = False,
    mp_policy: MixedPrecisionPolicy | str | bool | None = None,
    optimizer: str = "adamw",
    train: str = "full",
    lora_rank: int = LORA_RANK,
    lora_targets: str | Sequence[str] | None = None,
    lora_dropout: float = 0.0,
    lora_dtype: str = "float32",
    reshard_after_forward: bool | None = None,
    cpu_offload: bool = False,
    sequence_parallel: bool = False,
    ep_size: int = 1,
    gather_logits: bool = False,
    accumulate: int = 1,
    loss: Loss | None = None,
    concurrency: int = 0,
    cache_dtype: str | None = None,
    chunked_loss: bool = False,
    matmuls: str | None = None,
    gradient_sync: str = "each",
    exchange_experts: int = 1,
    shard_optimizer: bool = False,
    virtual_stages: int = 1,
    compiled: bool = False,
    device: str | Device = "h100",
    plan: Plan | None = None,
    inputs: Mapping[str, Any] | None = None,
    weights: str | None = None,
    trust_remote_code: bool = False,
) -> Estimate:
    """Memory, messages, operations and seconds of one step of `model` on one rank of `mesh`. Needs no GPU, no weights.

    `batch`: sequences that a rank takes at once, `accumulate` times a step. `train`: "full", "lora" (what is not
    frozen; where nothing is, adapters of `lora_rank` are put beside `lora_targets`: endings of names, "all-linear", or
    as peft chooses for the type of the model; `lora_dropout` drops what goes into them; `lora_dtype`: float32, as peft
    casts them, or that of the "model"), "inference" (a forward that keeps its keys and values). `weights`: as
    the checkpoint stores them, where that is not what the config says: a dtype, or "fp8", "nf4", "mxfp4", "awq" and
    the like. `concurrency`: for inference, the sequences whose keys and values are held, each `sequence` long, while
    `batch` prompts are read; `cache_dtype`: "fp8" and the like, where these are held otherwise than computed.
    `matmuls`: "fp8" prices the products of layers in blocks at the device's rate of float8.
    `gradient_sync`: "last" sums gradients with the last micro-batch; those of earlier ones wait unsharded
    (FSDP2's `set_requires_gradient_sync(False)`). `exchange_experts`: whole experts lie on
    so many of the ranks of dp_shard, which exchange tokens. `shard_optimizer`: its states are sharded over
    dp_replicate. `virtual_stages`: pieces of the model that each rank of `pp` has (interleaved 1F1B). These and a
    dim `pp` are run by others; the estimate says by whom (`run_by`). `compiled`: elementwise
    ops between products are one kernel each; memory is that of a step that is not compiled.
    `chunked_loss`: the head and the model's loss run over an eighth of the tokens at a time, so that logits are never
    whole.
    `inputs`: the kinds of arguments; their sizes are `batch` and `sequence`. The other keywords are those of
    `parallelize`. `loss(outputs, labels)` is yours, where the model's own, from labels, is not what you train with:
    what it keeps is much of the peak. A step runs on a folded copy without storage: what is estimated is what is run.

    A `Plan` in the place of the model needs `plan.model` to say where it is (a folder, a type, a hub id); plans that
    autoplan made name the class: give the model itself, and `plan=`.
    """
    passed = model if isinstance(model, Plan) else plan
    named = model.model if isinstance(model, Plan) else model
    module, dot, cls = model.model.rpartition(".") if isinstance(model, Plan) else ("", "", "")
    if dot and cls[:1].isupper() and all(part.isidentifier() for part in module.split(".")):  # no folder, no colon
        hint = "estimate(model, plan=plan, …), with the model, its config, or the folder that was planned"
        raise SourceError(f"the plan names the class {module}.{cls}, but not where its config is", hint=hint)
    check_adapters(train, lora_rank, lora_targets, lora_dropout, lora_dtype)
    rank = lora_rank if train == "lora" else 0
    source = resolve(named, trust_remote_code=trust_remote_code, inputs=inputs)
    source = source if weights is None else source.stored_as(weights)
    steps = Steps(source, passed, inputs, rank, targets_of(lora_targets), lora_dropout, lora_dtype)
    sizes = mesh_sizes(mesh, priced=("pp",))
    tp = dict(sizes).get("tp", 1)
    check_experts(sizes, ep_size)
    question = Asked(sizes, batch, sequence, activation_checkpointing, mp_policy, optimizer, train,
                  reshard_after_forward, sequence_parallel, accumulate, gather_logits, experts=ep_size == tp > 1,
                  loss=loss, cpu_offload=cpu_offload, concurrency=concurrency, cache_dtype=cache_dtype,
                  chunked_loss=chunked_loss, matmuls=matmuls, gradient_sync=gradient_sync,
                  exchange_experts=exchange_experts, shard_optimizer=shard_optimizer,
                  virtual_stages=virtual_stages, compiled=compiled)  # fmt: skip
    on = device if isinstance(device, Device) else load_device(device)
    return estimate_with(steps, question, on, most=on.memory)


def estimate_with(steps: Steps, question: Asked, device: Device, most: int = 0) -> Estimate:
    """The estimate from recordings that may be there already. `most`: bytes for one value of sequence × sequence."""
    policy = _policy(question, steps)
    training = question.train != "inference"
    setting = Setting(
        question.size("tp"), question.ep, question.sequence_parallel, question.activation_checkpointing,
        gather_logits=question.gather_logits, batch=question.batch, sequence=question.sequence, training=training,
        compute=policy.param_dtype if policy else None, output=policy.output_dtype if policy else None,
        loss=question.loss, cp=question.cp, averaged=question.cp > 1 and question.data_parallel,
    )  # fmt: skip
    steps.check_length(question.sequence)
    recorded = one_stage(steps.at(setting) if question.exact else steps.scaled(setting), question.stages)
    batch, tokens = size_priced(steps, setting)
    data = _data(question, policy)
    units = tuple(_as_stored(steps, recorded.units, training))
    weights = held_bytes(units, data) + recorded.buffers
    trained = held_bytes(units, data, trained=True) if training else 0
    states = _states(units, data, OPTIMIZERS[question.optimizer]) if training else 0
    states = -(-states // question.size("dp_replicate")) if question.shard_optimizer else states
    late = data.on and (question.stages > 1 or question.summed_late)
    wide = OPTIMIZERS[question.optimizer].gradient if training and not data.on else 0  # buffers, there from the start
    gradients = wide * sum(p.elements for u in units for p in u.parameters if p.trained) if wide else trained
    waits = sum(map(data.reduced, units)) if late else gradients  # for the last micro-batch
    standing = MemoryParts(weights=weights, optimizer=states,
                           gradients=waits if question.accumulate > 1 or wide else 0)  # fmt: skip
    walk = Walk(recorded.program, recorded.left_out, units, data, standing)
    peak = walk.run()
    if question.chunked_loss:  # memory is that of one chunk; operations and messages are those of all
        part = one_stage(steps.scaled(replace(setting, chunk=_chunk(steps, question))), question.stages)
        small = Walk(part.program, part.left_out, units, data, standing)
        peak, walk.moments, walk.waiting = small.run(), small.moments, small.waiting
    parts = MemoryParts(**{**peak.parts, "overhead": device.overhead(sum(size > 1 for _, size in question.mesh))})
    unpacked = max((p.elements * p.size for unit in units for p in unit.parameters if p.packed), default=0)
    waiting = int(question.waiting * walk.waiting) if training else 0
    parts = replace(parts, temporary=parts.temporary + unpacked, kept=parts.kept + waiting)
    passing, whole, others = 0, 0.0, 0.0
    if not training:  # other sequences are held at full length, those of the batch as far as they are at the peak
        lasts = walk.lasts or walk.live["kept"]
        whole = lasts * _cache_share(question, steps)
        others = max(0, question.concurrency - batch) * whole / batch
        passing = max(0, parts.kept - lasts)  # in front of a sliding window, until the next token
        parts = replace(parts, temporary=parts.temporary + passing, kept=0,
                        cache=int((parts.kept - passing) * _cache_share(question, steps) + others))  # fmt: skip
    where, phase = peak.where, peak.phase
    stepping = _optimizer_step(units, data, weights, states, question) if training else MemoryParts()
    stepping = replace(stepping, overhead=parts.overhead, gradients=gradients)
    if question.updates and stepping.total > parts.total:
        parts, where, phase = stepping, "the optimizer's step", "optimizer"
    once = (*walk.messages(), *exchanged(walk, units, question.exchange_experts))
    once = (*once, *zero_1(units, trained)) if question.shard_optimizer else once
    summed = [question.summed_once or question.summed_late and s.kind != "all-gather" for s in once]
    times = [1 if few and s.dim in HIDDEN else question.accumulate for few, s in zip(summed, once, strict=True)]
    sent = tuple(replace(s, number=s.number * n, bytes=s.bytes * n) for s, n in zip(once, times, strict=True))
    copies = question.copies
    ahead = walk.ahead / max(1, sum(walk.flops.values()))
    host = replace(data, offload=False)
    pieces = (held_bytes(units, host), held_bytes(units, host, trained=True)) if question.cpu_offload else (0, 0)
    flops = in_float8(walk, device) if question.matmuls else walk.flops
    moved = walk.fused if question.compiled else walk.moved
    load = Load(tuple(flops.items()), moved, once, trained, ahead, walk.messages("forward"), *pieces)
    decoded, sequences = 0.0, max(batch, question.concurrency)
    if question.concurrency and not whole:
        text = f"concurrency={question.concurrency}: {steps.source.name} has no cache of keys and values"
        raise AutoplanError(text, hint="omit it")
    if tokens and whole:
        share = sequences / (batch * tokens)
        read = weights - unread(walk, units, share) + int(whole + others)
        matrices = sum(len(p.shape) > 1 for unit in units for p in unit.parameters)
        seconds = decoding_time(load, device, question.mesh, read, share, matrices)
        decoded = sequences * copies / (question.stages * seconds)
    time = step_time(load, device, question.mesh, question.accumulate, question.stages,
                     summed_once=question.summed_once, waiting=waits if question.summed_late else 0,
                     pieces=question.virtual_stages)  # fmt: skip
    return Estimate(
        model=steps.source.name, mesh=question.mesh, batch=batch, sequence=tokens, train=question.train,
        parts=parts, where=where, phase=phase, messages=sent, flops=load.flops * question.accumulate,
        time=time, device=device.name, bars=_BARS,
        tokens=batch * max(1, tokens) * question.accumulate * copies,
        moments=tuple((*where, size + parts.overhead) for where, size in walk.moments.items()),
        notes=(*notes_on_question(steps, question, setting, recorded.program.pairs, most),
               *((_PASSING.format(passing / 2**30),) if passing > parts.cache >> 8 else ()),
               *_notes(steps, question, setting, recorded.kernels, units, load.flops)),
        dtype=steps.dtype, dtype_origin=steps.source.dtype_origin, stored=_stored(steps, units),
        optimizer=question.optimizer if training else "", decoded_per_second=decoded,
        concurrency=sequences if whole else 0, matmuls=question.matmuls or "", run_by=question.run_by,
        how=how_priced(steps, question, setting),
    )  # fmt: skip


def _chunk(steps: Steps, question: Asked) -> int:
    """Tokens of each sequence in a chunk."""
    names = conventions()
    taken = inspect.signature(steps.module.forward).parameters
    if names.last_logits not in taken or names.targets not in taken:
        text = f"chunked_loss=True: {steps.source.name} cannot compute logits of some tokens only"
        raise AutoplanError(text, hint="pass loss=, a function of outputs and labels")
    return max(1, question.sequence // _CHUNKS)


def _cache_share(question: Asked, steps: Steps) -> float:
    """Bytes of a number in the cache, of those that it is computed in."""
    if question.cache_dtype is None:
        return 1.0
    return CACHE_DTYPES[question.cache_dtype] / working_dtype(steps.module).itemsize


def _same_tokens(steps: Steps, question: Asked, setting: Setting, flops: int) -> str:
    """Return the cost in operations if all ranks of ep take the same tokens."""
    ranks = question.size("ep")
    alone = replace(setting, ep=1)
    recorded = steps.scaled(alone)
    walk = Walk(recorded.program, recorded.left_out, recorded.units, DataRanks(), MemoryParts())
    walk.run()
    more = flops * ranks / max(1, sum(walk.flops.values()))
    return (
        f"the {ranks} ep ranks process the same tokens: everything except experts is computed {ranks} times, "
        f"{more:.1f} times the operations of ranks that exchange tokens"
    )


def _notes(
    steps: Steps, question: Asked, setting: Setting, kernels: tuple[str, ...], units: tuple[UnitSize, ...], flops: int
) -> tuple[str, ...]:  # fmt: skip
    notes = [*_quantised_note(steps, units)]
    if steps.adapters:
        targets = steps.lora_targets if isinstance(steps.lora_targets, str) else ", ".join(steps.lora_targets or ())
        dropout = f"; dropout {steps.lora_dropout:g}" if steps.lora_dropout else ""
        if steps.dtype in ("bfloat16", "float16"):
            dropout += "; in float32" if steps.lora_dtype == "float32" else "; in the model's dtype"
        layers = f"{steps.adapters} linear layer{'s' * (steps.adapters > 1)}"
        notes.append(f"no parameter of the model is frozen: adapters of rank {steps.lora_rank} were added to {layers} "
                     f"({targets}{dropout}), and the rest was frozen")  # fmt: skip
    lora = (steps.lora_rank, steps.lora_targets, steps.lora_dropout, steps.lora_dtype)
    if steps.lora_rank and not steps.adapters and lora != (LORA_RANK, None, 0, "float32"):
        text = "no effect: rank, targets, dropout and dtype of adapters; the model has trainable parameters of its own"
        notes.append(text)
    if kernels:
        text = f"with the fused kernels of {', '.join(kernels)}: their plain torch references would save far more"
        notes.append(text)
    if question.train == "inference" and question.shards > 1:
        notes.append(f"inference does not gather: each of the {question.shards} data-parallel ranks holds all weights")
    if question.cpu_offload:
        notes.append(
            "cpu_offload: parameters, gradients and states are in host memory; times assume "
            f"{HOST_LINK / 1e9:.0f} GB/s to it and {HOST_MEMORY / 1e9:.0f} GB/s of it for each rank"
        )
    if question.train != "inference" and OPTIMIZERS[question.optimizer].paged:
        notes.append(f"{question.optimizer}: its states are counted in host memory, where they go when the GPU is full")
    if question.size("ep") > 1:
        notes.append(_same_tokens(steps, question, setting, flops))
    tp = question.size("tp")
    legal = steps.plan(tp, question.ep, question.sequence_parallel).legal_tp if tp > 1 else ()
    if legal and tp not in legal:
        notes.append(f"tp {tp} does not divide all that can be sharded; valid sizes: {', '.join(map(str, legal))}")
    return tuple(notes)


def _as_stored(steps: Steps, units: tuple[UnitSize, ...], training: bool) -> Iterator[UnitSize]:
    """Quantised weights as the checkpoint holds them, scales included, where they are not trained."""
    shares = {weight.name: weight.bytes / weight.elements for weight in steps.packed}
    for unit in units:
        stored = (replace(p, packed=None if training and p.trained else shares.get(p.name)) for p in unit.parameters)
        yield replace(unit, parameters=tuple(stored)) if shares else unit


def _stored(steps: Steps, units: tuple[UnitSize, ...]) -> str:
    """The format that most of the weights counted as quantised are stored in."""
    counted = {p.name for unit in units for p in unit.parameters if p.packed}
    sizes: Counter[str] = Counter()
    for weight in steps.packed:
        sizes[weight.scheme.title] += weight.bytes if weight.name in counted else 0
    return max(+sizes, key=sizes.__getitem__, default="")


def _quantised_note(steps: Steps, units: tuple[UnitSize, ...]) -> Iterator[str]:
    """Yield where quantised weights are counted as stored, and where dequantised."""
    if not steps.packed:
        return
    sizes = {name: p.numel() * p.element_size() / 2**30 for name, p in steps.module.named_parameters()}
    plain = sum(sizes.pop(weight.name) for weight in steps.packed)
    stored = f"{sum(weight.bytes for weight in steps.packed) / 2**30:,.1f} GiB"
    if any(p.packed for unit in units for p in unit.parameters):
        text = f"quantised weights are counted as stored, {stored} on all ranks, plus the largest of them dequantised"
        yield f"{text}; in the dtype of the others they take {plain:,.1f} GiB"
    else:
        yield f"trained weights count as plain, {plain:,.1f} GiB on all ranks; the quantised checkpoint takes {stored}"
    left = {name: size for name, size in sizes.items() if steps.module.get_parameter(name).dim() > 2}
    if (rest := sum(left.values())) > plain:
        yield f"most weights, {rest:,.1f} GiB, are not quantised by this format, the first of them {next(iter(left))}"


def _policy(question: Asked, steps: Steps) -> MixedPrecisionPolicy | None:
    """FSDP2's policy as `parallelize` settles it: half-precision gradients are summed in float32."""
    if not question.data_parallel or question.shard_optimizer:
        return None
    if question.mp_policy:
        return question.mp_policy if isinstance(question.mp_policy, MixedPrecisionPolicy) else default_precision()
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if steps.in_half else None)


def _data(question: Asked, policy: MixedPrecisionPolicy | None) -> DataRanks:
    if policy is None:
        return DataRanks()
    compute, reduce = (dtype.itemsize if dtype else None for dtype in (policy.param_dtype, policy.reduce_dtype))
    # of several micro-batches, gathered once
    reshard = False if question.stages > 1 else question.reshard_after_forward
    return DataRanks(question.shards, question.size("dp_replicate"), True, compute, reduce, reshard,
                     policy.output_dtype is not None, question.cpu_offload, question.exchange_experts)  # fmt: skip


def _states(units: tuple[UnitSize, ...], data: DataRanks, optimizer: Optimizer) -> int:
    """Bytes that the optimizer keeps on the device."""
    if optimizer.paged:
        return 0
    return sum(
        number * int(data.stored(p) / p.size * optimizer.bytes_of(p, unit.block))
        for unit, number in alike(units) for p in unit.parameters if p.trained
    )  # fmt: skip


def _optimizer_step(
    units: tuple[UnitSize, ...], data: DataRanks, weights: int, states: int, question: Asked
) -> MemoryParts:
    """While parameters are updated, with what the optimizer's own step makes."""
    optimizer = OPTIMIZERS[question.optimizer]
    trained = [p for unit in units for p in unit.parameters if p.trained]
    largest = max((int(data.stored(p) / p.size * optimizer.alone(p)) for p in trained), default=0)
    temporary = max(optimizer.together * held_bytes(units, data, trained=True), largest)
    temporary = temporary // question.size("dp_replicate") if question.shard_optimizer else temporary
    return MemoryParts(weights=weights, optimizer=states, temporary=temporary)
