"""What is known of the library that a model comes from: its words and its ways, as one value.

Rooms below hf/ need them and may not name the library, so the type stands here, hf/conventions.py fills it in, and it
is handed in when the package is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn

    from autoplan.values.quantised import PackedTensor, PackedWeight

    StoredTensor = tuple[PackedWeight, PackedTensor]


@dataclass(frozen=True)
class Join:
    """A tensor made of several of a checkpoint, side by side by pattern. `stacked`: each pattern has one entry an
    expert; `turned`: rows of an entry become columns."""

    patterns: tuple[str, ...]
    stacked: bool
    turned: bool = False


class Conversion(Protocol):
    """Tensors of a model that are made out of several (or parts of) tensors of a checkpoint, together."""

    keys: list[str]

    @property
    def moves(self) -> bool:
        """Does it do nothing but move numbers?"""

    def targets(self) -> list[str]:
        """What it makes, by names in the model."""

    def add(self, name: str, key: str, pattern: str, shape: tuple[int, ...]) -> None:
        """One more tensor that goes in."""

    def make(self, model: Any, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors, whole, of those that `read` gives. `model` says how large its parameters are."""


@dataclass(frozen=True)
class CheckpointNames:
    """How the tensors of a model are called in checkpoints.

    `prefix`: what checkpoints of the whole model have before the names of its base. `rename`: a key as the model has
    it, and the pattern of the conversion that it goes into, if any; `conversion` begins one. `join`: what a pattern's
    conversion puts together, if that is all it does. `may_lack` and `may_exceed`: regular expressions of keys that are
    harmless when they have no partner.
    """

    prefix: str
    rename: Callable[[str], tuple[str, str | None]]
    conversion: Callable[[str, str], Conversion]  # (pattern, first target)
    join: Callable[[str], Join | None]
    may_lack: tuple[str, ...] = ()
    may_exceed: tuple[str, ...] = ()


@dataclass(frozen=True)
class BaseName:
    """The base model's name of a tensor; None for a part of an adapter. `copied`: trained in its place, begun as a
    copy."""

    name: str | None
    copied: bool = False


@dataclass(frozen=True)
class CheckpointWriter:
    """How the tensors of a model are written.

    `groups`: names whose tensors are converted together. `convert`: the tensors of a group as a checkpoint holds them.
    `settings` writes what lies beside the weights into a folder, for a class; None where nothing does. `copies`: names
    of tied tensors that are left to the other name; `left_out`: names that are never written.
    """

    groups: Callable[[Iterable[str]], list[tuple[str, ...]]]
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    settings: Callable[[str | os.PathLike[str], type], None] | None = None
    copies: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PlanPart:
    """A piece of the plan that a model ships: keys relative to the module `prefix`, and where they were written."""

    prefix: str
    origin: str
    styles: Mapping[str, str]


