"""What the plan does at the borders of modules, as one pre-hook and one post-hook per module.

A hook changes tensors by path, the same on every call: activation checkpointing may run a module again. Inside the
hooks torch functions are hidden from function modes, whose counters they would shift.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from autoplan.common.conventions import conventions
from autoplan.common.layout import Layout, chunk
from autoplan.common.nested import change_if_returned, change_input, change_output, signature_names
from autoplan.execute.calls.function_mode import ModuleMode
from autoplan.execute.collectives import (
    copy_to_ranks,
    gather_over_ranks,
    gather_pieces,
    scale_gradient,
    sum_over_ranks,
)
from autoplan.execute.hooks.experts import LocalExperts
from autoplan.execute.hooks.running import Running
from autoplan.execute.hooks.sequence_shards import shares_in
from autoplan.execute.hooks.unseen_outputs import UnseenOutputs
from autoplan.execute.randomness.dropout import may_draw
from autoplan.execute.sequence.apply import SEQUENCE_ACTIONS, sequence_action, zeros_of_a_share
from autoplan.execute.vocabulary.split_logits import SplitLogits, can_stay_split, columns_in, split_class
from autoplan.values import ExpertSite, HeadSite, HookSite, ScopedCall

__all__ = ["ModuleWork", "install", "install_root"]

_ORDER = {"join": 0, "withhold": 1, "reduce": 1, "mean": 1, "reduce_scatter": 1, "gather": 2, "gather_whole": 2,
          "gather_sum": 2, "scatter": 3, "copy": 4, "scale": 5, "share": 6}  # fmt: skip


@dataclass
class ModuleWork:
    """Everything the plan does at one module."""

    name: str
    hooks: list[HookSite] = field(default_factory=list)
    embedding: HeadSite | None = None
    logits: HeadSite | None = None
    scoped: list[ScopedCall] = field(default_factory=list)
    experts: ExpertSite | None = None
    framed: bool = False
    random: str = ""  # "split", "whole" or ""

    @property
    def communicates(self) -> bool:
        """Does it owe anything to other ranks?"""
        calls = any(call.reduce or call.copies for call in self.scoped)
        return calls or any((self.hooks, self.embedding, self.logits, self.experts))

    @property
    def empty(self) -> bool:
        return not any((self.hooks, self.embedding, self.logits, self.scoped, self.experts, self.framed, self.random))


def install(module: nn.Module, work: ModuleWork, running: Running) -> list[RemovableHandle]:
    """Put the work of one module into its hooks."""
    worker = _Worker(module, work, running)
    handles = [module.register_forward_pre_hook(worker.before, with_kwargs=True)]
    # first of all: what others keep of the output (transformers collects hidden states) must have passed our sums
    handles.append(module.register_forward_hook(worker.after, prepend=True, with_kwargs=True))
    if worker.needs_cleanup:
        handles.append(module.register_forward_hook(worker.clean_up, with_kwargs=True, always_call=True))
    return handles


class _Worker:
    def __init__(self, module: nn.Module, work: ModuleWork, running: Running) -> None:
        self.work, self.running, self.group = work, running, running.group
        self.names = signature_names(module)
        self.is_block = any(h.action == "block" for h in work.hooks)
        inputs = [h for h in work.hooks if h.side == "input" and h.action != "block"]
        self.inputs = [(h.path, self._action(h)) for h in inputs]
        outputs = sorted((h for h in work.hooks if h.side == "output"), key=lambda h: _ORDER[h.action])
        self.outputs = [(h.path, self._action(h)) for h in outputs]
        self.experts = LocalExperts(work.experts, self.names, self.group, work.name) if work.experts else None
        self.masks: list[torch.Tensor] = []
        self.entered: list[ModuleMode] = []
        self.opened: list[bool] = []
        if work.embedding is not None:
            size, tp = work.embedding.size, running.group.size
            own = chunk(size, tp, running.group.rank)
            self.first, self.last = own.start, own.stop
        if work.logits is not None:
            self.split_logits = split_class(running.group, work.logits.size, work.logits.dim)
            self.can_stay_split = can_stay_split(work.logits.size, running.group)

    @property
    def needs_cleanup(self) -> bool:
        return bool(self.work.scoped or self.work.framed or self.work.random or self.is_block)

    def _action(self, site: HookSite) -> Callable[[torch.Tensor], torch.Tensor]:
        group = self.group
        if site.action == "copy":
            return lambda x: copy_to_ranks(x, group)
        if site.action == "reduce":
            return lambda x: sum_over_ranks(x, group)
        if site.action == "join":
            return self.running.branches.join
        if site.action == "withhold":
            alone = self._action(replace(site, action="reduce" if site.dim is None else "reduce_scatter"))
            zeros = zeros_of_a_share(site, self.running)
            return lambda x: self.running.branches.withhold(x, alone, zeros)
        if site.action == "mean":
            return lambda x: sum_over_ranks(x, group) / group.size
        if site.action == "scale" and site.layout is None:
            return lambda x: scale_gradient(x, 1.0 / group.size)
        assert site.layout is not None and site.dim is not None
        if site.action in SEQUENCE_ACTIONS:
            return sequence_action(site, self.running)
        layout, dim = Layout.parse(site.layout), site.dim
        if site.action == "gather":
            rows = tuple(layout.rows(rank, group.size) for rank in range(group.size))
            return lambda x: gather_over_ranks(x, group, dim, rows)
        scale = [1.0 if carried else 1.0 / group.size for carried in layout.carried(group.size)]
        return lambda x: scale_gradient(x, scale, dim)

    # ------------------------------------------------------------------ before the module runs

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        where = self.work.name or "the model"
        if self.inputs or self.work.embedding is not None or self.experts is not None:
            with torch._C.DisableTorchFunction():
                for path, action in self.inputs:
                    args, kwargs = change_input(args, kwargs, self.names, path, action, where)
                if self.work.embedding is not None:
                    path = self.work.embedding.outputs[0]
                    args, kwargs = change_input(args, kwargs, self.names, path, self._mask, where)
                if self.experts is not None:
                    args, kwargs = self.experts.enter(args, kwargs)
        if self.needs_cleanup:
            self._open()
        return args, kwargs

    def _mask(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids as rows of our piece; foreign ones look up row 0 and are zeroed afterwards."""
        foreign = (ids < self.first) | (ids >= self.last)
        self.masks.append(foreign)
        return (ids - self.first).masked_fill(foreign, 0)

    def _open(self) -> None:
        running = self.running
        if self.work.random and running.randomness.active:
            with torch._C.DisableTorchFunction():
                split = self.work.random == "split"
                (running.randomness.enter_split if split else running.randomness.enter_whole)()
            self.opened.append(True)
        else:
            self.opened.append(False)
        running.frames.append(self.work.name)
        if self.is_block:
            running.branches.enter()
        if self.work.scoped:
            mode = ModuleMode(self.work.name, tuple(self.work.scoped), self.group, running.frames, running.randomness)
            mode.__enter__()
            self.entered.append(mode)

    # ------------------------------------------------------------------ after it ran

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        where = self.work.name or "the model"
        with torch._C.DisableTorchFunction():
            if self.experts is not None:
                output = self.experts.leave(output)
            if self.work.embedding is not None:
                mask = self.masks.pop()
                output = sum_over_ranks(output.masked_fill(mask.unsqueeze(-1), 0), self.group)
            for path, action in self.outputs:
                output = change_output(output, path, action, where)
            if self.work.logits is not None:
                output = self._logits(self.work.logits, output)
        return output

    def _logits(self, head: HeadSite, output: torch.Tensor) -> torch.Tensor:
        """Whole, or split and knowing it, or (when nothing but the model's exit will read them) plain columns."""
        if self.running.whole_logits or (self.running.loss and not self.can_stay_split):
            return gather_pieces(output, self.group, head.dim, head.size)
        return output.as_subclass(self.split_logits) if self.running.loss else output

    def clean_up(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.opened:
            return
        if self.work.scoped:
            mode = self.entered.pop()
            mode.__exit__(None, None, None)
            if output is not None:  # not on the way out of an error
                mode.check_reached()
        self.running.frames.pop()
        if self.is_block:
            self.running.branches.leave(self.work.name, failed=output is None)
        if self.opened.pop():
            with torch._C.DisableTorchFunction():
                split = self.work.random == "split"
                (self.running.randomness.leave_split if split else self.running.randomness.leave_whole)()


def install_root(
    model: nn.Module,
    heads: tuple[HeadSite, ...],
    outputs: list[HookSite],
    running: Running,
    random: tuple[bool, bool],
    seen: tuple[tuple[Any, ...], ...],
) -> list[RemovableHandle]:
    """The model's own entry and exit: shared randomness, whole or split logits, whole other outputs.

    `random`: does the model draw random numbers when rates say so, and does it in eval mode too?
    """
    root = _Root(model, heads, outputs, running, random)
    root.unseen = UnseenOutputs(seen, root.names, running.group)
    return [
        model.register_forward_pre_hook(root.before, with_kwargs=True, prepend=True),
        model.register_forward_hook(root.after, with_kwargs=True),
        model.register_forward_hook(root.clean_up, with_kwargs=True, always_call=True),
    ]


class _Root:
    def __init__(
        self,
        model: nn.Module,
        heads: tuple[HeadSite, ...],
        outputs: list[HookSite],
        running: Running,
        random: tuple[bool, bool],
    ) -> None:
        self.running, self.heads, self.outputs = running, heads, outputs
        self.random, self.always = random
        self.names = signature_names(model)
        self.draws = self.always or (self.random and may_draw(model))
        self.unseen = UnseenOutputs((), self.names, running.group)
        self.target_words = conventions().target_words

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.running.depth += 1
        if self.running.depth > 1:
            return
        given = dict(zip(self.names, args, strict=False)) | kwargs
        loss = any(value is not None and any(w in name for w in self.target_words) for name, value in given.items())
        self.running.whole_logits = loss and not self.running.split_loss
        self.running.loss = loss and self.running.split_loss
        in_training = self.random and module.training and (self.draws or not torch.compiler.is_compiling())
        if in_training or self.always:
            self.running.randomness.begin(module.training)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        group = self.running.group
        with torch._C.DisableTorchFunction():
            for site in self.outputs:
                assert site.layout is not None and site.dim is not None
                if site.action in SEQUENCE_ACTIONS:
                    output = change_if_returned(output, site.path, sequence_action(site, self.running), "the model")
                    continue
                layout, dim = Layout.parse(site.layout), site.dim
                rows = tuple(layout.rows(rank, group.size) for rank in range(group.size))
                whole = partial(gather_over_ranks, group=group, dim=dim, rows=rows)
                output = change_if_returned(output, site.path, whole, "the model")
            for path, share in shares_in(output):  # collected by the model on the way, behind our hooks
                site = HookSite("", "output", path, "gather_whole", *share)
                output = change_output(output, path, sequence_action(site, self.running), "the model")
            if self.running.depth == 1:
                self.unseen.check(output)
            if self.running.loss:
                return columns_in(output, self._beside_a_loss)
            if not self.running.whole_logits:
                for head in self.heads:
                    for path in head.outputs:
                        output = change_if_returned(output, self._shifted(path, output), self._wrap(head), "the model")
        return output

    def _shifted(self, path: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        """A tuple result instead of a dict (return_dict=False) holds the same values in order."""
        if path and isinstance(path[0], str) and isinstance(output, tuple) and not isinstance(output, dict):
            return (0, *path[1:])
        return path

    def _wrap(self, head: HeadSite) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda local: self._leaving(local, head.dim, head.size)

    def _beside_a_loss(self, local: torch.Tensor, kind: type[SplitLogits]) -> torch.Tensor:
        """Logits returned beside a loss. A compiled model wants a gradient for every DTensor that it returns with one,
        and fails where only the loss has a backward: there they carry none."""
        if torch.compiler.is_compiling() and not self.running.gather_logits:
            local = local.detach()
        return self._leaving(local, kind.dim_from_end, kind.vocabulary)

    def _leaving(self, local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        if self.running.gather_logits:
            return gather_pieces(local, self.running.group, dim, size)
        return self._dtensor(local, dim, size)

    def _dtensor(self, local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        dim %= local.dim()
        shape = torch.Size([*local.shape[:dim], size, *local.shape[dim + 1 :]])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local.contiguous(), self.running.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
        )

    def clean_up(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.running.depth -= 1
        self.running.loss &= self.running.depth > 0  # a head that is called by itself gives its columns
        if self.running.depth == 0 and self.running.randomness.active:
            self.running.randomness.end()
