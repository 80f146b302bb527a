"""All the values that travel along the path: what a trace is, what analysis found, what a plan says.

Everything here is frozen plain data without torch, so that it can be printed, compared, saved and tested by itself.
Words: a *trace* is what one run of the model did; an *axis* is a class of tensor dimensions; a *split* cuts an axis
over ranks; a *site* is a place in the running model where something is done (a sum, a copy, an edited integer).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any, Literal, get_args

__all__ = [
    "Call",
    "Change",
    "ClassFact",
    "Edit",
    "Entry",
    "ExpertSite",
    "Finding",
    "Fold",
    "HeadSite",
    "HookSite",
    "Means",
    "ModuleVisit",
    "Obstacle",
    "Op",
    "ParameterFact",
    "ParameterRule",
    "Plan",
    "Proof",
    "Ref",
    "Replicated",
    "Report",
    "Runtime",
    "Score",
    "Scoreboard",
    "ScopedCall",
    "Stack",
    "Symbolic",
    "TensorInfo",
    "Traffic",
    "Trace",
    "Verdict",
    "replace",
]

# ------------------------------------------------------------------------------------------------ what a run did


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor mentioned in recorded arguments: an index into `Trace.tensors`."""

    id: int


@dataclass(frozen=True, slots=True)
class Symbolic:
    """An integer in recorded arguments together with where it came from.

    `origin` is an expression tree of tuples: ("attr", module, attribute, index|None), ("config", module, field),
    ("size", tensor id, dim), ("numel", tensor id), ("const", n), or (operator, left, right) with operator one of
    add sub mul floordiv mod neg.
    """

    value: int
    origin: tuple[Any, ...]


_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a trace. `values` holds the elements of small integer or bool constants, flattened."""

    shape: tuple[int, ...]
    dtype: str
    kind: Literal["parameter", "buffer", "input", "constant", "activation"]
    names: tuple[str, ...] = ()
    values: tuple[int, ...] | None = None

    @property
    def differentiable(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex")) and not self.dtype.startswith("float8")

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES.get(self.dtype, 1 if self.dtype.startswith("float8") else 4)

    @property
    def quantised(self) -> bool:
        """A matrix in few bits, whose numbers mean something only together with scales that are kept beside it."""
        stored = self.kind in ("parameter", "buffer") and len(self.shape) >= 2
        return stored and (self.dtype.startswith("float8") or self.dtype in ("int8", "uint8", "int32"))


@dataclass(frozen=True, slots=True)
class Op:
    """One aten operation. `name` has no namespace or overload ("mm"); tensors in args are `Ref`s.

    `outputs` mirrors what the op returned (Refs, possibly in tuples); `module` is the innermost running module's name.
    """

    name: str
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]
    module: str


@dataclass(frozen=True, slots=True)
class Call:
    """One outermost torch-function call made by a module's own Python code.

    `module`, `visit` and `position` name it: the position-th call in the visit-th run of that module. `place` says
    where in the code it stands (capture/code_place.py). `ops` is the half-open range of `Trace.ops` it caused.
    Integers in args are plain or `Symbolic`.
    """

    name: str
    module: str
    visit: int
    position: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    ops: tuple[int, int]
    grad_enabled: bool = True
    place: str = ""


@dataclass(frozen=True, slots=True)
class ModuleVisit:
    """One run of one module: tensors by path in its arguments and results, and the calls made meanwhile.

    A path is a tuple of names and indices: ("hidden_states",), ("position_embeddings", 0); positional arguments are
    named by the forward's signature. `calls` is the half-open range of `Trace.calls`.
    """

    module: str
    visit: int
    inputs: tuple[tuple[tuple[Any, ...], int], ...]
    outputs: tuple[tuple[tuple[Any, ...], int], ...]
    calls: tuple[int, int]
    parent: int | None = None  # index into Trace.visits


@dataclass(frozen=True, slots=True)
class Fold:
    """Repeated blocks of one container that were traced through representatives: member key -> representative key."""

    container: str
    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Trace:
    """What a model did, in plain data. `module_classes` maps every module name to its class name (for printing).

    `comparisons` are the equalities that Python tested on traced integers: (module, left, right, result), each side an
    int or Symbolic. `escapes` are traced attributes whose value turned into a float or a Python index: editing those
    would change numbers, ("attr"/"config" origin, how).
    """

    tensors: tuple[TensorInfo, ...]
    ops: tuple[Op, ...]
    calls: tuple[Call, ...]
    visits: tuple[ModuleVisit, ...]
    module_classes: dict[str, str]
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)  # module -> integer attributes by name
    comparisons: tuple[tuple[str, Any, Any, bool], ...] = ()
    escapes: tuple[tuple[tuple[Any, ...], str], ...] = ()
    folds: tuple[Fold, ...] = ()
    entries: tuple[str, ...] = ("forward",)
    real: bool = False  # traced on real (tiny) tensors rather than fake ones
    notes: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, int]:
        return {name: i for i, tensor in enumerate(self.tensors) for name in tensor.names}


# ------------------------------------------------------------------------------------------------ what was found


@dataclass(frozen=True)
class ParameterFact:
    """What analysis says about one parameter or buffer (the names it has: more than one when tied).

    `dim` and `layout` say how it is cut (None: whole). `gradient` is "local" (what a rank computes is its own),
    "sum" (every rank holds a part of the whole gradient) or "shared" (rows that several ranks hold need summing).
    `divide`: a bias that is added before a sum over ranks, so each rank adds 1/tp of it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    bytes: int
    buffer: bool = False
    dim: int | None = None
    layout: str | None = None
    gradient: Literal["local", "sum", "shared"] = "local"
    divide: bool = False
    axis: int | None = None  # ClassFact.id of the largest class that cuts it
    axes: tuple[int, ...] = ()  # of all of them
    reason: str = ""


