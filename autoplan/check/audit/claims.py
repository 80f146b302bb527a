"""Hold what a class claims against the model: plans for tp, ep and pp, context parallelism and checkpointing are
run."""

from __future__ import annotations

import inspect
import queue
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any

from autoplan.capture.copies import copied
from autoplan.check.audit.auditor import audit_source
from autoplan.check.audit.subject import Level
from autoplan.check.verify.on_ranks import said
from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.nested import call_with
from autoplan.common.patterns import holders, is_under
from autoplan.common.random_values import cast_numbers, inputs_in
from autoplan.emit.words import LEVELS
from autoplan.values import Finding, Report

_STAGES = 2
_ALLOWED = 1e-5


class Verdict(StrEnum):
    """The outcome of a claim, as in tables and --json."""

    HOLDS = "holds"
    WRONG = "wrong"
    DOUBTFUL = "doubtful"
    NOT_CLAIMED = "not claimed"


def audit_claims(source: Any, tp_size: int = 2, *, only: str = "") -> Report:
    """Try every claim of a model's class, or one. `details["claims"]` says of each: holds, wrong, doubtful, or not
    claimed."""
    import torch

    from autoplan.check.verify.clone import clone_of
    from autoplan.hf.own_sharding import claims_of

    module = source.module()
    claims = claims_of(module)
    clone = clone_of(source)
    if clone.lifted:  # its code asks for single precision. What is compared runs the same operations twice
        model = copied(clone.model)
        cast_numbers(model, torch.float32)
        clone = replace(clone, model=model, feeds=inputs_in(torch.float32, clone.feeds))
    verdicts: dict[str, Verdict] = {}
    findings: list[Finding] = []

    def noted(claim: str, is_made: bool, more: Iterator[Finding]) -> None:
        if only not in ("", claim):
            return
        own = [replace(finding, check=claim) for finding in more]
        levels = {finding.level for finding in own}
        verdicts[claim] = (
            Verdict.WRONG if "error" in levels
            else Verdict.DOUBTFUL if "warn" in levels
            else Verdict.HOLDS if is_made
            else Verdict.NOT_CLAIMED
        )  # fmt: skip
        findings.extend(own)

    shipped = conventions().shipped_plan(module)
    noted("tp-plan", bool(shipped), _plan(source, shipped, tp_size))
    noted("ep-plan", bool(claims.expert_plan), _plan(source, claims.expert_plan, tp_size))
    noted("pp-plan", bool(claims.pipeline_plan), _pipeline(clone, claims.pipeline_plan, module))
    noted("context-parallel", bool(claims.context_parallel), _context(source, clone.model, claims.context_parallel))
    noted("no-split-modules", bool(claims.no_split), _blocks(module, claims.no_split))
    noted("checkpointing", bool(claims.checkpointing), _checkpointing(clone, claims.checkpointing))
    claimed = [verdict for verdict in verdicts.values() if verdict is not Verdict.NOT_CLAIMED]
    return Report(
        ok=not any(finding.level == "error" for finding in findings),
        findings=tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level))),
        tp_size=tp_size,
        details={
            "model": source.name,
            "claims": verdicts,
            "verdict": f"{claimed.count(Verdict.HOLDS)} of {len(claimed)} claims hold",
        },
    )


def _plan(source: Any, plan: Any, tp_size: int) -> Iterator[Finding]:
    """A plan of styles: what an audit says of it."""
    if not plan:
        return
    try:
        report = audit_source(source, dict(plan), tp_size)
    except AutoplanError as error:
        yield Finding("", "warn", "", f"not run: {error.message}")
        return
    about = [f for f in report.findings if f.level == "error" or f.check in ("dead-keys", "overlaps")]
    yield from (finding for finding in about if finding.kind != "follows")
    if report.details["outcome"] == "untried":
        yield Finding("", "warn", "", report.details["ran"])


# ------------------------------------------------------------------------------------------------ pipeline stages


