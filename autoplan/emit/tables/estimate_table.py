"""Tables for a terminal: an estimate, a choice of meshes, a dry run, and planned tp sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoplan.common.patterns import Universe, fold_counted, grouped
from autoplan.emit.words import bytes_text
from autoplan.values import Plan, Traffic
from autoplan.values.estimate import TIE, Estimate, MemoryParts, Row, Sent, mesh_text

PARTS = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer states",
          "kept": "activations saved for backward", "temporary": "temporary buffers",
          "unsharded": "gathered units and their buffers", "communication": "messages",
          "cache": "keys and values", "overhead": "context, libraries, communicators"}  # fmt: skip
_LETTERS = {"W": ("weights",), "G": ("gradients",), "O": ("optimizer",), "A": ("kept", "cache"),
            "T": ("temporary", "unsharded", "communication"), "C": ("overhead",)}  # fmt: skip
_WORDS = {"W": "Weights", "G": "Gradients", "O": "Optimizer", "A": "Activations", "T": "Temporary", "C": "Context"}
_SHOWN = 12
_TIMES, _FLOPS = ("s", "ms", "µs"), ("TFLOP", "GFLOP", "MFLOP")
_BAR = 36  # letters in a bar of memory


def size_text(size: float, digits: int = 2) -> str:
    """
    >>> size_text(3 * 2**29), size_text(3 * 2**29, 1), size_text(8192), size_text(0)
    ('1.50 GiB', '1.5 GiB', '8.0 KiB', '0 B')
    """
    return f"{size / 2**30:.{digits}f} GiB" if size >= 0.1 * 2**30 else bytes_text(round(size))


def _scaled(number: float, units: tuple[str, ...], digits: int) -> str:
    """Return a number in the largest of these units, each a thousandth of the one before, of which it has a tenth.

    >>> [_scaled(seconds, _TIMES, 2) for seconds in (1.234, 0.00012, 1e-9)]
    ['1.23 s', '0.12 ms', '0.00 µs']
    >>> [_scaled(flops / 1e12, _FLOPS, 1) for flops in (2.34e12, 8.4e8)]
    ['2.3 TFLOP', '0.8 GFLOP']
    """
    for unit in units:
        if number >= 0.1 or unit == units[-1]:
            break
        number *= 1e3
    return f"{number:.{digits}f} {unit}"


def _more(size: int) -> str:
    """Return a size of missing memory, rounded up to 1 MiB."""
    return size_text(size) if size >= 0.01 * 2**30 else f"{max(1, size >> 20)} MiB"


def tokens_text(found: Estimate) -> str:
    """Return the tokens of a sequence, and those of a rank of cp."""
    own = f", of which a rank holds {found.own_tokens}" if found.own_tokens < found.sequence else ""
    return f"{found.sequence} tokens{own}"


def estimate_view(found: Estimate) -> RenderableType:
    """Return the peak by parts, its place, the messages and the time."""
    bars = {name: (bar, against) for name, bar, against in found.bars}
    table = Table("per rank, at the peak", "", "", box=None, pad_edge=False)
    for part in fields(MemoryParts):
        size = getattr(found.parts, part.name)
        if size:
            share = size / max(found.peak, 1)
            table.add_row(PARTS[part.name], size_text(size), "█" * round(30 * share))
    table.add_row("total", f"{size_text(found.peak)} ± {bars['memory'][0]:.0%}" if bars else size_text(found.peak))
    head = f"{found.model} on {mesh_text(found.mesh)}: micro-batch {found.batch}"
    head += (f" × {tokens_text(found)}" if found.sequence else " samples") + f", {found.train}"
    head += (f", {found.weights_text}" if found.dtype else "") + (f", {found.optimizer}" if found.optimizer else "")
    head += "".join(f", {text}" for text in found.how)
    lines: list[RenderableType] = [Text(head), Text(""), table]
    lines.append(Text(f"peak: {found.phase}, at {found.where}"))
    lines += [Text(""), sent_table(found.messages)]
    if found.time is not None:
        parts = {part: _scaled(seconds, _TIMES, 2) for part, seconds in found.time.parts.items() if seconds}
        shares = ", ".join(f"{seconds} {part}" for part, seconds in parts.items())
        bar = f" ± {bars['time'][0]:.0%}" if bars else ""
        unit = "tokens" if found.sequence else "samples"
        took, done = _scaled(found.time.total, _TIMES, 2), _scaled(found.flops / 1e12, _FLOPS, 1)
        step = f"a step: {done} per rank, {took}{bar} on {found.device}"
        lines += [Text(""), Text(f"{step} ({shares}): {found.tokens_per_second:,.0f} {unit} per second")]
    if found.decoded_per_second:
        many = "s" * (found.concurrency > 1)
        held = f"{found.concurrency} sequence{many} per rank, {found.sequence} cached tokens each"
        lines += [Text(f"decoding: {found.decoded_per_second:,.0f} tokens per second ({held})")]
    if found.run_by:
        lines += [Text(f"run with: {found.run_by}; autoplan plans the tp and data-parallel part")]
    lines += [Text(f"note: {text}") for text in found.notes]
    return Group(*lines)


def memory_bar(found: Estimate, memory: int) -> Text:
    """Return one line with a rank's peak as a stack of letters, against the device's memory, and a legend."""
    scale = max(found.peak, memory, 1)
    sizes = {letter: sum(getattr(found.parts, part) for part in parts) for letter, parts in _LETTERS.items()}
    stack = "".join(letter * round(_BAR * size / scale) for letter, size in sizes.items())[:_BAR]
    least, end = min(0.05 * 2**30, found.peak / 100), " GiB"
    texts = {_WORDS[letter]: size_text(n, 1).removesuffix(end) for letter, n in sizes.items() if n > least}
    legend = ", ".join(f"{word} {size}" for word, size in texts.items())
    fits = "" if found.peak <= memory else ", does not fit"
    of = f"{size_text(found.peak, 1).removesuffix(end)} of {size_text(memory, 1)}{fits}"
    step = f"a step of {found.batch}" + (f" × {found.sequence:,} tokens" if found.sequence else " samples")
    step += f" on {mesh_text(found.mesh)} of {found.device}, {found.weights_text}"
    step += f", {found.optimizer}" if found.optimizer else ""
    return Text(f"Memory per rank [{stack:·<{_BAR}}] {of}\n  {legend}\n  {step}")


def sent_table(sent: Sequence[Sent]) -> RenderableType:
    if not sent:
        return Text("communication of a step: none")
    table = Table("communication of a step over", "", "number", "size", box=None, pad_edge=False)
    for message in sent:
        table.add_row(message.dim, message.kind, str(message.number), size_text(message.bytes))
    return table


def choice_view(choice: Any) -> RenderableType:
    """Return the ranked rows, the reasons for the first, and what the nearest that does not fit would need."""
    speed = _unit(choice)
    table = Table("", "mesh", "micro", "checkpointing", "seq.", "peak", speed, "what binds", box=None, pad_edge=False)
    shown = [*choice.rows[:_SHOWN]]
    if choice.nearest is not None and choice.nearest not in shown:
        shown.append(choice.nearest)
    ties = sum(row.ties(choice.rows[0]) for row in choice.rows) if choice.fits else 0
    for row in shown:
        place = choice.rows.index(row) + 1
        priced = row.estimate
        again = {True: "block", False: "none"}.get(row.checkpointing, str(row.checkpointing))
        variant = (", experts apart" if row.experts else "") + (", no reshard" if row.reshard is False else "")
        speed = f"{priced.tokens_per_second:,.0f}{'?' * row.narrow(choice.memory)}" if row.fits else "does not fit"
        speed += f", decoding {priced.decoded_per_second:,.0f}" if row.fits and priced.decoded_per_second else ""
        cells = (mesh_text(priced.mesh) + variant, f"{priced.batch} × {row.accumulate}", again)
        cut = f"{priced.own_tokens} per rank" if "cp" in row.mesh else "cut" if row.sequence_parallel else ""
        tie = "=" if row.fits and ties > 1 and row.ties(choice.rows[0]) else ""
        table.add_row(f"{place}{tie}", *cells, cut, size_text(priced.peak, 1), speed, row.binds)
    fitting = sum(row.fits for row in choice.rows)
    head = f"{choice.source.name} on {choice.gpus} × {choice.device.name} with {size_text(choice.memory)}"
    head += f" ({choice.margin:.0%} left free)" if choice.margin else ""
    if choice.rows:
        estimate = choice.rows[0].estimate
        head += f": {estimate.train}, " + (f"sequences of {estimate.sequence} tokens, " if estimate.sequence else "")
        head += estimate.weights_text + (f", {estimate.optimizer}" if estimate.optimizer else "")
        head += "".join(f", {text}" for text in choice.how)
    fit = Text(f"{fitting} of {len(choice.rows)} configurations fit")
    return Group(Text(head), fit, Text(""), table, Text(""), *map(Text, choice_reasons(choice)))


def _unit(choice: Any) -> str:
    return "samples/s" if choice.rows and not choice.rows[0].estimate.sequence else "tokens/s"


def choice_reasons(choice: Any) -> Iterable[str]:
    if choice.fits:
        first = choice.rows[0]
        yield f"recommended: {first}; the fastest that fits ({first.binds})"
        if first.estimate.run_by:
            yield f"run with: {first.estimate.run_by}; autoplan plans the tp and data-parallel part"
    else:
        more = f"{choice.enough} such GPUs would suffice" if choice.enough else "no number of such GPUs suffices"
        yield f"nothing fits; {more}"
    ties = sum(row.ties(choice.rows[0]) for row in choice.rows) if choice.fits else 0
    if ties > 1:
        yield f"=: {ties} configurations are within {TIE:.0%} of the fastest, less than the accuracy of the estimate"
    if any(row.narrow(choice.memory) for row in choice.rows):
        yield "?: it fits by less than the uncertainty of its estimated memory"
    for row in choice.elsewhere:
        speed = f"{row.estimate.tokens_per_second:,.0f} {_unit(choice)}, {size_text(row.estimate.peak, 1)}"
        yield f"run with: {row}: {speed} ({row.estimate.run_by})"
    near = choice.nearest
    if near is not None:
        yield f"closest that does not fit: {near}; it needs {_more(near.missing)} more ({near.binds})"
    yield from (f"excluded: {text}" for text in choice.dropped)
    yield from (f"note: {text}" for text in choice.notes)
    yield "memory is within 5 % of what torch tracks; times are a roofline, for ranking (± 40 %)"


def against_view(place: int, row: Row, more: dict[str, float]) -> str:
    """Return the rank of a mesh, and why it is not the first."""
    if place == 1:
        return f"{mesh_text(row.estimate.mesh)} is the first row"
    parts = ", ".join(f"{share:+.0%} {name}" for name, share in sorted(more.items(), key=lambda pair: -abs(pair[1]))
                      if abs(share) >= 0.005)  # fmt: skip
    verdict = f"a step takes {sum(more.values()):+.0%} ({parts})" if row.fits else f"it does not fit ({row.binds})"
    run_by = f" ({row.estimate.run_by})" if row.estimate.run_by else ""
    return f"{f'row {place} is' if place else 'beside the rows:'} {row}{run_by}: compared with the first, {verdict}"


def row_view(row: Row) -> RenderableType:
    fits = "it fits" if row.fits else f"it needs {_more(row.missing)} more"
    return Group(Text(f"{row}: {fits}; {row.binds}"), Text(""), estimate_view(row.estimate))


def estimate_to_dict(found: Estimate) -> dict[str, Any]:
    parts = {part.name: getattr(found.parts, part.name) for part in fields(MemoryParts)}
    time = found.time
    return {
        "model": found.model, "mesh": dict(found.mesh), "batch": found.batch, "sequence": found.sequence,
        "tokens_of_a_rank": found.own_tokens, "train": found.train,
        "peak_bytes": found.peak, "parts": parts, "where": found.where, "phase": found.phase,
        "messages": [{"dim": s.dim, "kind": s.kind, "number": s.number, "bytes": s.bytes} for s in found.messages],
        "flops": found.flops, "tokens_per_second": found.tokens_per_second, "device": found.device,
        "seconds": None if time is None else {
            "total": time.total, "compute": time.compute, "memory": time.memory, "optimizer": time.optimizer,
            "idle": time.idle, "exposed": dict(time.exposed)},
        "bars": {name: {"relative": bar, "against": against} for name, bar, against in found.bars},
        "notes": list(found.notes), "dtype": found.dtype, "dtype_origin": found.dtype_origin, "stored": found.stored,
        "optimizer": found.optimizer, "concurrency": found.concurrency,
        "decoded_tokens_per_second": found.decoded_per_second, "matmuls": found.matmuls, "run_by": found.run_by,
        "how": list(found.how),
    }  # fmt: skip


def row_to_dict(row: Row) -> dict[str, Any]:
    return {"mesh": row.mesh, "checkpointing": row.checkpointing, "sequence_parallel": row.sequence_parallel,
            "reshard_after_forward": row.reshard, "accumulate": row.accumulate, "fits": row.fits, "binds": row.binds,
            "missing_bytes": row.missing, "experts_apart": row.experts, "ep": row.ep,
            "estimate": estimate_to_dict(row.estimate)}  # fmt: skip


def dry_run_view(found: Any) -> RenderableType:
    """Return the outcome of a dry run, and each kind of message with its module, group and bytes."""
    table = Table("message", "over", "at", "bytes", "times", box=None, pad_edge=False)
    modules = Universe(message.module for message in found.messages)
    alike: dict[tuple[str, str, int, int], list[str]] = {}
    for (kind, dim, module, size), times in Counter(
        (message.kind, message.dim, message.module, max(message.sent, message.received)) for message in found.messages
    ).items():
        alike.setdefault((kind, dim, size, times), []).append(module)
    for (kind, dim, size, times), names in alike.items():
        for pattern, many in fold_counted(names, modules):
            table.add_row(kind, dim, pattern or "backward", f"{size:,}", str(times * many))
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in found.outputs)
    head = f"{found.model} as rank {found.rank} of {mesh_text(found.mesh)}: micro-batch {found.batch}"
    head += (f" × {found.sequence} tokens" if found.sequence else " samples") + f", weights in {found.dtype}"
    head += (f" ({found.dtype_origin})" if found.dtype_origin else "") + "".join(f", {text}" for text in found.how)
    ran = "forward, backward and adamw's update ran"
    held = f"parameters {size_text(found.parameters)}, gradients {size_text(found.gradients)}"
    held += f", states {size_text(found.states)}"
    held += "" if found.peak is None else f"; {size_text(found.peak)} at the peak, as estimated"
    held += f"; outputs: {shapes}"
    notes = [Text(f"note: {text}") for text in found.notes]
    return Group(Text(head), Text(ran), Text(held), Text(""), table, Text(""), sent_table(found.sent), *notes)


def dry_run_to_dict(found: Any) -> dict[str, Any]:
    messages = [{"kind": m.kind, "dim": m.dim, "module": m.module, "sent": m.sent, "received": m.received}
                for m in found.messages]  # fmt: skip
    return {"model": found.model, "mesh": dict(found.mesh), "rank": found.rank, "batch": found.batch,
            "sequence": found.sequence, "dtype": found.dtype, "dtype_origin": found.dtype_origin,
            "how": list(found.how), "notes": list(found.notes), "outputs": dict(found.outputs),
            "parameter_bytes": found.parameters, "gradient_bytes": found.gradients,
            "optimizer_bytes": found.states, "peak_bytes": found.peak, "messages": messages}  # fmt: skip


_MOST = 12  # the most sizes that are shown


def rank_weights(plan: Plan) -> tuple[int, int]:
    """Return the bytes of weights on a rank, and how many of them are replicated."""
    whole = sum(item.bytes for item in plan.replicated)
    over = 1 if plan.cp_size == plan.ranks else plan.cut_over
    cut = sum(-(-entry.bytes // over) for entry in plan.entries)
    return whole + cut, whole + (cut if over == 1 else 0)


def messages_of_a_block(plan: Plan) -> str:
    """Return the number of messages of the kind of block that sends the most."""
    sums = [sum(n for n, _ in (*block.forward.values(), *block.backward.values())) for block in plan.communication]
    return str(max(sums)) if sums else "0" if plan.ranks == 1 else "-"


def valid_sizes(plan: Plan) -> list[str]:
    """Return the tp sizes at which every axis is divisible; nothing if the sequence is cut."""
    text = "valid tp: " if plan.tp_size in plan.legal_tp else "every axis is divisible at tp "
    return [text + ", ".join(map(str, plan.legal_tp))] if plan.cp_size == 1 else []


def shown_sizes(plan: Plan) -> tuple[int, ...]:
    """Return powers of two among the valid sizes, and the plan's own."""
    return tuple(tp for tp in plan.legal_tp if tp & (tp - 1) == 0 or tp == plan.tp_size)[:_MOST]


