"""Is what lies around the cuts right? Tables, heads, adapters, frozen weights, FSDP, clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from autoplan.analyse.picture.flow import node_of
from autoplan.check.audit.rows import dialect_of
from autoplan.check.audit.subject import Audited, Level
from autoplan.common.errors import AutoplanError
from autoplan.common.patterns import matches, nearest, starred
from autoplan.decide.written_plans.choices import CUTS
from autoplan.emit.words import bytes_text, few
from autoplan.values import Finding, SplitLogits

_ALLOWED = 1e-5


def embeddings(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """embeddings: a token table that stays whole, or a table of positions that is cut.

    A token table cut by rows is looked up on each rank and summed; whole, it costs its bytes on every rank. A position
    or type table has no such axis: a cut there breaks the lookup.
    """
    if subject.tp_size == 1 or not subject.plan.lines:
        return
    nodes = [node for box in subject.flow if (node := node_of(subject.flow, box)).kind == "embedding"]
    tables = {dim.parameter for node in nodes for field, dim in node.dims if field == "rows" and dim.parameter}
    for weight in subject.weights:
        if not tables & set(weight.names):
            continue
        if weight.fact.dim is not None and weight.said.dim is None:
            extra = weight.bytes * (subject.tp_size - 1) // subject.tp_size
            text = f"the table is replicated: {bytes_text(weight.bytes)} on every rank"
            # The row that shards it, in the words of the plan that was given
            dialect = dialect_of(subject.plan)
            row = dialect.value("embedding_rowwise") if dialect is not None else None
            hint = f"add {dialect.row(weight.module, row)}" if dialect and row else "`autoplan plan` shards it"
            yield Finding(check, "note", weight.module, text, hint, extra)
        elif weight.fact.dim is None and weight.said.dim == 0 and weight.said.line is not None:
            text = f"{weight.name} is sharded by rows: {weight.fact.reason}"
            yield subject.suspect(check, weight.said.line.pattern, text, "remove its row", names=weight.names)


_FP32_COPIES = 5  # [tokens, vocabulary] tensors that a float32 cross-entropy keeps, as measured on a public report


def heads_gather(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """heads-gather: the vocabulary head gathers its logits on every rank, or stays whole.

    Split logits are 1/tp of what is often a step's largest tensor, and the loss can be computed on them. Gathered, the
    head's forward makes two whole copies, and a float32 loss keeps about five more through backward (an estimate).
    """
    if subject.tp_size == 1 or not subject.plan.lines:
        return
    for head in subject.solution.runtime.of(SplitLogits):
        weight = next((w for w in subject.weights if f"{head.pattern}.weight" in w.names), None)
        line = subject.plan.line_for(f"{head.pattern}.weight")
        if weight is None or (subject.plan.plan is not None and weight.said.dim is not None):
            continue
        if line is not None and "gather" in line.style:
            hint = "logits that stay sharded need a loss that accepts them, which no style brings along"
            forward, step = gather_bytes(subject, head.columns)
            text = f"logits [{subject.settings.tokens}, {head.columns}] are gathered on every rank: "
            text += f"{bytes_text(forward)} more in the head's forward, "
            text += f"about {bytes_text(step)} more by the end of a step with a float32 loss"
            yield Finding(check, "warn", line.pattern, text, hint, step)
        elif weight.said.dim is None:
            text = f"the head is replicated: {bytes_text(weight.bytes)} on every rank, and logits of full width"
            more = weight.bytes * (subject.tp_size - 1) // subject.tp_size
            yield Finding(check, "warn", head.pattern, text, "`autoplan plan` shards it", more)


def gather_bytes(subject: Audited, rows: int) -> tuple[int, int]:
    """Return the extra bytes on a rank if logits are gathered: in the head's forward, and by the end of backward."""
    whole = 2 * subject.settings.tokens * rows  # in half precision
    return 2 * whole, round((1 + 2 * _FP32_COPIES) * whole * (subject.tp_size - 1) / subject.tp_size)