@dataclass(frozen=True)
class ClassFact:
    """One axis class: its size, what it does (events), the parameters it sits in, and whether it is split.

    `reason` says why not, when it is not.
    """

    id: int
    size: int
    events: frozenset[str]
    parameters: tuple[tuple[str, int], ...]  # (first name, dim)
    split: bool
    reason: str = ""


# ------------------------------------------------------------------------------------------------ what will be done


@dataclass(frozen=True)
class ParameterRule:
    """How parameters matching `pattern` lie on ranks. `layout` is the notation of `layout.py`; None: whole."""

    pattern: str
    dim: int | None = None
    layout: str | None = None
    gradient: Literal["local", "sum", "shared"] = "local"
    divide: bool = False


@dataclass(frozen=True)
class Edit:
    """An integer that the module's own Python reads and that must be smaller on a rank.

    `attribute` is a name on the module ("num_heads"), "config.name" for a per-module copy of its config, and `index`
    selects inside a list or tuple attribute. `new` may differ by rank only through `per_rank`.
    """

    pattern: str
    attribute: str
    index: int | None
    old: int
    new: int
    per_rank: tuple[int, ...] | None = None


@dataclass(frozen=True)
class HookSite:
    """Something done to one tensor at a module's entry or exit, on every call.

    `action`: "copy" (identity forward, sum of gradients backward), "reduce" (sum forward, identity backward),
    "scale" (identity forward, gradient times 1/tp on the segments of `layout` that every rank holds, or on all of it),
    "gather" (concatenate over ranks forward, slice backward), "mean" (sum forward, divided by tp). Under sequence
    parallelism, along `dim` and for the sequence that `layout` names: "scatter", "gather_whole", "gather_sum",
    "reduce_scatter" (execute/sequence.py).
    """

    pattern: str
    side: Literal["input", "output"]
    path: tuple[Any, ...]
    action: Literal[
        "copy", "reduce", "scale", "gather", "mean", "scatter", "gather_whole", "gather_sum", "reduce_scatter"
    ]
    dim: int | None = None
    layout: str | None = None