def sizes_view(
    plan: Plan,
    plans: Mapping[int, Plan] | None = None,
    estimates: Mapping[int, Estimate] | None = None,
    memory: int = 0,
    why: str = "",
) -> RenderableType | None:
    """Return a line for each size in `plans`; None if nothing is split. `estimates`: steps compared with a device's
    `memory`; `why`: the reason that some are missing."""
    priced = estimates or {}
    bar = memory_bar(priced[plan.tp_size], memory) if plan.tp_size in priced else None
    missing = [Text(f"a training step was not estimated{': ' if not priced else ' '}{why}")] if why else []
    if not plan.entries or len(plan.legal_tp) < 2 or plan.cp_size > 1:
        return Group(bar) if bar is not None else None
    heads = ("tp", "weights per rank", "replicated", "communication of a block")
    table = Table(*heads, *(("of a step", "memory per rank") if priced else ()), box=None, pad_edge=False)
    for tp, planned in sorted({**(plans or {}), plan.tp_size: plan}.items()):
        size, whole = rank_weights(planned)
        mark = " (this plan)" if tp == plan.tp_size else ""
        share = f"{size_text(whole)}, {whole / max(size, 1):.0%}"
        step = _step(priced.get(tp), memory) if priced else ()
        table.add_row(f"{tp}{mark}", size_text(size), share, messages_of_a_block(planned), *step)
    head = Text("".join(valid_sizes(plan)).capitalize(), style="bold")
    return Group(*([bar, Text("")] if bar is not None else []), head, table, *missing)


