"""Who carries out an instruction: one executor for each class, registered in the file that does it.

An executor is a function of an instruction and of where it stands, called once when a plan is applied; whatever can be
known then is worked out then. What it returns runs on every call of the model:

    Boundary      a function of the tensor
    CallRewrite   a function of the torch function, its args and its kwargs
    AroundModule  `Around`: what is done before and after a run of the module
    IntegerEdit   a function that undoes what was done at once
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.execute.collectives import RankGroup
from autoplan.execute.hooks.running import Running
from autoplan.patches.patched import Kept
from autoplan.values import Instruction


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
