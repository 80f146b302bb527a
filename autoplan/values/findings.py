"""Findings, and the parts of a dataflow and the inputs that they refer to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Literal, get_args

from autoplan.values.estimate import Shown, done_above
from autoplan.values.plain import finite, plain

# The order in which a model uses its modules, for drawings. Nothing is decided by it.


@dataclass(frozen=True)
class FlowPart:
    """Modules with parameters, in the order in which their weights are first read.

    `block`: the first block of a kind, and `blocks` how many run like it; "" for modules outside blocks. `steps` are
    names under it (full names outside blocks), with `*` for many alike, such as experts. `reads`: for each step the
    numbers of those that feed it directly, -1 for all that is not in this part; () if that is unknown.
    """

    block: str
    blocks: int
    steps: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class CutsOf:
    """The sharding of every parameter by one plan: (pattern, the sharded dim or None, a readable description)."""

    name: str
    cuts: tuple[tuple[str, int | None, str], ...]


@dataclass(frozen=True)
class Drawn:
    """The content of the drawing of an audit (one side) or of two plans that are compared."""

    flow: tuple[FlowPart, ...]
    sides: tuple[CutsOf, ...]


# The inputs of a model while its plan was made, on which the plan is based.


@dataclass(frozen=True)
class Fed:
    """One argument of the forward as it was derived.

    `given` and `also`: its values in the two calls, in words (kind and shape); `also` is empty if no other size ran.
    `why`: the evidence for them.
    """

    argument: str
    given: str
    also: str = ""
    why: str = ""


# Results of checks: findings, reports, a line and a table of the scoreboard.


@dataclass(frozen=True)
class Finding:
    """One statement of a check. `message` and `hint` are for people; code that distinguishes findings reads `kind`.

    "not-comparable": the unsharded model's own numbers are NaN. "cannot-run": the sharded model raised.
    "wrong-numbers": it ran, and computed something else. "follows": it is a consequence of another finding. "pairs": a
    value of sequence × sequence. `places`:
    every pattern that it is about, if `where` names several, or only the first of them.
    """

    check: str
    level: Literal["error", "warn", "note"]
    where: str
    message: str
    hint: str = ""
    bytes: int = 0
    proof: str = ""
    kind: Literal["", "not-comparable", "cannot-run", "wrong-numbers", "follows", "pairs"] = ""
    places: tuple[str, ...] = ()

    @property
    def about(self) -> tuple[str, ...]:
        """Return the patterns of modules or parameters that it is about."""
        return self.places or ((self.where,) if self.where else ())

    @property
    def is_consequence(self) -> bool:
        """Return whether it states a consequence of a mistake, rather than the mistake."""
        return self.kind in ("cannot-run", "wrong-numbers", "follows")


@dataclass(frozen=True)
class Traffic:
    """The bytes that one block moves between ranks in a call, compared with the minimum that its split needs.

    `forward` and `backward`: kind of collective -> how many, and bytes for each token (those of the full value; an
    all-reduce counts twice). `least_*`: the same for a placement with the minimum. `once`: bytes of gradients of
    replicated parameters, all-reduced once a step.
    """

    block: str
    forward: dict[str, tuple[int, int]]
    backward: dict[str, tuple[int, int]]
    least_forward: tuple[int, int]
    least_backward: tuple[int, int]
    once: int = 0

    @property
    def moved(self) -> int:
        """Return the bytes moved, forward and backward."""
        return sum(size for kinds in (self.forward, self.backward) for _, size in kinds.values())

    @property
    def least(self) -> int:
        return self.least_forward[1] + self.least_backward[1]

    @property
    def ratio(self) -> float | None:
        """Return the bytes moved for each byte needed."""
        return self.moved / self.least if self.least else None

    def in_dtype(self, times: float) -> Traffic:
        """Return the same traffic where an element has `times` as many bytes."""
        forward, backward = (
            {kind: (number, int(size * times)) for kind, (number, size) in kinds.items()}
            for kinds in (self.forward, self.backward)
        )
        least = [(number, int(size * times)) for number, size in (self.least_forward, self.least_backward)]
        return Traffic(self.block, forward, backward, least[0], least[1], once=int(self.once * times))


@dataclass(frozen=True)
class Report(Shown):
    """The outcome of `verify` or `audit`. `drawn`: what `report` draws, if plans were compared with a model.

    `fixed`: an audited plan in its own dialect, corrected, if a correction passed.
    """

    ok: bool
    findings: tuple[Finding, ...] = ()
    gradients: dict[str, float] = field(default_factory=dict)
    forward: float | None = None
    tp_size: int = 1
    details: dict[str, Any] = field(default_factory=dict)
    drawn: Drawn | None = field(default=None, compare=False, repr=False)
    fixed: Any = field(default=None, compare=False, repr=False)

    @property
    def verdict(self) -> str:
        """Return the outcome in one line, with the checks that did not run."""
        outcome = str(self.details.get("verdict") or ("passed" if self.ok else "failed"))
        left_out = self.details.get("not_checked") or {}
        number = len(left_out) + len(self.details.get("checked") or ())
        return f"{outcome}; {len(left_out)} of {number} checks not run: {', '.join(left_out)}" if left_out else outcome

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: what `autoplan verify --json` prints. JSON has no NaN: such errors are null."""
        report: dict[str, Any] = finite(plain(replace(self, drawn=None, fixed=None)))
        del report["drawn"], report["fixed"]
        return report

    def report(self, path: str | PathLike[str]) -> None:
        """Write a page to look at: one HTML file, with the findings at the boxes that they are about."""
        done_above("Report.report", self, path)