def _pipeline(clone: Any, plan: Any, module: Any) -> Iterator[Finding]:
    """The model on two stages, split by transformers, against the whole model: outputs alone, for it trains none."""
    import torch

    from autoplan.hf.own_sharding import lacks_for_stages, splits_pipelines, unsplit_children

    modules = {name for name, _ in module.named_modules()}
    for key in plan:
        if key not in modules and not any(name.endswith(f".{key}") for name in modules):
            yield Finding("", "error", key, f"pp_plan names {key!r}, which the model does not have")
    if not splits_pipelines():
        return
    want, feed = None, {}  # the logits of the whole model for the first feed that gives some
    for feed in clone.feeds.values():
        with torch.no_grad():
            want = getattr(copied(clone.model).eval()(**feed), conventions().logits, None)
        if want is not None:
            break
    if want is None:
        return
    try:
        worst = _on_stages(clone.model, feed, want)
    except Exception as error:  # what splitting or running it raises is the finding
        lacks = lacks_for_stages(clone.model)
        text = f"transformers cannot split it into {_STAGES} pipeline stages"
        text += f": it divides {lacks}, which the model does not have" if lacks else ", or the stages do not run"
        raised = "" if lacks else said(getattr(error, "cause", error))
        hint = "run it with pp_size=1"
        if plan:
            hint = f"{hint}, and do not claim a pp_plan"
            yield Finding("", "error", lacks, text, hint, proof=raised, kind="cannot-run")
        else:
            yield Finding("", "note", lacks, text, hint, proof=raised)
        return
    if worst > _ALLOWED:
        again = unsplit_children(clone.model)
        why = f"; each stage also runs {', '.join(again)}" if again else ""
        claimed = "" if plan else " (no pp_plan is claimed, yet pp_size=2 is accepted)"
        text = f"split into {_STAGES} pipeline stages, its results are wrong{why}{claimed}"
        proof = f"on {_STAGES} simulated ranks, logits are off by {worst:.2g} (allowed {_ALLOWED:g})"
        yield Finding("", "error", ", ".join(again), text, "run it with pp_size=1", proof=proof, kind="wrong-numbers")


