"""Options of a caller, as frozen values that reject wrong ones; `plan` and `parallelize` take them as keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from autoplan.common.errors import AutoplanError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

Request: TypeAlias = "bool | str | Callable[[str, nn.Module], bool | str]"

MOST_RANKS = 1 << 16
PROOFS = ("graph", "ranks", "none")
UNEVEN = ("never", "blocks")
TRIAL_SECONDS = 300.0  # most trials take seconds, but a search for wrong cuts tries up to 32 plans
MODES = ("block", "submodule", "selective")  # checkpointing modes
SCOPES = {"text": ("decoder", "encoder"), "vision": ("vision",), "audio": ("audio",)}  # kinds of stacks by name
KINDS = ("decoder", "encoder", "vision", "audio", "other")
GUARDS = ("refuse", "warn", "off")
FROZEN = ("units", "root", "ignore")


@dataclass(frozen=True)
class Wish:
    """Sizes and options of a plan. `ep_size`: ranks that experts are divided over, of tp or (with tp_size=1) others.

    `strict` raises if an axis is not divisible. `prove`: "graph" (a trial of a tiny clone on simulated ranks, and the
    recorded graph), "ranks" (everything that verify does, too), or "none". `trial_seconds`: the trial's time limit.
    `uneven`: "blocks" lets some ranks have one block of a quantised weight more than others.
    """

    tp_size: int = 1
    ep_size: int = 1
    sequence_parallel: bool = False
    strict: bool = False
    prove: str = "graph"
    trial_seconds: float = TRIAL_SECONDS
    uneven: str = "never"
    cp_size: int = 1

    def __post_init__(self) -> None:
        check_ranks("tp_size", self.tp_size)
        check_expert_size(self.tp_size, self.ep_size)
        check_context_size(self.cp_size, self.tp_size, self.ep_size)
        _yes_or_no(self, "sequence_parallel", "strict")
        _choose("prove", self.prove, PROOFS)
        _choose("uneven", self.uneven, UNEVEN)
        number = isinstance(self.trial_seconds, int | float) and not isinstance(self.trial_seconds, bool)
        if not number or not self.trial_seconds > 0:
            raise AutoplanError(f"trial_seconds={self.trial_seconds!r}", hint="pass a number of seconds above 0")

    @property
    def ranks(self) -> int:
        """The number of ranks that parameters and the sequence are sharded over."""
        return self.splits * self.cp_size

    @property
    def splits(self) -> int:
        """The number of ranks that parameters are sharded over."""
        return max(self.tp_size, self.ep_size)


@dataclass(frozen=True)
class TensorParallel:
    """Behaviour of a model that is sharded over tp.

    `gather_logits`: return full logits; None: only without gradients. `sequence_padding`: "error", or "pad" a sequence
    that is not divisible. `path_guard`: what to do about a call that takes a way through the model's code that is not
    in the plan: "refuse", "warn" or "off".
    """

    gather_logits: bool | None = None
    sequence_padding: str = "error"
    reproducible_forward: bool = False
    path_guard: str = "refuse"

    def __post_init__(self) -> None:
        _yes_or_no(self, "reproducible_forward")
        if self.gather_logits is not None:
            _yes_or_no(self, "gather_logits")
        _choose("sequence_padding", self.sequence_padding, ("error", "pad"))
        _choose("path_guard", self.path_guard, GUARDS)


@dataclass(frozen=True)
class Checkpointing:
    """Activation checkpointing: True (full blocks), a mode, or a function (name, block) -> any of these or False.

    `scope`: "all", "text", "vision", "audio", or several.
    """

    blocks: Request = False
    scope: str | Iterable[str] = "all"

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, bool) and not callable(self.blocks) and self.blocks not in MODES:
            raise AutoplanError(
                f"activation_checkpointing={self.blocks!r}",
                hint=f"choose True, {', '.join(map(repr, MODES))}, or a function (name, block) -> mode",
            )
        if not isinstance(self.scope, str | Iterable):
            raise AutoplanError(f"checkpoint_scope={self.scope!r}", hint=f"choose from all, {', '.join(SCOPES)}")
        object.__setattr__(self, "scope", self.scope if isinstance(self.scope, str) else tuple(self.scope))
        self.kinds()

    def kinds(self) -> set[str]:
        """Return the kinds of stacks in the scope."""
        chosen: set[str] = set()
        for name in (self.scope,) if isinstance(self.scope, str) else self.scope:
            if not isinstance(name, str) or name not in ("all", *SCOPES, *KINDS):
                raise AutoplanError(
                    f"checkpointing scope {name!r} is not a kind of stack", hint=f"choose from all, {', '.join(SCOPES)}"
                )
            chosen.update(KINDS if name == "all" else SCOPES.get(name, (name,)))
        return chosen


@dataclass(frozen=True)
class DataParallel:
    """Options for sharding over data-parallel ranks with FSDP2 (see `parallelize`). None is the default of each."""

    mp_policy: MixedPrecisionPolicy | str | bool | None = None
    offload_policy: OffloadPolicy | None = None
    cpu_offload: bool = False
    reshard_after_forward: bool | int | None = None
    prefetch: int | tuple[int, int] | None = None
    frozen: str = "units"

    def __post_init__(self) -> None:
        _yes_or_no(self, "cpu_offload")
        if self.cpu_offload and self.offload_policy is not None:
            raise AutoplanError(
                "cpu_offload=True and offload_policy were both given",
                hint="cpu_offload is short for CPUOffloadPolicy()",
            )
        if not (self.mp_policy is None or self.mp_policy == "bf16" or isinstance(self.mp_policy, bool)):
            _one_of_fsdp("mp_policy", self.mp_policy, "MixedPrecisionPolicy", 'None, "bf16" or ')
        if self.offload_policy is not None:
            _one_of_fsdp("offload_policy", self.offload_policy, "OffloadPolicy", "None or ")
        reshard = self.reshard_after_forward
        if not (reshard is None or isinstance(reshard, bool) or _is_count(reshard)):
            raise AutoplanError(
                f"reshard_after_forward={reshard!r}",
                hint="choose None, True, False, or the number of ranks over which to keep weights",
            )
        _choose("frozen", self.frozen, FROZEN)
        if any(not isinstance(depth, int) or isinstance(depth, bool) or depth < 0 for depth in self.depths):
            raise AutoplanError(f"prefetch={self.prefetch!r}", hint="pass a number of units, or (forward, backward)")

    def asked(self) -> list[str]:
        """Return the names of options that are not the default."""
        return [name for name, value in vars(self).items() if value != getattr(DataParallel, name)]

    def check(self, shards: int) -> None:
        """Raise on options without effect for this number of shards (0: the mesh has no such dim)."""
        reshard = self.reshard_after_forward
        if shards and reshard is not None and not isinstance(reshard, bool) and shards % reshard:
            raise AutoplanError(
                f"reshard_after_forward={reshard}: {shards} sharding ranks cannot form groups of {reshard}",
                hint="choose a divisor of it, True or False",
            )
        if not shards and self.asked():
            raise AutoplanError(
                f"{', '.join(self.asked())} was requested, but the mesh has no dim to shard data-parallel over",
                hint='name a dim "dp_shard", or pass mesh_dims={"dp_shard": name}',
            )

    @property
    def depths(self) -> tuple[Any, Any]:
        """The number of units to prefetch in forward and in backward; 0: FSDP2's own choice."""
        if self.prefetch is None:
            return (0, 0)
        if isinstance(self.prefetch, tuple) and len(self.prefetch) == 2:
            return self.prefetch
        return (self.prefetch, self.prefetch)