Verdict = Literal["exact", "wrong", "failed", "refused", "not comparable", "cannot run"]


@dataclass(frozen=True)
class Score:
    """One architecture on the scoreboard: its tiny clone, planned and verified.

    `verdict`: exact; wrong (numbers differ); failed (autoplan or the sharded model raised, or ran out of time); refused
    (nothing can be split); not comparable (the unsharded model's numbers are NaN); cannot run (nor can the unsharded
    model). `split` of `counted` parameters with two dims or more are sharded; replicated tables and latents are not
    counted, `unused` ones are. `forward`, `backward`: all-reduces in a block of the main stack, on average. With
    sequence parallelism, `regions` is how often a block of the main stack gathers the sequence, on average, and `uncut`
    why the stream is not sharded (then the verdict is that of the plan without it). `recomputed`, with checkpointing:
    how many blocks are checkpointed (all, or it failed), how many of them ran again.
    """

    model_type: str
    class_name: str
    verdict: Verdict
    reason: str = ""
    split: int = 0
    counted: int = 0
    whole: tuple[str, ...] = ()  # patterns of counted parameters that are replicated although they were used, and why
    unused: tuple[str, ...] = ()  # patterns of parameters that no run of the model used
    forward: float | None = None
    backward: float | None = None
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)  # of one call, measured on rank 0
    scoped: int = 0  # calls whose literals are rewritten at run time
    error: float | None = None  # the largest error of outputs and gradients
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    regions: float | None = None
    uncut: str = ""
    communication: tuple[Traffic, ...] = ()  # measured, block by block
    recomputed: tuple[int, int] | None = None
    not_checked: tuple[str, ...] = ()  # checks that do not apply to this model

    @property
    def ratio(self) -> float | None:
        """Return the bytes that blocks moved for each byte that their split needs, the worst of them."""
        return max((block.ratio for block in self.communication if block.ratio is not None), default=None)

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
    checkpointing: str = ""
    mesh: str = ""
    cp_size: int = 1

    @property
    def ok(self) -> bool:
        return not any(score.verdict in ("wrong", "failed") for score in self.scores)

    def totals(self) -> dict[str, int]:
        """Return how many architectures have each verdict."""
        totals: dict[str, int] = dict.fromkeys(get_args(Verdict), 0)
        for score in self.scores:
            totals[score.verdict] += 1
        return totals

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: what `autoplan scoreboard --json` prints."""
        board: dict[str, Any] = finite(plain(self)) | {"ok": self.ok, "totals": self.totals()}
        for score, row in zip(self.scores, board["scores"], strict=True):
            row |= {"share": score.share, "ratio": score.ratio}
        return board
