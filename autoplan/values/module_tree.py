"""A model's modules as plain data: the tree, the parameters, and possible inputs. No torch, no meaning.

A module that is registered under several names is one node with several names. Names are labels: to print, and to refer
to the model. Classes are numbers: equal numbers mean the same class, and nothing more is known of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

Feed = Literal["text", "vision", "audio", "other"]
Mask = Literal["causal", "bidirectional"]


class NamedModules(Protocol):
    """The methods of a torch module that rooms without torch use: the names of its descendants."""

    def named_children(self) -> Iterable[tuple[str, Any]]: ...

    def named_modules(self, *, remove_duplicate: bool) -> Iterable[tuple[str, Any]]: ...

    def named_parameters(self, *, remove_duplicate: bool) -> Iterable[tuple[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter as its module holds it. Tied parameters share `id`."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    id: int


@dataclass(frozen=True)
class ModuleNode:
    """One module. `children` are node numbers with their keys, in order of definition.

    `container`: it only holds modules (a list, a dict) or runs them one after the other, without parameters of its own.
    `inputs`: the modalities that the arguments of its forward suggest; `stem`: what it reads if it comes first (a table
    of ids, a convolution over an image or a signal); `masks`: the attention masks that its forward builds; `generates`:
    it can generate text token by token; `reads` and `writes`: widths of a linear or convolution; `runs`: it may
    have a forward (a list of parameters has none).
    """

    names: tuple[str, ...]
    class_id: int
    class_name: str
    container: bool
    parameters: tuple[ParameterShape, ...]
    children: tuple[tuple[str, int], ...]
    inputs: frozenset[Feed] = frozenset()
    stem: Feed | None = None
    masks: frozenset[Mask] = frozenset()
    generates: bool = False
    reads: int | None = None
    writes: int | None = None
    runs: bool = True

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class ModuleTree:
    """All modules of a model; node 0 is the model itself."""

    nodes: tuple[ModuleNode, ...]
    _sizes: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def by_name(self) -> dict[str, int]:
        return {name: number for number, node in enumerate(self.nodes) for name in node.names}

    @cached_property
    def parents(self) -> dict[int, tuple[int, ...]]:
        """Return the modules that hold each module, the one that defines it first."""
        parents: dict[int, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for _, child in node.children:
                parents.setdefault(child, []).append(number)
        return {child: tuple(dict.fromkeys(holders)) for child, holders in parents.items()}

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(dict.fromkeys(child for _, child in node.children)) for node in self.nodes)

    def children(self, number: int) -> tuple[int, ...]:
        """Return the modules held by this one, each once."""
        return self._children[number]

    def subtree(self, number: int) -> tuple[int, ...]:
        """Return the module and all its descendants, each once, in order of definition."""
        visited: dict[int, None] = {}
        pending = [number]
        while pending:
            current = pending.pop()
            if current not in visited:
                visited[current] = None
                pending.extend(reversed(self.children(current)))
        return tuple(visited)

    def parameters(self, number: int) -> tuple[ParameterShape, ...]:
        """Return all parameters of the module and its descendants, in order of definition."""
        return tuple(parameter for below in self.subtree(number) for parameter in self.nodes[below].parameters)

    def bytes(self, number: int) -> int:
        """Return the bytes of all parameters of the module and its descendants, tied ones counted once."""
        if number not in self._sizes:
            self._sizes[number] = sum({p.id: p.bytes for p in self.parameters(number)}.values())
        return self._sizes[number]

    def depth(self, number: int) -> int:
        """Return the height of the tree below the module: 0 without children; containers do not count as a level."""
        below = [self.depth(child) for child in self.children(number)]
        return max(below, default=0) + (1 if below and not self.nodes[number].container else 0)