def _step(found: Estimate | None, memory: int) -> tuple[str, str]:
    """Return the number and bytes of a step's messages, and its peak."""
    if found is None:
        return "", ""
    number, size = sum(message.number for message in found.messages), sum(message.bytes for message in found.messages)
    fits = "" if not memory or found.peak <= memory else ", does not fit"
    return f"{number}, {size_text(size)}" if number else "0", f"{size_text(found.peak)}{fits}"


# What blocks send.

TRAFFIC_COLUMNS = ("block", "forward", "backward", "least forward", "least backward", "moved/least")


def equal_blocks(traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Return the first of the blocks that move the same, named with their number."""
    alike = grouped((repr(replace(block, block="")), block) for block in traffic)
    first = ((ones[0], f" and {len(ones) - 1} equal blocks" if len(ones) > 1 else "") for ones in alike.values())
    return tuple(replace(block, block=f"{block.block}{more}") for block, more in first)


def traffic_row(block: Traffic) -> tuple[str, ...]:
    """Return a block's row: the number of collectives of each kind, and their bytes per token."""
    ratio = "" if block.ratio is None else f"{block.ratio:.2f}"
    bounds = block.least_forward, block.least_backward
    least = [f"{size} B in {number}" if number else "nothing" for number, size in bounds]
    return block.block, _moved(block.forward), _moved(block.backward), *least, ratio


def traffic_lines(traffic: Iterable[Traffic]) -> list[str]:
    """Return the same as text, one line per block."""
    lines = []
    for moved in equal_blocks(traffic):
        block, forward, backward, least_forward, least_backward, ratio = traffic_row(moved)
        once = f"; {moved.once} B of gradients of replicated parameters once per step" if moved.once else ""
        sent = f"forward {forward} (minimum {least_forward}), backward {backward} (minimum {least_backward})"
        lines.append(f"{block}: {sent}{f', {ratio} × the minimum' if ratio else ''}{once}")
    return lines


def _moved(kinds: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{number} {kind} {size} B" for kind, (number, size) in kinds.items()) or "nothing"
