"""Who carries out an instruction: one executor for each class, registered in the file that does it.

An executor is a function of an instruction and of where it stands, called once when a plan is applied; whatever can be
known then is worked out then. What it returns runs on every call of the model:

    Boundary      a function of the tensor
    CallRewrite   a function of the torch function, its args and its kwargs
    AroundModule  `Around`: what is done before and after a run of the module
    IntegerEdit   a function that undoes what was done at once
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.execute.collectives import RankGroup, in_backward
from autoplan.execute.dropout import SharedRandomness
from autoplan.patches.patched import Kept
from autoplan.values import Instruction

# State of a run that hooks share: frames, parallel branches, copies of closures.

# Hooks that a compiler traces inside a checkpointed block.
#
# The problem: hooks of one run tell each other things (which module is running, how long a sequence is) by lists that
# are made when a plan is applied. Inside a checkpointed block a compiler takes any change of what lies outside for
# one that running the block again must repeat, and breaks its graph there; the rest of the model then runs piece by
# piece.
#
# What our hooks note they take back before the block ends, so there is nothing to repeat: torch is told not to watch.
# It is told for our hooks alone: what the model itself does in a block is watched as ever.


def unwatched(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in code that is being compiled."""
    from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as call  # a slow import

    return call(function, *args)


# Copy functions together with what they close over.
#
# The problem: `copy.deepcopy` takes a function for a constant. A hook that closes over the state of a model would go on
# to work with that of the original after the model has been copied.