def _on_stages(model: Any, feed: Any, want: Any) -> float:
    """The largest error of the logits on any stage, as a part of the largest logit."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from autoplan.check.ranks.run import run_ranks
    from autoplan.check.verify.compare import error_of, largest_of
    from autoplan.hf.own_sharding import as_pipeline_stage

    models = [copied(model).eval() for _ in range(_STAGES)]
    between: list[queue.Queue[Any]] = [queue.Queue() for _ in range(_STAGES)]

    def pass_on(is_sent: bool, rank: int, tensor: Any) -> Any:
        if is_sent:
            if rank + 1 < _STAGES:
                between[rank + 1].put(tensor.detach().clone())
            return None
        return between[rank].get(timeout=20) if rank else None

    def stage(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (_STAGES,), mesh_dim_names=("pp",))
        split = as_pipeline_stage(models[rank], mesh, pass_on)
        with torch.no_grad():
            return getattr(split(**{name: _own(value) for name, value in feed.items()}), conventions().logits)

    largest = largest_of(want)
    return max(error_of(got, want, largest) for got in run_ranks(stage, _STAGES))


def _own(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


# ------------------------------------------------------------------------------------------------ the other claims


def _context(source: Any, model: Any, is_claimed: bool | None) -> Iterator[Finding]:
    """The model on two ranks as accelerate and torch would have it, against one device: logits alone."""
    from autoplan.check.audit.executors import ALLOWED, LENGTH, RANKS, outcome_of
    from autoplan.check.verify.clone import feeds_at
    from autoplan.hf.own_sharding import context_hooks

    if is_claimed is None:
        return
    if context_hooks() is None:
        if is_claimed:
            yield Finding("", "warn", "", "not run: no installed accelerate version supports context parallelism")
        return
    feed: dict[str, Any] = next(iter(feeds_at(source, model, batch=2, length=LENGTH).values()), {})
    outcome = outcome_of(model, feed)
    if outcome is None:
        if is_claimed:
            text = f"not run: no call with {LENGTH} tokens returns logits for each, which ranks could be compared by"
            yield Finding("", "warn", "", text, "compare a step of your own over cp with one device")
        return
    over = f"over {RANKS} ranks of accelerate's context parallelism"
    if outcome.error is None and is_claimed:
        hint = "plan it with cp_size=2"
        yield Finding("", "error", "", f"it cannot run {over}: {outcome.why}", hint, kind="cannot-run")
    elif outcome.error is not None and outcome.error > ALLOWED and is_claimed:
        why = "" if outcome.attends else ", and attention never calls scaled_dot_product_attention"
        off = f"logits are off by {outcome.error:.2g} (allowed {ALLOWED:g})"
        proof = f"{off}; the first value that differs: {outcome.first}"
        text = f"{over}, its results are wrong without an error{why}"
        yield Finding("", "error", "", text, "plan it with cp_size=2", proof=proof, kind="wrong-numbers")
    elif not is_claimed:
        text = f"it cannot run: {outcome.why}" if outcome.error is None else f"logits are off by {outcome.error:.2g}"
        if outcome.error is not None and outcome.error <= ALLOWED:
            text = "its results match one device"
        yield Finding("", "note", "", f"{over}, {text}; support is not claimed", "plan it with cp_size=2")


def _blocks(module: Any, names: tuple[str, ...]) -> Iterator[Finding]:
    """The modules that are not to be split, against the classes and the blocks of the model."""
    from autoplan.hf.stacks import layers

    if not names:
        return
    classes = {name: type(inner).__name__ for name, inner in module.named_modules()}
    absent = [name for name in names if name not in classes.values()]
    stacks = layers(module)
    if absent:
        blocks = ", ".join(dict.fromkeys(classes[stack.fqns[0]] for stack in stacks))
        level: Level = "error" if len(absent) == len(names) else "note"
        text = f"no_split_modules names {', '.join(absent)}, which this model does not have"
        yield Finding("", level, "", text, f"its blocks are {blocks}" if blocks else "")
    for stack in stacks if len(absent) < len(names) else ():
        split = [b for b in stack.fqns if not {classes[n] for n in (b, *holders(b)) if n in classes} & {*names}]
        if split:
            text = f"{len(split)} of {len(stack.fqns)} blocks of {stack.name} are not covered by no_split_modules"
            yield Finding("", "warn", split[0], text, f"add {classes[split[0]]}")


def _checkpointing(clone: Any, is_claimed: bool | None) -> Iterator[Finding]:
    """A step with the library's own checkpointing: the same gradients, and every block runs twice."""
    if not is_claimed:
        return
    from autoplan.check.verify.compare import error_of, largest_of
    from autoplan.hf.stacks import layers

    feed = next(iter(clone.feeds.values()))
    try:
        want, _ = _step(clone.model, feed, False)
        got, runs = _step(clone.model, feed, True)
    except Exception as error:  # what a claimed feature raises is the finding
        yield Finding("", "error", "", f"it fails with gradient checkpointing: {said(error)}", kind="cannot-run")
        return
    largest = max((largest_of(tensor) for tensor in want.values()), default=0.0)
    errors = {name: error_of(got[name], want[name], largest) if name in got else float("inf") for name in want}
    worst = max(errors, key=lambda name: errors[name], default="")
    if worst and errors[worst] > _ALLOWED:
        proof = f"the gradient of {worst} is off by {errors[worst]:.2g} (allowed {_ALLOWED:g})"
        text = "with gradient checkpointing, gradients are wrong"
        yield Finding("", "error", worst, text, proof=proof, kind="wrong-numbers")
    blocks = [block for stack in layers(clone.model) for block in stack.fqns if block in runs]
    once = [block for block in blocks if max(n for name, n in runs.items() if is_under(block, name)) < 2]
    if once:
        text = f"{len(once)} of {len(blocks)} blocks are not recomputed under gradient checkpointing"
        yield Finding("", "warn", ", ".join(once[:3]), text)


def _step(model: Any, feed: Any, is_checkpointed: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """Gradients of one step in training mode, and how often each module ran."""
    import torch

    from autoplan.check.verify.subject import tensors_in, weighted_sum
    from autoplan.hf.own_sharding import checkpoint_its_blocks

    model = copied(model).train()
    if is_checkpointed:
        checkpoint_its_blocks(model)
    runs: dict[str, int] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: runs.__setitem__(name, runs.get(name, 0) + 1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = {name: _own(value) for name, value in feed.items()}
        switch = conventions().cache_switch
        if switch in inspect.signature(model.forward).parameters:
            inputs[switch] = False
        loss = weighted_sum(tensors_in(call_with(model, inputs)))
        if loss is not None:
            torch.autograd.backward(loss)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, runs