def adapters(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """adapters: the weight has moved below the module that the plan names (`q_proj` holds `q_proj.base_layer`).

    The key still matches a module and reaches no weight: the base weight stays whole, or is cut apart from the
    adapter's.
    """
    if subject.plan.plan is not None:
        return
    for line in subject.plan.lines:
        if CUTS.get(line.style, "nothing") in ("nothing", "any", "whole"):
            continue
        reached = [name for name in subject.modules if subject.plan.reaches(line, name)]
        hollow = [name for name in reached if not any(True for _ in subject.modules[name].parameters(recurse=False))]
        below = [p for name in hollow for p in subject.parameters if p.startswith(f"{name}.")]
        if hollow and len(hollow) == len(reached) and below and not any(subject.of_line(line)):
            frozen = [p for p in below if not subject.parameters[p].requires_grad]
            size = sum(w.bytes for w in subject.weights if w.name in below)
            text = f"{line} matches {subject.folded(hollow)}, which has no weight of its own: "
            text += f"its weights are {subject.folded(below)}" + (", some of them frozen" if frozen else "")
            hint = f"plan the wrapped model: {subject.folded(p.rpartition('.')[0] for p in frozen or below)!r}"
            yield Finding(check, "warn", line.pattern, text, hint, size)


def frozen(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """frozen: parameters that were frozen become trainable when the plan is carried out.

    A style replaces each parameter by a new one, which asks for gradients unless told otherwise (torch's
    `SequenceParallel` does so to norms). The optimizer then trains base weights, norms or towers. Seen on simulated
    ranks.
    """
    thawed = {starred(name) for name in subject.extra.get("thawed", ())}
    groups: dict[str, list[str]] = {}
    for name in subject.parameters:
        if starred(name) in thawed:
            line = subject.plan.line_for(name)
            groups.setdefault("" if line is None else line.pattern, []).append(name)
    for pattern, names in groups.items():
        size = sum(subject.parameters[name].nbytes for name in names)
        text = f"{subject.folded(names)} was frozen, but requires grad once the plan is applied"
        proof = f"{names[0]}: requires_grad is False before and True after, on simulated ranks"
        hint = "preserve requires_grad in the style, or freeze again after sharding"
        places = (pattern,) if pattern else subject.patterns(names)
        yield Finding(check, "error", few(places), text, hint, size, proof, places=places)


def mixed_parameters(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """mixed-parameters: some parameters become DTensors and others stay plain tensors.

    `clip_grad_norm_` and the foreach optimizers then refuse, or count a replicated weight once per rank. Every
    parameter should end on the mesh, whole ones as replicated.
    """
    if subject.plan.dialect not in ("torch", "transformers"):
        return
    # A style of torch puts every parameter of its module on the mesh, those that it does not cut as replicated.
    lines = subject.plan.lines if subject.plan.dialect == "torch" else ()
    styled = [line for line in lines if line.style not in ("", "local_params")]
    cut = [w for w in subject.weights if w.said.dim is not None or w.said.line in styled]
    plain = [w for w in subject.weights if w not in cut and subject.parameters[w.name].requires_grad]
    if plain and cut:
        text = f"{len(plain)} parameters ({subject.folded(w.name for w in plain)}) are plain tensors next to "
        text += f"{len(cut)} DTensors: clip_grad_norm_ and foreach optimizers refuse the mixture"
        hint = "distribute the rest as Replicate(), or use autoplan.parallelize and autoplan.clip_gradients"
        yield Finding(check, "warn", "", text, hint, sum(w.bytes for w in plain))


def gradient_norm(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """gradient-norm: a norm for clipping that counts replicated parameters once per rank, and so clips early.

    The given function is called on simulated ranks with the plan applied, and compared with the unsharded model's norm.
    """
    function, clone = subject.settings.gradient_norm, subject.extra.get("clone")
    if function is None:
        return
    if clone is None or subject.numbers is None:
        yield Finding(check, "note", "", f"the norm function was not run: {subject.unproven}")
        return
    from autoplan.capture.copies import copied
    from autoplan.check.audit.trial import sharding_for
    from autoplan.check.ranks.common import one_compute_thread
    from autoplan.check.ranks.run import run_ranks
    from autoplan.check.verify.subject import Subject as Running

    size = subject.numbers.tp_size
    sharding = sharding_for(subject.plan)
    with one_compute_thread():
        whole = Running(copied(clone.model), clone.feeds)
        feed = next(iter(clone.feeds.values()))
        whole.forward_and_backward(feed)
        unique = {p for p in whole.model.parameters() if p.grad is not None}
        want = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in unique))
        models = [copied(clone.model) for _ in range(size)]
        got = run_ranks(partial(_on_rank, models=models, feed=feed, sharding=sharding, function=function), size)
    if not all(math.isclose(norm, want, rel_tol=_ALLOWED) for norm in got):
        worst = max(got, key=lambda norm: abs(norm - want))
        text = f"on {len(got)} ranks the function returns {worst:.6g}; the norm of the gradients is {want:.6g} "
        text += f"({worst / want:.3f} times)"
        hint = "count each value once: autoplan.global_norm does this from placements"
        proof = f"on {len(got)} simulated ranks: {', '.join(f'{norm:.6g}' for norm in got)}"
        yield Finding(check, "error", "", text, hint, proof=proof)


def _on_rank(rank: int, *, models: list[Any], feed: Any, sharding: Any, function: Any) -> float:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from autoplan.check.verify.subject import Subject as Running

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = sharding.shard(models[rank], mesh)
    Running(model, {"": feed}, gather=lambda model, grads: {}).forward_and_backward(feed)
    return float(function(model, mesh))


def layers(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """layers: what FSDP wraps and checkpointing recomputes, against the blocks that the model has.

    Such mistakes are silent: nothing was wrapped, or children of blocks were; a class is not in this instance; a tower
    was missed; a unit holds two dtypes. Settings are class names, paths, patterns, modules, or a function of the model.
    """
    settings = subject.settings.layers
    if settings is None:
        return
    for purpose, setting in (settings if isinstance(settings, Mapping) else {"layers": settings}).items():
        chosen, unknown = _modules(subject, setting)
        for name in unknown:
            classes = {type(module).__name__ for module in subject.modules.values()}
            close = nearest(name, [*classes, *subject.modules])
            hint = f"the model has {', '.join(close)}" if close else _blocks_hint(subject)
            yield Finding(check, "error", purpose, f"{purpose}: {name} is not a class or path of this model", hint)
        if chosen:
            yield from _compared(check, subject, purpose, chosen)
        elif not unknown:
            yield Finding(check, "error", purpose, f"{purpose}: the setting selects no module", _blocks_hint(subject))


def _modules(subject: Audited, setting: Any) -> tuple[list[str], list[str]]:
    """Names of the selected modules, and entries of the setting that select none."""
    if callable(setting) and not isinstance(setting, type):
        setting = setting(subject.model)
    entries = [setting] if isinstance(setting, (str, type)) or not isinstance(setting, Iterable) else list(setting)
    chosen: list[str] = []
    unknown: list[str] = []
    for entry in entries:
        names = [name for name, module in subject.modules.items() if name and _selects(entry, name, module)]
        chosen += names
        unknown += [] if names else [str(entry) if isinstance(entry, str) else type(entry).__name__]
    return list(dict.fromkeys(chosen)), unknown


def _selects(entry: Any, name: str, module: Any) -> bool:
    if isinstance(entry, str):
        cls = type(module)
        return entry in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}") or matches(entry, name)
    if isinstance(entry, type):
        return isinstance(module, entry)
    if hasattr(entry, "parameters"):
        return entry is module
    raise AutoplanError(f"layers: {entry!r} is not a class name, path or module", hint="pass names, paths or modules")


def _compared(check: str, subject: Audited, purpose: str, chosen: list[str]) -> Iterator[Finding]:
    blocks = {block: stack for stack in subject.stacks for block in stack.fqns}
    taken = [name for name in chosen if name in blocks]
    inside = [name for name in chosen if name not in blocks and _above(name, blocks)]
    around = [name for name in chosen if name not in blocks and any(b.startswith(f"{name}.") for b in blocks)]
    if not taken:
        level: Level = "warn" if inside else "error"
        what = f"{len(inside)} parts of blocks" if inside else ", ".join(around[:3]) or "no block"
        text = f"{purpose}: selects {what}, but none of the {len(blocks)} blocks"
        yield Finding(check, level, purpose, text, _blocks_hint(subject), _bytes(subject, list(blocks)))
        return
    if inside:
        text = f"{purpose}: selects {len(inside)} modules inside blocks too ({subject.folded(inside)})"
        yield Finding(check, "warn", purpose, text, "select only the blocks", _bytes(subject, inside))
    for stack in subject.stacks:
        missed = [block for block in stack.fqns if block not in chosen and not _above(block, dict.fromkeys(chosen))]
        if missed:
            text = f"{purpose}: {len(missed)} of {len(stack.fqns)} {stack.kind} blocks of {stack.name} are not selected"
            hint = f"add {subject.folded(missed)}"
            yield Finding(check, "warn", purpose, text, hint, _bytes(subject, missed))
    # FSDP2 flattens the parameters of a unit into one buffer, which has one dtype
    for block in taken if purpose != "checkpointing" else ():
        dtypes: dict[str, str] = {}
        for name, parameter in subject.modules[block].named_parameters():
            dtypes.setdefault(str(parameter.dtype).removeprefix("torch."), name)
        if len(dtypes) > 1:
            held_in = ", ".join(f"{name} in {dtype}" for dtype, name in dtypes.items())
            text = f"{purpose}: the unit {block} mixes {len(dtypes)} dtypes ({held_in})"
            yield Finding(check, "warn", purpose, text, "make a unit for each dtype, or use one dtype")
            return


def _above(name: str, known: Mapping[str, Any]) -> str:
    """The known module that holds `name`, if any."""
    parts = name.split(".")
    return next((".".join(parts[:n]) for n in range(1, len(parts)) if ".".join(parts[:n]) in known), "")


def _bytes(subject: Audited, names: list[str]) -> int:
    holders = dict.fromkeys(names)
    return sum(weight.bytes for weight in subject.weights if _above(weight.name, holders))


def _blocks_hint(subject: Audited) -> str:
    kinds = [type(subject.modules[stack.fqns[0]]).__name__ for stack in subject.stacks]
    blocks = [f"{subject.folded(stack.fqns)} ({kind})" for stack, kind in zip(subject.stacks, kinds, strict=True)]
    return f"the blocks are {', '.join(blocks)}" if blocks else "the model has no repeated blocks"