def copied_with_closure(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a function, or of a list or tuple of them, in which closures refer to copies too."""
    if isinstance(value, list) and id(value) not in memo:
        found: list[Any] = []
        memo[id(value)] = found
        found.extend(copied_with_closure(item, memo) for item in value)
        return found
    if type(value) is tuple:
        return tuple(copied_with_closure(item, memo) for item in value)
    if isinstance(value, partial):
        given = {name: copied_with_closure(item, memo) for name, item in value.keywords.items()}
        return partial(copied_with_closure(value.func, memo), *copied_with_closure(value.args, memo), **given)
    if not isinstance(value, FunctionType) or value.__closure__ is None:
        return copy.deepcopy(value, memo)
    if id(value) not in memo:
        cells = tuple(CellType() for _ in value.__closure__)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        memo[id(value)] = made
        for cell, before in zip(cells, value.__closure__, strict=True):
            cell.cell_contents = copied_with_closure(before.cell_contents, memo)
    return memo[id(value)]


# Branches of a block that share a sum: what one withholds, the next one adds to its own.
#
# Which they are is found in analyse/placement/parallel_branches.py.
#
# A value is withheld only while its block runs. A branch that runs by itself is summed as if it had no neighbour; one
# that activation checkpointing runs again by itself, to get back what it saved, gives a result that is never read.

Action = Callable[[torch.Tensor], torch.Tensor]


class Branches:
    """What is withheld in each block that is running, the innermost last."""

    def __init__(self) -> None:
        self.running: list[list[torch.Tensor]] = []
        self.apart = False  # every branch is summed by itself

    def enter(self) -> None:
        """A block begins."""
        self.running.append([])

    def leave(self, name: str, failed: bool) -> None:
        """A block ends, and nothing may be left over."""
        left = self.running.pop() if self.running else []
        if left and not failed:
            raise PlanMismatchError(
                f"{name}: a branch's part of a sum was withheld, and the branch that should add it did not run",
                hint="the block ran in a way the plan's trace never saw; plan again with inputs= that show it",
            )

    def withhold(self, part: torch.Tensor, summed: Action, zeros: Action) -> torch.Tensor:
        """Zeros, while the next branch is to come."""
        if self.apart or not self.running:
            again = not self.apart and not torch.compiler.is_compiling() and in_backward()
            return part if again else summed(part)
        self.running[-1].append(part)
        return zeros(part)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """The part together with what was withheld."""
        held = self.running[-1] if self.running and not self.apart else []
        return part + held.pop() if held else part


# The state of one sharded model on one rank while its forward runs: what its hooks tell each other.


def cannot_be_pickled() -> AutoplanError:
    """For what a pickle of a sharded model meets first."""
    return AutoplanError(
        "a sharded model cannot be pickled: it holds a part of each weight, and names the ranks that hold the others",
        hint="autoplan.save_weights(model, folder), or torch.distributed.checkpoint of model.state_dict(); "
        "copy.deepcopy(model) works",
    )


@dataclass
class Running:
    """See above."""

    mesh: DeviceMesh
    group: RankGroup
    gather_logits: bool | None  # None: where no gradient is computed
    randomness: SharedRandomness
    frames: list[str] = field(default_factory=list)
    whole_logits: bool = False  # gathered where they leave their head
    split_loss: bool = True  # may a model's own loss work on split logits?
    loss: bool = False  # it is doing so: logits leave their head as SplitLogits
    draws_unseen: bool = True  # may a model that takes arguments not seen while tracing?
    draws: bool = True  # may a forward draw random numbers? Compiled code that does not leaves the streams alone
    sequence_padding: str = "error"
    lengths: dict[str, int] = field(default_factory=dict)  # the true length of each sequence that is cut
    branches: Branches = field(default_factory=Branches)
    depth: int = 0
    context: bool = False  # do outputs leave as each rank's own positions?
    picks: str = ""  # an argument of this call that may say which positions to go on with
    more_groups: dict[str, RankGroup] = field(default_factory=dict)  # beside another split: of "cp", of "all"

    @property
    def groups(self) -> dict[str, RankGroup]:
        """By what instructions say that they are over."""
        return {"": self.group, **self.more_groups}

    @property
    def sequence(self) -> RankGroup:
        """The ranks over which sequences are cut."""
        return self.more_groups.get("cp", self.group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_pickled()

    def __copy__(self) -> Running:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        """For a copied model, on the same ranks."""
        made = memo[id(self)] = replace(self)
        for name, value in vars(self).items():
            if name not in ("mesh", "group"):
                setattr(made, name, copy.deepcopy(value, memo))
        return made

    def may_draw(self, module: nn.Module) -> bool:
        """May a module that runs now draw random numbers? A checkpoint of the model's own runs it again in backward,
        outside of the model's forward."""
        randomness = self.randomness
        return randomness.active or randomness.always or module.training

    @property
    def returns_whole_logits(self) -> bool:
        """Whoever computes gradients has a loss to give logits to; whoever does not may do anything with them."""
        return not torch.is_grad_enabled() if self.gather_logits is None else self.gather_logits


@dataclass(frozen=True)
class At:
    """Where an instruction is carried out: a module by its name, and the state of the model while it runs. `names` are
    the arguments of the module's forward, in order."""

    module: nn.Module
    name: str
    names: tuple[str, ...]
    running: Running
    over: str = ""  # between which ranks: see `Instruction`

    @property
    def group(self) -> RankGroup:
        return self.running.groups[self.over]

    @property
    def where(self) -> str:
        """For errors."""
        return self.name or "the model"


@dataclass(frozen=True)
class Around:
    """What is done at a module: `enter` takes and returns args and kwargs, `leave` takes and returns the output.

    `begin` and `end` are called on the way in and out, `end` also when the module failed (True) and its output is lost.
    `kept`: what is patched elsewhere as long as this is done.
    """

    enter: Callable[[Any, Any], tuple[Any, Any]] | None = None
    leave: Callable[[Any], Any] | None = None
    begin: Callable[[], None] | None = None
    end: Callable[[bool], None] | None = None
    kept: Kept | None = None


Executor = Callable[[Any, At], Any]
Registered = TypeVar("Registered", bound=Executor)

EXECUTORS: dict[type[Instruction], Executor] = {}


def executes(*kinds: type[Instruction]) -> Callable[[Registered], Registered]:
    """Register a function as the executor of these classes; a class has one."""

    def register(function: Registered) -> Registered:
        for kind in kinds:
            if kind in EXECUTORS:
                raise TypeError(f"{kind.__name__} has an executor already: {EXECUTORS[kind].__qualname__}")
            EXECUTORS[kind] = function
        return function

    return register


def execute(instruction: Instruction, at: At) -> Any:
    """What the executor of the instruction's class makes of it."""
    executor = EXECUTORS.get(type(instruction))
    if executor is None:
        raise AutoplanError(
            f"nothing carries out {type(instruction).__name__}, which the plan wants at {at.where}",
            hint="import what registers its executor (docs/howto/add-an-instruction.md)",
        )
    return executor(instruction, replace(at, over=instruction.over) if instruction.over else at)


def other_branch(what: str) -> PlanMismatchError:
    """The module does something else than when it was planned."""
    return PlanMismatchError(
        what, hint="the module runs another branch than when it was planned; plan again with inputs= that show it"
    )
