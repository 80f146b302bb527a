"""The executors of instructions: one function for each class, registered in the file that defines it.

An executor takes an instruction and the module at which it acts (`At`). It is called once, when a plan is applied, and
computes in advance whatever it can. What it returns runs on every call of the model:

    Boundary      a function of the tensor, or `Around`
    CallRewrite   a function of the torch function, its args and its kwargs
    AroundModule  `Around`: what is done before and after a run of the module
    IntegerEdit   a function that undoes the edit, which was made at once
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.execute.collectives import RankGroup, in_backward
from autoplan.execute.random_streams import SharedRandomness
from autoplan.patches.patched import Kept
from autoplan.values import Instruction

# Hooks that a compiler traces inside a checkpointed block.
#
# The problem: hooks of one run share state (which module is running, how long a sequence is) in lists that are made
# when a plan is applied. Inside a checkpointed block, torch.compile takes any change of outside state for a side
# effect that recomputation must repeat, and breaks the graph there; the rest of the model then runs in pieces.
#
# Our hooks undo what they note before the block ends, so there is nothing to repeat and the check is switched off. It
# is switched off for our hooks only: the side effects of the model's own code are still checked.


def unwatched(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`; in compiled code, without the compiler's check for side effects."""
    if not torch.compiler.is_compiling():
        return function(*args)
    from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as call  # a slow import

    return call(function, *args)


# Copy functions together with their closures.
#
# The problem: `copy.deepcopy` does not copy functions. A hook that closes over the state of a model would still use the
# original's state after the model has been copied.