@dataclass(frozen=True)
class Conventions:
    """The words and the ways of one library.

    Words. `targets` is the argument that makes a forward compute a loss; `target_words` are in the names of all such
    arguments. `loss`, `logits` and `hidden`: what outputs are called. `cache_switch` asks a forward for a cache,
    `last_logits` for those of the last tokens alone.
    `rate_words` are in the names of numbers that turn random draws on, `rate_suffix` ends those of dropouts.
    `idle_words` are in the names of settings that say nothing of how a forward computes.
    `saving` is the method that writes a checkpoint, `resizing` the one that changes the number of tokens; `adding`: the
    methods that bring an adapter, and which argument is its name.
    `own_checkpointing`: the attribute that says that the library checkpoints a module itself, and the method that
    ends it. `ends`: methods that return the input table and the output head. `hook_marks`: attributes by which a module
    remembers that the library's hooks are in place. `kernel_settings`: settings that choose a kernel, and the choice
    whose mathematics runs on fake tensors too;
    `kernels_on_gpu`: the choice that a GPU takes. `trusted`: packages whose code is taken to compute the same whichever
    way it goes: it is held against every plan when a version of them is taken up, not while a model runs.
    `idle_settings`: beginnings of the names of settings that change nothing of what a plan is made from.

    Ways. `config_of`: the library's config of a module, None if it has none. `builder_of`: how another module of a
    class, with the config of a model, is built. `base_path`: where the model without its head stands in a model,
    which other systems build alone ("" for a model that is one). `checkpoint_names` and `checkpoint_writer` (of
    original names or not, and of which packed weight a stored tensor is, by name): see there. `shipped_plan`: the
    plan that comes with a model; `shipped_parts`: the same by where it is written, and notes on what else comes
    with it. `is_base`: is this the class that all models of the library descend from? `is_transposed_linear`: does
    a module multiply by its weight (and not by the weight transposed, as a linear layer does)? `stored_aliases`:
    names in a folder of stored tensors that have others elsewhere, each with that one. `stored_weights`: the
    quantised weights in a folder, asked with its keys, what tells the shape of one, and what reads one. `saves`: is
    a module a model of the library, which saves itself? `adapters_of`: the names of the adapters in a model that
    wraps another for them; `base_of`: the model that it wraps, or itself. `base_names`: what the base calls each
    tensor of a model that has adapters, by its name there; empty for one that has none. `adapted_as`: the adapters of
    a model, as they were when they were made, put on another base. `parts_to_save`: the names of the tensors to which
    `saving` keeps, with such options; None where it writes all. `no_plan_because`: why a model has no plan that ships
    with it, or why that is not known of the installed version.
    """

    targets: str
    target_words: tuple[str, ...]
    loss: str
    logits: str
    hidden: str
    cache_switch: str
    last_logits: str
    rate_words: tuple[str, ...]
    rate_suffix: str
    idle_words: tuple[str, ...]
    saving: str
    resizing: str
    adding: tuple[tuple[str, int], ...]
    own_checkpointing: tuple[str, str]
    ends: tuple[str, str]
    hook_marks: tuple[str, ...]
    kernel_settings: tuple[tuple[str, str], ...]
    kernels_on_gpu: tuple[tuple[str, str], ...]
    trusted: tuple[str, ...]
    idle_settings: tuple[str, ...]
    config_of: Callable[[nn.Module], Any]
    builder_of: Callable[[type, nn.Module], Callable[[], nn.Module] | None]
    base_path: Callable[[nn.Module], str]
    checkpoint_names: Callable[[nn.Module], CheckpointNames]
    checkpoint_writer: Callable[[nn.Module, bool, Mapping[str, StoredTensor]], CheckpointWriter]
    shipped_plan: Callable[[Any], Mapping[str, str]]
    shipped_parts: Callable[[Any], tuple[tuple[PlanPart, ...], tuple[str, ...]]]
    is_base: Callable[[type], bool]
    is_transposed_linear: Callable[[nn.Module], bool]
    stored_aliases: Callable[[Path, tuple[str, ...]], Mapping[str, str]]
    stored_weights: Callable[
        [Path, tuple[str, ...], Callable[[str], tuple[int, ...]], Callable[[str], torch.Tensor]],
        tuple[PackedWeight, ...],
    ]
    saves: Callable[[nn.Module], bool]
    adapters_of: Callable[[nn.Module], tuple[str, ...]]
    base_of: Callable[[nn.Module], nn.Module]
    base_names: Callable[[nn.Module], Mapping[str, BaseName]]
    adapted_as: Callable[[nn.Module, nn.Module], nn.Module]
    parts_to_save: Callable[[nn.Module, Mapping[str, Any]], tuple[str, ...] | None]
    no_plan_because: Callable[[], str]

    def is_rate(self, name: str) -> bool:
        """Does a number of this name turn random draws on?"""
        return any(word in name for word in self.rate_words)


_handed_in: list[Conventions] = []


def hand_in(value: Conventions) -> None:
    """Register the library conventions (called once at import)."""
    _handed_in[:] = [value]


def conventions() -> Conventions:
    """Those that count."""
    return _handed_in[0]