@dataclass(frozen=True)
class HeadSite:
    """A linear whose output leaves the model (the vocabulary head), or a table looked up by split index.

    `kind` "embedding": indices arrive as the module's input, rows are split: mask, look up, sum.
    `kind` "logits": the output is kept split along `dim` until the model's exit, gathered when a loss is asked for.
    """

    pattern: str
    kind: Literal["embedding", "logits"]
    size: int
    dim: int = -1
    outputs: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class ScopedCall:
    """What the scoped function mode does to a call of a module's own Python, of the function `name`.

    `place` is where the call stands in the code, "forward:12:8-30>repeat_kv:3:20-41", with "#2" for only the second
    time that a run of the module comes there, "@4" for only calls whose first argument has four dims.
    `arguments`: literals as (path into args/kwargs, (what each rank's Python passes there, what each must pass)).
    `copies`: argument paths whose gradient is summed.
    `reduce`: "sum" | "mean" | "norm" | "embedding" | "gather" | "attention".
    `cuts`: output dims cut to this rank's share, as (output index, dim, layout).
    """

    pattern: str
    place: str
    name: str
    arguments: tuple[tuple[tuple[Any, ...], Any], ...] = ()
    copies: tuple[tuple[Any, ...], ...] = ()
    reduce: str | None = None
    cuts: tuple[tuple[int, int, str], ...] = ()
    details: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class ExpertSite:
    """A module whose experts live on different ranks: of `experts`, each rank holds an equal run.

    `tokens`, `index` and `weights` are paths of its inputs: what is computed, which experts each token goes to, and
    with which weights; `output` is that of its result. A rank leaves out what goes to experts that it does not hold,
    and numbers its own from 0. Without an `index` the tokens lie expert by expert in their first dim, of which a rank
    takes its part.
    """

    pattern: str
    experts: int
    tokens: tuple[Any, ...]
    index: tuple[Any, ...] | None = None
    weights: tuple[Any, ...] | None = None
    output: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Runtime:
    """Everything `execute` does besides reading parameters, decided at plan time."""

    parameters: tuple[ParameterRule, ...] = ()
    edits: tuple[Edit, ...] = ()
    hooks: tuple[HookSite, ...] = ()
    heads: tuple[HeadSite, ...] = ()
    scoped: tuple[ScopedCall, ...] = ()
    random: tuple[str, ...] = ()  # module patterns whose random draws act on split values: each rank its own
    random_whole: tuple[str, ...] = ()  # and those that act on whole values: the same on every rank
    experts: tuple[ExpertSite, ...] = ()
    outputs: tuple[tuple[Any, ...], ...] = ()  # paths of what the model was seen to return


@dataclass(frozen=True)
class Means:
    """Which means a plan may use: the scoped function mode, and cutting the stream along the sequence.

    `whole`: patterns of modules whose parameters stay whole, because cut they did not give the same. `experts`: experts
    may live on different ranks, where that is asked for.
    """

    scoped: bool = True
    sequence: bool = False
    whole: tuple[str, ...] = ()
    experts: bool = True