def copied_with_closure(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a function, or of a list or tuple of functions, whose closures refer to copies too."""
    if isinstance(value, list) and id(value) not in memo:
        items: list[Any] = []
        memo[id(value)] = items
        items.extend(copied_with_closure(item, memo) for item in value)
        return items
    if type(value) is tuple:
        return tuple(copied_with_closure(item, memo) for item in value)
    if isinstance(value, partial):
        keywords = {name: copied_with_closure(item, memo) for name, item in value.keywords.items()}
        return partial(copied_with_closure(value.func, memo), *copied_with_closure(value.args, memo), **keywords)
    if not isinstance(value, FunctionType) or value.__closure__ is None:
        return copy.deepcopy(value, memo)
    if id(value) not in memo:
        cells = tuple(CellType() for _ in value.__closure__)
        new = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        new.__kwdefaults__ = value.__kwdefaults__
        memo[id(value)] = new
        for cell, before in zip(cells, value.__closure__, strict=True):
            cell.cell_contents = copied_with_closure(before.cell_contents, memo)
    return memo[id(value)]


# Parallel branches of a block that share one all-reduce: one withholds its partial sum, and the next one adds it.
#
# analyse/placement/sums.py finds these branches.
#
# A value is withheld only while its block runs. A branch that runs by itself is all-reduced by itself; the result of a
# branch that activation checkpointing recomputes by itself is never read.

Action = Callable[[torch.Tensor], torch.Tensor]


class Branches:
    """The partial sums withheld in each running block, innermost block last."""

    def __init__(self) -> None:
        self.running: list[list[torch.Tensor]] = []
        self.apart = False  # whether every branch is all-reduced by itself

    def enter(self) -> None:
        """Note that a block begins."""
        self.running.append([])

    def leave(self, name: str, failed: bool) -> None:
        """Note that a block ends, and raise if a withheld sum is left over."""
        left = self.running.pop() if self.running else []
        if left and not failed:
            raise PlanMismatchError(
                f"{name}: the branch that should add another branch's partial sum did not run",
                hint="this call takes a path that was not traced; plan again with inputs= that cover it",
            )

    def withhold(self, part: torch.Tensor, summed: Action, zeros: Action) -> torch.Tensor:
        """Keep a partial sum for the next branch and return zeros; outside a block, return the sum."""
        if self.apart or not self.running:
            again = not self.apart and not torch.compiler.is_compiling() and in_backward()
            return part if again else summed(part)
        self.running[-1].append(part)
        return zeros(part)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Return a partial sum plus the withheld one."""
        withheld = self.running[-1] if self.running and not self.apart else []
        return part + withheld.pop() if withheld else part


# The state that the hooks of one sharded model share on one rank while its forward runs.


def cannot_be_pickled() -> AutoplanError:
    """Return the error for pickling a sharded model."""
    return AutoplanError(
        "a sharded model cannot be pickled: it holds a shard of each weight, and references process groups",
        hint="autoplan.save_weights(model, folder), or torch.distributed.checkpoint of model.state_dict(); "
        "copy.deepcopy(model) works",
    )


@dataclass
class Running:
    """The state that the hooks of one sharded model share on one rank."""

    mesh: DeviceMesh
    group: RankGroup
    gather_logits: bool | None  # None: only where no gradient is computed
    randomness: SharedRandomness
    frames: list[str] = field(default_factory=list)
    whole_logits: bool = False  # whether logits are gathered where they leave the head
    split_loss: bool = True  # whether the model's own loss may work on split logits
    loss: bool = False  # whether it does so now: logits leave the head as SplitLogits
    draws_unseen: bool = True  # whether arguments not seen while tracing may make it draw
    outputs: tuple[Any, ...] = ()  # the paths of the model's outputs, in all forms that were recorded
    draws: bool = True  # whether a forward may draw random numbers; if not, compiled code leaves the streams alone
    sequence_padding: str = "error"
    lengths: dict[str, int] = field(default_factory=dict)  # the true length of each sequence that is cut
    branches: Branches = field(default_factory=Branches)
    depth: int = 0
    context: bool = False  # whether outputs hold each rank's own positions only
    picks: str = ""  # the argument of this call that may select positions
    can_run_whole: bool = False  # whether calls with a cache are run whole (hooks/root.py)
    runs_whole: bool = False  # whether this one is
    more_groups: dict[str, RankGroup] = field(default_factory=dict)  # with a second split: the groups "cp" and "all"
    # objects that modules share (a config), what they held, and modules' copies, each with the attribute edited there
    holders: list[tuple[Any, dict[str, Any], list[tuple[Any, str]]]] = field(default_factory=list)

    @property
    def groups(self) -> dict[str, RankGroup]:
        """Return the rank groups by the name that instructions give in `over`."""
        return {"": self.group, **self.more_groups}

    @property
    def sequence(self) -> RankGroup:
        """Return the ranks over which sequences are sharded."""
        return self.more_groups.get("cp", self.group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_pickled()

    def __copy__(self) -> Running:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        """Return the state of a copied model, on the same ranks."""
        copied = memo[id(self)] = replace(self)
        for name, value in vars(self).items():
            if name not in ("mesh", "group"):
                setattr(copied, name, copy.deepcopy(value, memo))
        return copied

    def may_draw(self, module: nn.Module) -> bool:
        """Return whether a module that runs now may draw random numbers. The model's own checkpointing runs it again in
        backward, outside the model's forward."""
        randomness = self.randomness
        return randomness.active or randomness.always or module.training

    def copy_holder(self, shared: Any, edited: str) -> Any:
        """Return a copy of an object that modules share, which keeps all but the edited attribute equal to it."""
        copies = next((copies for holder, _, copies in self.holders if holder is shared), None)
        if copies is None:
            copies = []
            self.holders.append((shared, dict(vars(shared)), copies))
        copies.append((own := copy.copy(shared), edited))
        return own

    def follow_holders(self) -> None:
        """Set in the copies what has changed (an attention implementation, say)."""
        for shared, held, copies in self.holders:
            for name, value in vars(shared).items():
                if held.get(name, held) is not value:
                    held[name] = value
                    for own, edited in copies:
                        vars(own).update({} if name == edited else {name: value})

    @property
    def returns_whole_logits(self) -> bool:
        """Return whether logits are gathered: by default only without gradients, where no loss takes them split."""
        return not torch.is_grad_enabled() if self.gather_logits is None else self.gather_logits


@dataclass(frozen=True)
class At:
    """The place where an instruction acts: a module with its name, and the running state of its model. `names` are the
    arguments of the module's forward, in order."""

    module: nn.Module
    name: str
    names: tuple[str, ...]
    running: Running
    over: str = ""  # the ranks that communicate: see `Instruction`

    @property
    def group(self) -> RankGroup:
        return self.running.groups[self.over]

    @property
    def where(self) -> str:
        """Return the name of the module as errors show it."""
        return self.name or "the model"


@dataclass(frozen=True)
class Around:
    """The actions of an executor around a module: `enter` maps args and kwargs, `leave` maps the output.

    `begin` and `end` are called on the way in and out; `end` also runs (with True) when the module raised and its
    output is lost. `kept`: patches elsewhere that last as long as this does.
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
                raise TypeError(f"{kind.__name__} already has an executor: {EXECUTORS[kind].__qualname__}")
            EXECUTORS[kind] = function
        return function

    return register


def runs(*kinds: type[Instruction]) -> Callable[[Any], Any]:
    """Register what runs on every call of these classes: a function of the instruction, its place, the torch function,
    its args and its kwargs. Nothing is computed in advance."""

    def register(function: Any) -> Any:
        executes(*kinds)(wraps(function)(lambda planned, at: partial(function, planned, at)))
        return function

    return register


def execute(instruction: Instruction, at: At) -> Any:
    """Run the executor of the instruction's class and return its result."""
    executor = EXECUTORS.get(type(instruction))
    if executor is None:
        raise AutoplanError(
            f"no executor for {type(instruction).__name__}, which the plan requires at {at.where}",
            hint="import the module that registers its executor (docs/howto/add-an-instruction.md)",
        )
    return executor(instruction, replace(at, over=instruction.over) if instruction.over else at)


def other_branch(what: str) -> PlanMismatchError:
    """Return the error for a module that runs another branch than the planned one."""
    return PlanMismatchError(
        what, hint="the module takes another branch than when it was planned; plan again with inputs= that cover it"
    )
