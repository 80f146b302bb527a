"""Names and functions of the library that a model comes from, as one value.

Rooms below hf/ need them and may not name the library. So the type is here, hf/conventions.py fills it in, and it is
registered when the package is imported.
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
    """A tensor joined from several of a checkpoint, by pattern. `stacked`: each pattern has one entry per expert;
    `turned`: rows of an entry become columns."""

    patterns: tuple[str, ...]
    stacked: bool
    turned: bool = False


class Conversion(Protocol):
    """Tensors of a model that are made from several (or pieces of) tensors of a checkpoint."""

    keys: list[str]

    @property
    def moves(self) -> bool:
        """Return whether it only moves numbers."""

    def targets(self) -> list[str]:
        """Return the names of its results in the model."""

    def add(self, name: str, key: str, pattern: str, shape: tuple[int, ...]) -> None:
        """Add one input tensor."""

    def make(self, model: Any, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the full tensors made from those that `read` returns. `model` has the shapes of its parameters."""


@dataclass(frozen=True)
class CheckpointNames:
    """Names of a model's tensors in checkpoints.

    `prefix`: precedes names of the base in checkpoints of the complete model. `rename` returns a key's name in the
    model, and the pattern of the conversion that it goes into, if any; `conversion` begins one. `join`: what a
    pattern's conversion joins, if that is all it does. `may_lack` and `may_exceed`: regular expressions of keys that
    may be missing, or superfluous.
    """

    prefix: str
    rename: Callable[[str], tuple[str, str | None]]
    conversion: Callable[[str, str], Conversion]  # (pattern, first target)
    join: Callable[[str], Join | None]
    may_lack: tuple[str, ...] = ()
    may_exceed: tuple[str, ...] = ()


@dataclass(frozen=True)
class BaseName:
    """The base model's name of a tensor; None for a part of an adapter. `copied`: trained in place of the original,
    initially a copy of it."""

    name: str | None
    copied: bool = False


@dataclass(frozen=True)
class CheckpointWriter:
    """Functions that convert a model's tensors to a checkpoint.

    `groups`: names whose tensors are converted together. `convert`: the tensors of a group as a checkpoint holds them.
    `settings` writes the files beside the weights into a folder, for a class; None if there are none. `copies`: names
    of tied tensors that are written under the other name; `left_out`: names that are never written.
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
    """Names and functions of one library.

    Names. `targets` is the argument that makes a forward compute a loss; names of such arguments contain one of
    `target_words`. `loss`, `logits` and `hidden`: names of outputs. `cache_switch` makes a forward return a cache,
    `last_logits` makes it return those of the last tokens alone.
    `rate_words` are in the names of numbers that turn random draws on, `rate_suffix` ends those of dropout rates.
    `idle_words` are in the names of settings that do not affect how a forward computes.
    `saving` is the method that writes a checkpoint, `resizing` the one that changes the number of tokens; `adding`: the
    methods that add an adapter, and which argument is its name.
    `own_checkpointing`: the attribute that says that the library checkpoints a module itself, and the method that
    turns this off. `ends`: methods that return the input table and the output head. `hook_marks`: attributes by which
    a module remembers that the library's hooks are in place. `kernel_settings`: settings that choose a kernel, and the
    choice whose mathematics runs on fake tensors too;
    `kernels_on_gpu`: the choice for a GPU. `trusted`: packages whose code is assumed to compute the same on every path
    through it: this is checked against every plan when a version is adopted, not while a model runs.
    `idle_settings`: prefixes of the names of settings that change nothing that a plan is made from.

    Functions. `config_of`: the library's config of a module, None if it has none. `builder_of`: a function that builds
    another module of a class, with the config of a model. `base_path`: the path of the headless model in a model, which
    other systems build alone ("" for a model that is one). `checkpoint_names` and `checkpoint_writer` (with original
    names or not, and with the packed weight of each stored tensor, by name): see there. `shipped_plan`: the plan that
    comes with a model; `shipped_parts`: the same by where it is written, and notes on what else comes with it.
    `is_base`: whether this is the class that all models of the library inherit from. `is_transposed_linear`: whether a
    module multiplies by its weight (and not by the transposed weight, as a linear layer does). `stored_aliases`: names
    of stored tensors in a folder that have other names elsewhere, with these. `stored_weights`: the quantised weights
    in a folder, from its keys, a function that returns the shape of one, and one that reads one. `saves`: whether a
    module is a model of the library, with its own way to save itself. `adapters_of`: the names of the adapters in a
    model that wraps another for them; `base_of`: the wrapped model, or the model itself. `base_names`: the base's name
    of each tensor of a model that has adapters, by its name there; empty for a model without adapters. `adapted_as`:
    the adapters of a model, with initial values, put on another base. `parts_to_save`: the names of the tensors that
    `saving` writes, with such options; None if it writes all. `no_plan_because`: why a model ships no plan, or why that
    is not known of the installed version.
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
        """Return whether a number of this name turns random draws on."""
        return any(word in name for word in self.rate_words)


_handed_in: list[Conventions] = []


def hand_in(value: Conventions) -> None:
    """Register the library conventions (called once at import)."""
    _handed_in[:] = [value]


def conventions() -> Conventions:
    """Return the registered library conventions."""
    return _handed_in[0]
