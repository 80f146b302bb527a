"""A plan: one frozen value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal

from autoplan.values.estimate import Cost, Estimate, Shown, done_above
from autoplan.values.findings import Fed, Finding, FlowPart, Traffic
from autoplan.values.instructions.modules import Runtime
from autoplan.values.plain import plain
from autoplan.values.quantised import PackedWeight
from autoplan.values.reasons import Reason

# The target of a plan: it contains places in source code and numbers of rows, which are invalid for another model.

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Version:
    """A library with which a plan was made."""

    library: str
    version: str


@dataclass(frozen=True)
class ForwardCode:
    """The forward of a class some of whose calls are rewritten: places of calls are columns in its source. `code` is a
    hash of that source ("source:…"), or of the compiled code if there is no source ("compiled:…")."""

    class_name: str
    code: str


@dataclass(frozen=True)
class Sizes:
    """The shapes that parameters of a pattern had: one, unless blocks differ."""

    pattern: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MadeFor:
    """The target of a plan. Versions are for the reader; code and sizes must be those of the model it is applied to.

    `model`: a hash of all of its code and of the integers that it and its config hold. `content`: a hash of the plan's
    content when it was made (`steering`), `UNKNOWN` for a file without one. If one of them has changed, the plan is
    derived once more before it is applied.
    """

    versions: tuple[Version, ...] = ()
    forwards: tuple[ForwardCode, ...] = ()
    sizes: tuple[Sizes, ...] = ()
    model: str = field(default="", compare=False, repr=False)
    content: str = field(default="", compare=False, repr=False)

    @property
    def libraries(self) -> str:
        """Return the versions as text."""
        texts = (f"{version.library} {version.version}" for version in self.versions)
        return ", ".join(texts) or "unknown versions"


@dataclass(frozen=True)
class SeenCode:
    """A function that ran, and the directions in which its branches went.

    `place`: "package.module:Class.forward"; lambdas and functions inside of others, which share names, add their first
    line. `code`: the Python that compiled it, and a hash of what it compiled. `ways`: for each branch the offset of its
    instruction with "+" (it went on) or "-" (it jumped); the offset alone of a handler of exceptions; "offset>hash" for
    a call of another such function. `owners`: modules where these are all the ways that it went, with the offsets of
    calls that led to it; none: all ways anywhere.
    """

    place: str
    code: str
    ways: str = ""
    owners: tuple[str, ...] = ()


# A plan, and its parts.


@dataclass(frozen=True)
class Trial:
    """The result of the sharded tiny clone on simulated ranks: the one step that runs the model's own code on shards.

    `why`: what came out wrong, or why it was not tried; `hint`: what to do, or to pass, so that it can be. `ranks`: the
    number of ranks it was tried on, if known. "unasked": none was requested, or the plan was written before plans
    recorded it.
    """

    outcome: Literal["unasked", "passed", "wrong", "skipped"] = "unasked"
    why: str = ""
    hint: str = ""
    ranks: int = 0


@dataclass(frozen=True)
class Proof:
    """The proof of a plan: what was proven, how, and at which tp.

    `ok`: all of it was done and held, the trial on simulated ranks too. `wrong`: the checks that found the plan wrong.
    A plan that is not `ok` may have `failed`, or just not be proven: `trial` and `text` say why.
    """

    method: Literal["none", "graph", "ranks"]
    tp_size: int
    ok: bool
    checked: tuple[str, ...] = ()
    text: str = ""
    trial: Trial = Trial()
    wrong: tuple[str, ...] = ()

    @property
    def was_asked(self) -> bool:
        """Return whether a proof of the plan was requested."""
        return self.method != "none" or self.trial.outcome != "unasked"

    @property
    def failed(self) -> bool:
        """Return whether the plan failed verification."""
        if self.wrong or self.trial.outcome == "wrong":
            return True
        return self.method != "none" and not self.ok and self.trial.outcome != "skipped"


@dataclass(frozen=True)
class Entry:
    """One planned module pattern. `segments` are "dim:layout" per parameter; `reduces` is what it costs.

    `bytes` is the size of the parameters of all modules that it stands for, unsplit. `axes` are numbers of the axes
    that shard it: entries with a common one are sharded together, or not at all. `units` is text, for people; `counted`
    the same without the contents of a unit of several rows: what entries that are sharded together have in common.
    """

    pattern: str
    parameters: tuple[str, ...]
    style: str
    role: str
    rule: str
    source: Literal["user", "handwritten", "inferred", "hf"]
    reason: str
    units: str = ""
    segments: tuple[str, ...] = ()
    reduces: tuple[Cost, ...] = ()
    proof: str = "unproven"
    bytes: int = 0
    axes: tuple[int, ...] = field(default=(), compare=False)
    counted: str = field(default="", compare=False)


@dataclass(frozen=True)
class Obstacle:
    """A reason why a library that wraps the call of a module cannot shard these ones, though `execute` can.

    `kind`: "edited" (module `by` gets the output and changes it in place, and a wrapped output is a view), "read" (the
    code of module `by` reads its weight), "shape" (it is no linear layer or table: its weight has `dims` other than
    two, or it does not declare its width), "count" (a module above split ones reads the integer `attribute`, which must
    stay).
    """

    pattern: str
    kind: Literal["edited", "read", "shape", "count"]
    by: str = ""
    dims: int = 2
    attribute: str = ""

    @property
    def why(self) -> str:
        """Return it as text, for people."""
        if self.kind == "edited":
            return f"{self.by or 'the model'} changes its output in place"
        if self.kind == "read":
            return f"the code of {self.by or 'the model'} reads its weight"
        if self.kind == "count":
            return f"its code reads {self.attribute}"
        odd = f"its weight has {self.dims} dims" if self.dims != 2 else "its module does not state its width"
        return f"{odd}: not a linear layer"


@dataclass(frozen=True)
class Replicated:
    """A parameter that is replicated, with its size and why. Unpacks as (fqn, bytes, reason).

    `reason` is text, for people. Code reads `why` (of every block that the pattern stands for), and `roles`: its roles
    in rules.
    """

    fqn: str
    bytes: int
    reason: str
    roles: tuple[str, ...] = ()
    why: tuple[Reason, ...] = ()

    def __iter__(self) -> Any:
        return iter((self.fqn, self.bytes, self.reason))


@dataclass(frozen=True)
class Stack:
    """A repeated stack of blocks, flattened in call order."""

    name: str
    kind: Literal["decoder", "encoder", "vision", "audio", "other"]
    fqns: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Change:
    """One difference between two plans."""

    pattern: str
    what: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Plan(Shown):
    """The plan for one model at one tp size. See `str(plan)`, `explain`, `diff`, `save`.

    `ep_size`: the number of ranks over which experts are distributed; 1: they are sharded. It is the tp size, or with
    tp_size 1 any other. `made_for`: the code and the sizes of the model that it was made for; it is refused for others.
    `cp_size`: the number of ranks over which the sequence is sharded; such a rank reads its own part of a weight shard.
    `fed`: the inputs of the forward, if they were not specified but derived.
    `packed`: how the weights of a quantised model are stored, by pattern, and how its tensors are sharded with them.
    `flow`: the order in which its modules run, for drawings; not compared.
    `paths`: the ways through the model's own code that were recorded and tried, which a sharded model is held to.
    """

    model: str
    tp_size: int
    sequence_parallel: bool = False
    source: str = "inferred"
    entries: tuple[Entry, ...] = ()
    replicated: tuple[Replicated, ...] = ()
    layers: tuple[Stack, ...] = ()
    legal_tp: tuple[int, ...] = (1,)
    findings: tuple[Finding, ...] = ()
    proof: Proof = Proof("none", 1, False)
    runtime: Runtime = Runtime()
    communication: tuple[Traffic, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()
    ep_size: int = 1
    made_for: MadeFor = MadeFor()
    fed: tuple[Fed, ...] = ()
    packed: tuple[PackedWeight, ...] = ()
    flow: tuple[FlowPart, ...] = field(default=(), compare=False)
    paths: tuple[SeenCode, ...] = field(default=(), compare=False)
    cp_size: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of ranks: those of tp, or of ep if nothing but experts is split, times those of cp."""
        return max(self.tp_size, self.ep_size) * self.cp_size

    @property
    def cut_over(self) -> int:
        """Return how many ranks weights are sharded over; with context parallelism alone, how many read a part."""
        return self.ranks if 1 in (self.cp_size, max(self.tp_size, self.ep_size)) else self.ranks // self.cp_size

    @property
    def over(self) -> str:
        """Return those ranks in words: "tp=8", "cp=2"."""
        sizes = [f"{name}={size}" for name, size in (("tp", self.tp_size), ("cp", self.cp_size)) if size > 1]
        return ", ".join(sizes) or f"tp={self.tp_size}"

    @property
    def uneven(self) -> str:
        """Return "blocks" if some ranks hold a block of a quantised weight more than others, else "never"."""
        return "blocks" if any("!~" in rule.layout for rule in self.runtime.parameters if rule.layout) else "never"

    def explain(self, path: str) -> str:
        """Return why a module, a parameter, or a pattern of either is split or whole, and what runs around it."""
        return str(done_above("Plan.explain", self, path))

    def diff(self, other: Plan) -> tuple[Change, ...]:
        """Return what `other` has changed; empty exactly when the plans are equal."""
        changes: tuple[Change, ...] = done_above("Plan.diff", self, other)
        return changes

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data: what files hold and `autoplan plan --json` prints."""
        data: dict[str, Any] = done_above("Plan.to_dict", self)
        return data

    def to_torch(self, *, gather_logits: bool | None = None) -> dict[str, Any]:
        """Return {pattern: ParallelStyle} for torch's `parallelize_module(model, tp_mesh, …)`; objects are new."""
        styles: dict[str, Any] = done_above("Plan.to_torch", self, gather_logits=gather_logits)
        return styles

    def to_hf(self, model: Any = None, *, old: bool = False, drop: bool = False) -> dict[str, str]:
        """Return {pattern: style name} for transformers; pass the `model` to override shipped keys that we do not use.
        Raises on what transformers cannot express, with the bytes lost; with `drop` that stays whole."""
        styles: dict[str, str] = done_above("Plan.to_hf", self, model, old=old, drop=drop)
        return styles

    def export(self, target: str, model: Any = None, *, drop: bool = False) -> str:
        """Return the text of the plan for another system; `autoplan export --help` lists them. See `to_hf` for `drop`.

        With the `model`, the result also says how many of its linear layers that system will shard: `reached` of
        `linears`, `whole` (patterns of the others), and `note`, which says so in a line.
        """
        text: str = done_above("Plan.export", self, target, model, drop=drop)
        return text

    def part_for(self, model: Any) -> Plan:
        """Return the part of this plan for a piece of its model: a pipeline stage, with some blocks under their names.
        A stage without the table, the head or some blocks takes the rest; one that holds something else is refused."""
        part: Plan = done_above("Plan.part_for", self, model)
        return part

    def report(
        self, path: str | PathLike[str], *, estimate: Estimate | None = None, memory: str | int | None = None,
        what_if: Mapping[int, Any] | None = None,
    ) -> None:  # fmt: skip
        """Write a page to look at: one HTML file. `estimate` fills its memory section, held against `memory` of a GPU
        (80GB, or a number of bytes). `what_if`: by size of tp, a WhatIf to which the page can be switched."""
        done_above("Plan.report", self, path, estimate=estimate, memory=memory, what_if=what_if)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a plan file, YAML or JSON by suffix; `autoplan.load_plan` reads it back exactly."""
        done_above("Plan.save", self, path)


# A digest of what a plan does to a model: two plans with one digest do the same.
#
# Texts for people (reasons, findings, costs) are not in it. Ranks compare digests, and a plan file holds the digest of
# the plan as it was made, which changes with an edit (check/audit/gate.py).

_LENGTH = 16  # hexadecimal digits


def steering(plan: Plan) -> dict[str, Any]:
    """Return everything that decides what happens to a model, by its place in a plan file."""
    made_for = plan.made_for
    return {
        "tp_size": plan.tp_size,
        "ep_size": plan.ep_size,
        **({"cp_size": plan.cp_size} if plan.cp_size > 1 else {}),
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
    """Return a short hash of all of it, and of the paths that a sharded model is checked against."""
    content = {**steering(plan), **({"paths": plain(plan.paths, brief=True)} if plan.paths else {})}
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]
