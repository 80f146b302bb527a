"""The hooks of a model's own entry and exit: shared randomness, logits, other replicated outputs."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autoplan.common.conventions import conventions
from autoplan.common.errors import PlanMismatchError
from autoplan.common.layout import chunk
from autoplan.common.nested import change_at, flatten_tensors, is_other_form, left_out_of, other_forms, signature_names
from autoplan.common.torch_internals import DisableTorchFunction, called_by_compiled_code, runs_compiled
from autoplan.execute.checkpointing.policies import is_cache
from autoplan.execute.collectives import gather_pieces, mesh_device
from autoplan.execute.executors import At, Running, execute
from autoplan.execute.guard.guard import PathGuard
from autoplan.execute.guard.watch import plain_sizes
from autoplan.execute.hooks.install import Hooks, moved_inside
from autoplan.execute.hooks.sequence import SequenceShard, gather_shard, shards_in
from autoplan.execute.hooks.unseen import UnseenOutputs
from autoplan.execute.vocabulary.leaving import leaving
from autoplan.execute.vocabulary.own_positions import PositionLogits, own_of, with_columns
from autoplan.execute.vocabulary.split_logits import SplitLogits, columns_in
from autoplan.values import (
    AllGatherPicked,
    AttendAcross,
    Boundary,
    Exchange,
    Instruction,
    LogitsOfPositions,
    Plan,
    ReduceScatterSequence,
    Runtime,
    SequenceBoundary,
)
from autoplan.values import SplitLogits as LogitsHead


def is_at_exit(instruction: Instruction) -> bool:
    """Return whether a boundary is handled where the model returns, not by a hook of its own."""
    at_exit = isinstance(instruction, Boundary) and instruction.at_exit and instruction.side == "output"
    return at_exit and not instruction.pattern


def _counts(model: nn.Module) -> dict[str, int]:
    """Return the arguments of a forward whose defaults are integers."""
    try:
        parameters = signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {parameter.name: parameter.default for parameter in parameters if type(parameter.default) is int}


def _refuse_compiled_moves(model: nn.Module) -> None:
    """Over cp, refuse compiled code in which positions are exchanged: it cannot read a stream of which each rank holds
    its own positions, and ranks would wait for each other."""
    compiled = ((name, part) for name, part in model.named_modules() if runs_compiled(part))
    compiled_move = next(((name, at) for name, part in compiled if (at := moved_inside(part))), None)
    if compiled_move is None and not (torch.compiler.is_compiling() or called_by_compiled_code()):
        return
    name, at = compiled_move or ("", "")
    what = f"{name} (positions are moved at {at})" if name and at != name else name or "the model"
    blocks = ((name, part) for name, part in model.named_modules() if next(part.children(), None))
    free = next((name for name, part in blocks if not moved_inside(part)), "")
    raise PlanMismatchError(
        f"{what} is compiled, which is not supported over cp: compiled code cannot read a stream of which each rank "
        "holds its own positions",
        hint=f"compile parts at which no positions are moved{f', such as {free}' if free else ''} (see "
        "docs/howto/train-on-long-sequences.md), or use a mesh without cp",
    )


class Root(Hooks):
    """The hooks of a model's own entry and exit: shared randomness, logits, other replicated outputs. Only the
    outermost of nested runs counts.

    `draws`: whether the model draws random numbers when its rates say so, and whether it does in eval mode too.
    `seen`: its inputs and outputs when the plan was made. `guard`: the guard of code paths.
    """

    def __init__(
        self, model: nn.Module, running: Running, draws: tuple[bool, bool], seen: Runtime, guard: PathGuard | None
    ) -> None:
        self.running, self.heads = running, seen.of(LogitsHead)
        self.random, self.always = draws
        self.names = signature_names(model)
        at = At(model, "", self.names, running)
        outputs = [boundary for boundary in seen.of(Boundary) if is_at_exit(boundary)]
        self.forms = {*running.outputs, *(output.path for output in outputs)}
        self.outputs = [(instruction.path, execute(instruction, at)) for instruction in outputs]
        self.unseen = UnseenOutputs(seen, self.names, running.group)
        self.unseen.partial = running.context
        self.target_words = conventions().target_words
        own = seen.of(LogitsOfPositions)
        self.returns_loss = any(not head.outputs for head in self.heads) or any(not logits.returned for logits in own)
        self.given = seen.given  # the arguments that the plan has seen
        self.unsummed = seen.unsummed  # those of which the plan sums no gradient
        self.guard = guard
        self.counts = _counts(model) if running.context else {}
        self.may_pick = bool(seen.of(AllGatherPicked))  # are positions gathered where an argument picks some?

    def listen(self, module: nn.Module) -> list[RemovableHandle]:
        """Register these hooks on a module."""
        return [
            module.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True),
            module.register_forward_hook(self.after, with_kwargs=True),
            module.register_forward_hook(self.clean_up, with_kwargs=True, always_call=True),
        ]

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.running.depth += 1
        if self.running.depth > 1:
            return
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        if not torch.compiler.is_compiling():
            self.running.follow_holders()
        if (self.unsummed or self.running.context) and torch.is_grad_enabled():
            for name in arguments if self.running.context else self.unsummed:
                if any(tensor.requires_grad for _, tensor in flatten_tensors(arguments.get(name))):
                    raise PlanMismatchError(
                        f"argument {name!r} requires grad, but the plan does not sum its partial gradients",
                        hint=f"pass {name}.detach()"
                        if self.running.context
                        else f"plan with inputs= in which {name!r} requires a gradient, or pass {name}.detach()",
                    )
        if self.running.context:
            _refuse_compiled_moves(module)
        self.running.runs_whole = self.running.can_run_whole and runs_whole(arguments)
        positions_count = self.running.context and not self.running.runs_whole
        self.running.picks = self._picks(arguments) if positions_count else ""
        targets = {name for name, value in arguments.items() if value is not None and self._is_target(name)}
        quiet = torch.compiler.is_compiling() and not self.running.draws_unseen  # switching streams breaks a graph
        # Tensor arguments not seen while tracing may make the model draw random numbers, or be targets (which have many
        # names) that read its logits, which must then be SplitLogits.
        tensors = {name for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        strange = tensors - set(self.given) if self.given and not quiet else set()
        loss = self.returns_loss or bool(targets) or (bool(strange) and (bool(self.heads) or self.running.context))
        self.running.whole_logits = loss and not self.running.split_loss
        self.running.loss = loss and self.running.split_loss
        in_training = self.random and module.training and (self.running.draws or not torch.compiler.is_compiling())
        if in_training or self.always or strange - targets:
            self.running.randomness.begin()
        if self.guard is not None and not torch.compiler.is_compiling():
            self.guard.begin(module, arguments)

    def _picks(self, arguments: dict[str, Any]) -> str:
        """Return the name of an integer argument that differs from its default: it may select positions, which a rank
        would count among its own."""
        numbers = {name: value for name, value in arguments.items() if type(value) is int and name in self.counts}
        name = next((name for name, value in numbers.items() if value != self.counts[name]), "")
        if name and (torch.is_grad_enabled() or not self.may_pick):
            raise PlanMismatchError(
                f"{name}={numbers[name]} may select positions, which are sharded over ranks, in a call "
                + ("with gradients" if self.may_pick else "that was not traced"),
                hint=f"omit {name}" + (", or call it under torch.no_grad()" if self.may_pick else ""),
            )
        return name

    def _is_target(self, name: str) -> bool:
        return any(word in name for word in self.target_words)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self.unseen.shorter = False
        output = self._leave(output)
        if self.running.depth > 1:
            return output
        if self.guard is not None and not torch.compiler.is_compiling():
            output = plain_sizes(output) if self.guard.running is not None else output
            self.guard.end(mesh_device(self.running.mesh))
        return self.unseen.check(output)

    def _leave(self, output: Any) -> Any:
        with DisableTorchFunction():
            for path, change in [] if self.running.runs_whole else self.outputs:
                output = self._changed(output, path, change)
            for path, shard in shards_in(output):  # shards that the model itself collected
                output = change_at(output, path, self._whole(shard), "the model")
            if self.running.loss:
                return columns_in(output, self.next_to_a_loss)
            if not self.running.whole_logits:
                for head in self.heads:
                    for path in head.outputs:
                        output = self._changed(output, self._shifted(path, output), self._wrap(head))
        return output

    def _changed(self, output: Any, path: tuple[Any, ...], change: Callable[[torch.Tensor], Any]) -> Any:
        """Return the model's result with one tensor changed; unchanged if the call did not ask for that one."""
        if is_other_form(output, path, other_forms(path, self.forms)):
            return output
        holder = left_out_of(output, path)
        self.unseen.shorter |= isinstance(holder, list | tuple)
        return output if holder is not None else change_at(output, path, change, "the model")

    def _whole(self, shard: SequenceShard) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: gather_shard(x, shard, self.running)

    def _shifted(self, path: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        """Return the path for a tuple result (return_dict=False), which holds the values of the dict in order."""
        if path and isinstance(path[0], str) and isinstance(output, tuple) and not isinstance(output, dict):
            return (0, *path[1:])
        return path

    def _wrap(self, head: LogitsHead) -> Callable[[torch.Tensor], torch.Tensor]:
        def split(local: torch.Tensor) -> torch.Tensor:
            mine = chunk(head.columns, self.running.group.size, self.running.group.rank)
            return self._leaving(local, head.dim, head.columns) if local.shape[head.dim] == len(mine) else local

        return split

    def next_to_a_loss(self, local: torch.Tensor, kind: type[SplitLogits]) -> torch.Tensor:
        """Return logits that leave next to a loss. A compiled model needs a gradient for every DTensor that it returns
        with one, and fails where only the loss has a backward: there they are detached."""
        if torch.compiler.is_compiling() and not self.running.returns_whole_logits:
            local = local.detach()
        return self._leaving(local, kind.dim_from_end, kind.full_size)

    def _leaving(self, local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        if self.running.returns_whole_logits:
            return gather_pieces(local, self.running.group, dim, size)
        if isinstance(local, PositionLogits):
            return with_columns(local, self.running.group, size, dim)
        return leaving(local, self.running.mesh, dim, size)

    def clean_up(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.running.depth -= 1
        if self.running.depth == 0 and self.running.can_run_whole:
            if not self.running.runs_whole:
                returned = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
                for value in filter(is_cache, (*args, *kwargs.values(), *returned)):
                    setattr(value, _MARK, True)
            self.running.runs_whole = False
        if self.guard is not None and self.running.depth == 0 and not torch.compiler.is_compiling():
            self.guard.abandon()
        self.running.loss &= self.running.depth > 0  # a head called by itself returns its columns
        if self.running.depth == 0 and self.running.randomness.active:
            self.running.randomness.end()


# Calls with a cache where ranks attend with own queries: each rank runs them whole, on all positions.
#
# A cache collects the keys and values that the model's own code hands to it, which are those of own positions there:
# the next call would count, mask and attend to these alone. Where nothing but the sequence is sharded each rank has
# all weights, so such a call is run as on one device. A cache of own positions is marked, and refused when it comes
# back.


_MARK = "_autoplan_own_positions"


def can_run_whole(plan: Plan) -> bool:
    """Return whether ranks attend with own queries, and could run everything whole: they have all weights, and what is
    done to their values is done at boundaries, for own positions."""
    if not plan.runtime.of(AttendAcross) or any(rule.dim is not None for rule in plan.runtime.parameters):
        return False
    alike = (SequenceBoundary, AttendAcross)
    parts = (Exchange, ReduceScatterSequence)
    return all(
        isinstance(instruction, alike) and not isinstance(instruction, parts)
        for instruction in plan.runtime.instructions
    )


def runs_whole(arguments: dict[str, Any]) -> bool:
    """Return whether a call with these is run whole: it is given a cache, or told to make one, and has no gradient."""
    switch = conventions().cache_switch
    caches = {name: value for name, value in arguments.items() if is_cache(value)}
    for name, value in caches.items():
        if hasattr(value, _MARK):
            raise PlanMismatchError(
                f"{name} holds a rank's own positions: the call that made it did not ask for one, or had gradients",
                hint=f"pass {switch}=False, or {switch}=True from the first call on, under torch.no_grad()",
            )
    own = any(own_of(tensor) is not None for _, tensor in flatten_tensors(arguments))
    wanted = bool(caches) or arguments.get(switch) is True
    return wanted and not (own or torch.is_grad_enabled() or torch.compiler.is_compiling())