@dataclass(frozen=True)
class Proof:
    """What was proven, how, and at which tp."""

    method: Literal["none", "graph", "ranks"]
    tp_size: int
    ok: bool
    checked: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Entry:
    """One planned module pattern. `segments` says, per parameter, "dim:layout"; `reduces` what it costs.

    `bytes` is the size of the parameters of all modules that it stands for, unsplit. `axes` are numbers of the axes
    that cut it: entries that share one are cut together, or not at all.
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
    reduces: tuple[str, ...] = ()
    proof: str = "unproven"
    bytes: int = 0
    axes: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Obstacle:
    """Why a library that wraps the call of a module cannot cut these ones, though `execute` can.

    `kind`: "edited" (who gets the output changes it in place, and a wrapped output is a view), "read" (other modules'
    code reads its weight), "shape" (it is no linear layer or table: its weight has other than two dims, or its code
    does not say how wide it is), "count" (a module above split ones reads the integer `attribute`, which must stay).
    """

    pattern: str
    kind: Literal["edited", "read", "shape", "count"]
    why: str
    attribute: str = ""


@dataclass(frozen=True)
class Replicated:
    """A parameter that stays whole, with its size and why. Unpacks as (fqn, bytes, reason)."""

    fqn: str
    bytes: int
    reason: str

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
class Traffic:
    """What one block moves between ranks in a call, beside the least that its split owes.

    `forward` and `backward`: kind of collective -> how many, and bytes for each token (those of the whole value; an
    all-reduce counts twice). `least_*`: the same for a placement that no other undercuts. `once`: bytes of gradients
    of whole parameters, summed once a step.
    """

    block: str
    forward: dict[str, tuple[int, int]]
    backward: dict[str, tuple[int, int]]
    least_forward: tuple[int, int]
    least_backward: tuple[int, int]
    once: int = 0

    @property
    def ratio(self) -> float | None:
        """Bytes moved for each byte owed."""
        moved = sum(size for kinds in (self.forward, self.backward) for _, size in kinds.values())
        least = self.least_forward[1] + self.least_backward[1]
        return moved / least if least else None


@dataclass(frozen=True)
class Finding:
    """One thing a check has to say."""

    check: str
    level: Literal["error", "warn", "note"]
    where: str
    message: str
    hint: str = ""
    bytes: int = 0
    proof: str = ""


@dataclass(frozen=True)
class Report:
    """The outcome of `verify` or `audit`."""

    ok: bool
    findings: tuple[Finding, ...] = ()
    gradients: dict[str, float] = field(default_factory=dict)
    forward: float | None = None
    tp_size: int = 1
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """The verdict, what was compared, and the findings, for a terminal."""
        from autoplan.emit.terminal import plain_text, report_view

        return plain_text(report_view(self))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data: what `autoplan verify --json` prints. JSON has no NaN: such errors are null."""
        from autoplan.emit.plain import finite, plain

        report: dict[str, Any] = finite(plain(self))
        return report


Verdict = Literal["exact", "wrong", "failed", "refused", "not comparable", "cannot run"]


@dataclass(frozen=True)
class Score:
    """One architecture on the scoreboard: its tiny clone, planned and verified.

    `verdict`: exact; wrong (numbers differ); failed (autoplan or the sharded model raised, or ran out of time);
    refused (nothing can be split); not comparable (the unsharded model's numbers are NaN); cannot run (nor can the
    unsharded model). `split` of `counted` parameters with two dims or more are cut; tables and latents that stay whole
    are not counted, `unused` ones are. `forward`, `backward`: all-reduces in a block of the main stack, on average.
    Where sequence parallelism was asked for, `regions` is how often a block of the main stack gathers the sequence, on
    average, and `uncut` why the stream is not cut (then the verdict is that of the plan without it).
    """

    model_type: str
    class_name: str
    verdict: Verdict
    reason: str = ""
    split: int = 0
    counted: int = 0
    whole: tuple[str, ...] = ()  # patterns of counted parameters that stay whole although they were used, and why
    unused: tuple[str, ...] = ()  # patterns of parameters that no run of the model used
    forward: float | None = None
    backward: float | None = None
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)  # of one call, as measured on rank 0
    scoped: int = 0  # calls whose literals are rewritten at run time
    error: float | None = None  # the largest error of outputs and gradients
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    regions: float | None = None
    uncut: str = ""
    communication: tuple[Traffic, ...] = ()  # measured, block by block

    @property
    def ratio(self) -> float | None:
        """Bytes that blocks moved for each byte that their split owes, the worst of them."""
        return max((one.ratio for one in self.communication if one.ratio is not None), default=None)

    @property
    def share(self) -> float | None:
        return self.split / self.counted if self.counted else None