@dataclass(frozen=True)
class Options:
    """All options of `parallelize`. `strict`: refuse a plan that was not proven."""

    tensor: TensorParallel = field(default_factory=TensorParallel)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    data: DataParallel = field(default_factory=DataParallel)
    strict: bool = False

    def __post_init__(self) -> None:
        for name, group in _GROUPS.items():
            if not isinstance(getattr(self, name), group):
                raise AutoplanError(f"options.{name}={getattr(self, name)!r}", hint=f"give {group.__name__}(...)")
        _yes_or_no(self, "strict")

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Options:
        """Return the options for these keywords of `parallelize`."""
        rest = dict(keywords)
        checkpointing = {own: rest.pop(name) for own, name in _CHECKPOINTING_KEYWORDS.items() if name in rest}
        grouped = [
            {name.name: rest.pop(name.name) for name in fields(group) if name.name in rest}
            for group in (TensorParallel, DataParallel)
        ]
        strict = rest.pop("strict", False)
        if rest:
            raise TypeError(f"parallelize() got an unexpected keyword argument {next(iter(rest))!r}")
        return cls(TensorParallel(**grouped[0]), Checkpointing(**checkpointing), DataParallel(**grouped[1]), strict)


_GROUPS: dict[str, type[Any]] = {"tensor": TensorParallel, "checkpointing": Checkpointing, "data": DataParallel}
_CHECKPOINTING_KEYWORDS = {"blocks": "activation_checkpointing", "scope": "checkpoint_scope"}


