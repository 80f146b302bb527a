"""What will be done to a live model, decided when the plan is made: sites, edits, rules; and by which means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Edit", "ExpertSite", "HeadSite", "HookSite", "Means", "ParameterRule", "Runtime", "ScopedCall"]


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
    "reduce_scatter" (execute/sequence/moves.py); "share" changes nothing, but notes that a value is a share of the
    positions, in case a caller has it collected. Where branches of a "block" share a sum, "withhold" keeps a
    part back and gives zeros (of the share that `dim` and `layout` name), which "join" adds to the next part before
    it is summed.
    """

    pattern: str
    side: Literal["input", "output"]
    path: tuple[Any, ...]
    action: Literal[
        "copy",
        "reduce",
        "scale",
        "gather",
        "mean",
        "scatter",
        "gather_whole",
        "gather_sum",
        "reduce_scatter",
        "share",
        "withhold",
        "join",
        "block",
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
    time that a run of the module comes there, "@4" for only calls whose first argument has four dims, "!64" for only
    those whose first argument is not 64 wide.
    `arguments`: literals as (path into args/kwargs, (what each rank's Python passes there, what each must pass)).
    `copies`: argument paths whose gradient is summed.
    `reduce`: "sum" | "mean" | "norm" | "spread" | "length" | "embedding" | "row" | "gather" | "attention".
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
    draws: bool = False  # are random numbers drawn in eval mode too?
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

    def __str__(self) -> str:
        """What is out of the ordinary."""
        said = ("the stream is cut along the sequence" if self.sequence else "",
                "" if self.scoped else "no call inside a module's forward is changed",
                f"left whole: {', '.join(self.whole)}" if self.whole else "",
                "" if self.experts else "experts are not dealt out")  # fmt: skip
        return "; ".join(filter(None, said))