@dataclass(frozen=True)
class Scoreboard:
    """Many architectures verified at one size, in the order in which transformers lists them."""

    mapping: str
    tp_size: int
    engine: str
    checks: tuple[str, ...]
    scores: tuple[Score, ...]
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    sequence_parallel: bool = False
    lengths: tuple[int, ...] = ()
    ep_size: int = 1

    @property
    def ok(self) -> bool:
        return not any(score.verdict in ("wrong", "failed") for score in self.scores)

    def totals(self) -> dict[str, int]:
        """How many architectures have each verdict."""
        found: dict[str, int] = dict.fromkeys(get_args(Verdict), 0)
        for score in self.scores:
            found[score.verdict] += 1
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain data: what `autoplan scoreboard --json` prints."""
        from autoplan.emit.plain import finite, plain

        board: dict[str, Any] = finite(plain(self)) | {"ok": self.ok, "totals": self.totals()}
        for score, row in zip(self.scores, board["scores"], strict=True):
            row |= {"share": score.share, "ratio": score.ratio}
        return board


@dataclass(frozen=True)
class Change:
    """One difference between two plans."""

    pattern: str
    what: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Plan:
    """The plan: for one model at one tp size. See `str(plan)`, `explain`, `diff`, `save`.

    `ep_size`: over how many ranks experts are dealt out whole; 1: they are cut inside. It is the tp size, or with
    tp_size 1 any other.
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

    @property
    def ranks(self) -> int:
        """Over how many ranks parameters are cut: those of tp, or those of ep where only experts are dealt out."""
        return max(self.tp_size, self.ep_size)

    def __str__(self) -> str:
        """A table for a terminal."""
        from autoplan.emit.terminal import plain_text, plan_view

        return plain_text(plan_view(self))

    def explain(self, path: str) -> str:
        """Why a module, a parameter, or a pattern of either is split or whole, and what runs around it."""
        from autoplan.emit.explain import explain

        return explain(self, path)

    def diff(self, other: Plan) -> tuple[Change, ...]:
        """What `other` has changed; empty exactly when the plans are equal."""
        from autoplan.emit.differences import diff

        return diff(self, other)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: what files hold and `autoplan plan --json` prints."""
        from autoplan.emit.plan_file import plan_to_dict

        return plan_to_dict(self)

    def to_torch(self, *, gather_logits: bool = False) -> dict[str, Any]:
        """{pattern: ParallelStyle} for torch's `parallelize_module(model, tp_mesh, …)`; fresh objects each call."""
        from autoplan.execute.styles import to_torch

        return dict(to_torch(self, gather_logits=gather_logits))

    def to_hf(self, model: Any = None, *, old: bool = False, drop: bool = False) -> dict[str, str]:
        """{pattern: style name} for transformers; give the `model`, so that shipped keys we do not use are overridden.

        Raises on what transformers cannot say, with the bytes lost; with `drop` that stays whole.
        """
        from autoplan.emit.hf import to_hf

        return to_hf(self, shipped=getattr(model, "_tp_plan", None) or (), old=old, drop=drop)

    def export(self, target: str, model: Any = None, *, drop: bool = False) -> str:
        """The text of the plan for another system; `autoplan export --help` lists them. See `to_hf` for `drop`."""
        from autoplan.emit.export import Surroundings, export

        if model is None:
            return export(self, target, Surroundings(), drop=drop)
        from autoplan.dialects.surroundings import surroundings

        return export(self, target, surroundings(model, self), drop=drop)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a plan file, YAML or JSON by suffix; `autoplan.load_plan` reads it back exactly."""
        from autoplan.emit.plan_file import save_plan

        save_plan(self, path)