class Keywords(TypedDict, total=False):
    """The keywords of `parallelize` that make up its `Options`."""

    gather_logits: bool | None
    sequence_padding: str
    reproducible_forward: bool
    path_guard: str
    activation_checkpointing: Request
    checkpoint_scope: str | Iterable[str]
    mp_policy: MixedPrecisionPolicy | str | bool | None
    offload_policy: OffloadPolicy | None
    cpu_offload: bool
    reshard_after_forward: bool | int | None
    prefetch: int | tuple[int, int] | None
    frozen: str
    strict: bool


def check_ranks(name: str, size: Any) -> None:
    """Raise unless the number of ranks is valid."""
    if not _is_count(size) or size > MOST_RANKS:
        raise AutoplanError(f"{name} is {size!r}", hint=f"pass an integer from 1 to {MOST_RANKS}")


def check_context_size(cp_size: int, tp_size: int = 1, ep_size: int = 1) -> None:
    """Raise if the number of ranks of context parallelism is invalid, or does not go with the other sizes."""
    check_ranks("cp_size", cp_size)
    if cp_size > 1 and ep_size not in (1, tp_size):
        raise AutoplanError(
            f"cp_size={cp_size} with ep_size={ep_size}: with context parallelism, experts are placed on the tp ranks",
            hint="valid: ep_size=1 (each expert is sharded) and ep_size=tp_size",
        )


def check_expert_size(tp_size: int, ep_size: int) -> None:
    """Raise unless experts are on the ranks of tp, or nothing else is split."""
    check_ranks("ep_size", ep_size)
    if ep_size > 1 and tp_size > 1 and ep_size != tp_size:
        raise AutoplanError(
            f"ep_size={ep_size} with tp_size={tp_size}: experts are placed on the tp ranks, or on ranks of their own",
            hint=f"valid: ep_size=1 (each expert is sharded), ep_size={tp_size}, or any ep_size with tp_size=1",
        )


def check_argument(name: str, value: Any, kinds: type | tuple[type, ...], hint: str) -> None:
    """Raise if an argument has another type; a bool does not count as a number."""
    wanted = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
        raise AutoplanError(f"{name} is {shown}, a {type(value).__name__}", hint=hint)


_UNITS = {"gib": 2**30, "mib": 2**20, "kib": 2**10, "tib": 2**40, "gb": 10**9, "mb": 10**6, "kb": 10**3, "tb": 10**12,
          "g": 10**9, "": 1}  # fmt: skip


def bytes_in(text: str) -> int | None:
    """Return the bytes of a size such as "80GB", "79 GiB" or "5000"; None for other text."""
    text = text.replace(" ", "").lower()
    for ending, unit in _UNITS.items():
        number = text.removesuffix(ending)
        if text.endswith(ending) and number.isascii() and number.replace(".", "", 1).isdigit() and len(number) < 20:
            return int(float(number) * unit)
    return None


def check_count(name: str, value: Any) -> None:
    """Raise unless the value is an integer from 1 on."""
    if not _is_count(value):
        raise AutoplanError(f"{name} is {value!r}", hint="pass an integer from 1")


def _choose(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise AutoplanError(f"{name}={value!r}", hint=f"choose one of {', '.join(map(repr, choices))}")


def _yes_or_no(of: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(of, name), bool):
            raise AutoplanError(f"{name}={getattr(of, name)!r}", hint="choose True or False")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _one_of_fsdp(name: str, value: Any, kind: str, besides: str) -> None:
    import torch.distributed.fsdp as fsdp

    if not isinstance(value, getattr(fsdp, kind)):
        raise AutoplanError(f"{name}={value!r}", hint=f"choose {besides}a {kind}")
