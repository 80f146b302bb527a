"""Costs of a plan and the estimate of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

# Methods of values that are implemented in rooms above this one: printing, saving, exporting.
#
# `plan.save(path)` is public, but a Plan that imported the writer of plan files would depend on everything. So the
# methods are declared on the values with their names and docstrings, and the implementations are registered from the
# top of the package (`autoplan/conveniences.py`, when it is imported).

_done_by: dict[str, Callable[..., Any]] = {}


def provide(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Register implementations: "Plan.save" -> a function that takes the plan first."""
    _done_by.update(functions)


def done_above(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the registered implementation of `name` ("Plan.save")."""
    return _done_by[name](*args, **kwargs)


class Shown:
    """A value that is shown as text on a terminal, and as HTML in a notebook."""

    def __str__(self) -> str:
        """Return it as text, for a terminal."""
        return str(done_above(f"{type(self).__name__}.__str__", self))

    def _repr_html_(self) -> str:
        """Return it as HTML, for a notebook."""
        return str(done_above(f"{type(self).__name__}._repr_html_", self))


JOINED = " × "  # between the names of the dims of one message


# The cost of a split at run time, as values: the collective, its tensor, and the modules that share it.
#
# An entry of a plan holds them (`Entry.reduces`), instructions declare theirs (`Instruction.cost`). Code reads the
# fields; people read `str(cost)`, and this file is the one place that makes text of them.


@dataclass(frozen=True)
class Cost:
    """One collective: `does`, the word for it ("sum", "gather"), with the output, or with what `of` says.

    Gradients are summed backward, all else is done forward. `of` "call": it is done by one call inside the module.
    `parameter`: the one whose gradient it is; `shared_rows`: only of the rows that several ranks hold.
    `as_sequence_shard`: each rank keeps its own positions of the sum. `at`: the enclosing module that returns it.
    `shared_with`: others for which it is done, too; `with_next_branch`: the branch that runs after it does it for both.
    """

    does: str
    of: Literal["output", "call", "input-gradient", "parameter-gradient"] = "output"
    parameter: str = ""
    shared_rows: bool = False
    as_sequence_shard: bool = False
    at: str = ""
    shared_with: tuple[str, ...] = ()
    with_next_branch: bool = False

    @property
    def what(self) -> str:
        """Return the tensor and the pass, without those that share it."""
        if self.of == "input-gradient":
            return "input gradient (backward)"
        if self.of == "parameter-gradient":
            return f"gradient of {self.parameter}{' on shared rows' * self.shared_rows} (backward)"
        if self.of == "call":
            return "inside the module (forward)"
        along_sequence = ", sharded along the sequence" * self.as_sequence_shard
        return f"output{along_sequence} (forward)" + (f", where {self.at} returns it" if self.at else "")

    @property
    def done(self) -> str:
        return f"{self.does} {self.what}" if self.of == "call" else f"{self.does} of the {self.what}"

    def __str__(self) -> str:
        """
        >>> print(Cost("sum", "input-gradient", shared_with=("k_proj", "v_proj")))
        sum of the input gradient (backward), shared with k_proj, v_proj
        """
        with_next = ("the branch that runs after it",) if self.with_next_branch else ()
        others = ", ".join((*self.shared_with, *with_next))
        return f"{self.done}, shared with {others}" if others else self.done


# The cost of a step on one rank of a mesh, and the meshes: values that are printed, compared and saved.

TIE = 0.1  # relative speed: rankings of published layouts differ from the estimated ones by as much (docs/estimate.md)
TRAIN = ("full", "lora", "inference")  # uses of the model


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one rank at its peak, by purpose.

    `kept`: activations that backward needs. `temporary`: temporary buffers. `unsharded`: units of data parallelism that
    are gathered, and buffers of their messages. `cache`: keys and values that decoding keeps. `overhead`: the memory of
    the device, its libraries and its communicators.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    kept: int = 0
    temporary: int = 0
    unsharded: int = 0
    communication: int = 0
    cache: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind over one dim of the mesh in one step of a rank: how many, and the bytes of their full
    values (the output of a gather, the input of a reduction). `among`: the number of neighbours of the dim involved (0:
    all)."""

    dim: str
    kind: str
    number: int
    bytes: int
    among: int = 0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, all micro-batches and the optimizer. `exposed`: messages that nothing overlaps. `idle`: a
    stage of a pipeline waits for others."""

    compute: float = 0.0
    memory: float = 0.0
    exposed: tuple[tuple[str, float], ...] = ()
    optimizer: float = 0.0
    idle: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        messages = {f"messages over {dim}": seconds for dim, seconds in self.exposed}
        return {
            "operations": self.compute,
            "memory bandwidth": self.memory,
            **messages,
            "waiting for other pipeline stages": self.idle,
            "the update": self.optimizer,
        }

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Estimate(Shown):
    """One step of one rank. `peak`: bytes; it is reached in `phase` ("forward", "backward", "optimizer") at `where`.

    `flops`: of one step of this rank. `bars`: the relative error that each figure may have, with what it was compared
    to. `tokens`: of one step of all ranks. `moments`: phase, module and bytes of the highest moment in each module that
    is listed, in order. `dtype`: that of most weights, `dtype_origin`: where it is specified; `stored`: how quantised
    weights are stored. `concurrency`: for inference, the sequences of a rank whose keys and values are held, and
    `decoded_per_second`: the tokens that all ranks add to theirs. `matmuls`: the dtype that products of layers are
    computed in, if not that of the weights; `run_by`: the engine that runs what autoplan does not; `how`: the rest of
    the question.
    """

    model: str
    mesh: tuple[tuple[str, int], ...]
    batch: int
    sequence: int
    train: str
    parts: MemoryParts
    where: str
    phase: str
    messages: tuple[Sent, ...]
    flops: int
    time: StepTime | None = None
    tokens: int = 0
    device: str = ""
    bars: tuple[tuple[str, float, str], ...] = ()
    notes: tuple[str, ...] = ()
    moments: tuple[tuple[str, str, int], ...] = ()
    dtype: str = ""
    optimizer: str = ""
    dtype_origin: str = ""
    stored: str = ""
    concurrency: int = 0
    decoded_per_second: float = 0.0
    matmuls: str = ""
    run_by: str = ""
    how: tuple[str, ...] = ()

    @property
    def weights_text(self) -> str:
        """Return the dtype or format of the weights, and where it is specified."""
        origin = f" ({self.dtype_origin})" if self.dtype_origin else ""
        return f"weights in {self.stored}, others in {self.dtype}{origin}" if self.stored else (
            f"weights in {self.dtype}{origin}")  # fmt: skip

    @property
    def own_tokens(self) -> int:
        """Return how many tokens of each sequence a rank holds: fewer than all if it is sharded over ranks of cp."""
        return -(-self.sequence // dict(self.mesh).get("cp", 1))

    @property
    def peak(self) -> int:
        return self.parts.total

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.time.total if self.time is not None and self.time.total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: what `--json` prints."""
        data: dict[str, Any] = done_above("Estimate.to_dict", self)
        return data


def named_dims(mesh: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the dims of several ranks; with ranks of cp also the one that FSDP2 shards over, since without it weights
    are replicated."""
    sizes = dict(mesh)
    always = ("dp_shard",) if sizes.get("cp", 1) > 1 else ()
    return {name: size for name, size in sizes.items() if size > 1 or name in always} or {"dp_shard": 1}


def mesh_text(mesh: Iterable[tuple[str, int]]) -> str:
    sizes = named_dims(mesh)
    return "one rank" if sizes == {"dp_shard": 1} else " × ".join(f"{name} {size}" for name, size in sizes.items())


@dataclass(frozen=True)
class Row:
    """One mesh with one way to run on it. `binds`: the resource that is short, or that takes the most time; `missing`:
    bytes. `experts`: they are distributed over the ranks of tp, rather than each sharded over them."""

    estimate: Estimate
    checkpointing: bool | str
    sequence_parallel: bool
    reshard: bool | None
    accumulate: int
    fits: bool
    binds: str
    missing: int = 0
    experts: bool = False

    def narrow(self, memory: int) -> bool:
        """Return whether it fits, but would not if the estimate were off by its error bar."""
        bar = next((bar for name, bar, _ in self.estimate.bars if name == "memory"), 0.0)
        own = self.estimate.peak - self.estimate.parts.overhead
        return self.fits and self.estimate.peak + bar * own > memory

    def ties(self, first: Row) -> bool:
        """Return whether it is slower than `first` by less than the margin that distinguishes rows."""
        return self.fits and self.estimate.tokens_per_second >= (1 - TIE) * first.estimate.tokens_per_second

    @property
    def tp(self) -> int:
        return self.mesh.get("tp", 1)

    @property
    def cp(self) -> int:
        return self.mesh.get("cp", 1)

    @property
    def ep(self) -> int:
        return self.tp if self.experts else self.mesh.get("ep", 1)

    @property
    def mesh(self) -> dict[str, int]:
        return named_dims(self.estimate.mesh)

    def __str__(self) -> str:
        sizes = mesh_text(self.estimate.mesh)
        parts = [
            f"{sizes}, replicated" if self.estimate.train == "inference" and "dp_replicate" in self.mesh else sizes
        ]
        parts += ["experts apart"] if self.experts else []
        parts += ["sequence parallel"] if self.sequence_parallel else []
        parts += [f"checkpointing {'blocks' if self.checkpointing is True else self.checkpointing}"] if (
            self.checkpointing) else []  # fmt: skip
        parts += ["no reshard after forward"] if self.reshard is False else []
        parts += ["experts on ranks that exchange tokens"] if any(sent.among for sent in self.estimate.messages) else []
        own = f" × {self.estimate.own_tokens} tokens of a rank" if self.cp > 1 else ""
        return ", ".join([*parts, f"micro-batch {self.estimate.batch}{own}"])
