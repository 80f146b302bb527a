"""Measure what blocks move between simulated ranks, collective by collective, forward and backward.

In forward the block of a collective is known. In backward it runs in the node of the autograd graph that some call of
the block created, whenever the engine reaches it: so after each block has run, the nodes between its outputs and its
inputs are marked as its own. Reductions of parameters' gradients are no traffic of tokens and do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoplan.check.ranks.threads import listening
from autoplan.check.verify.subject import tensors_in, weighted_sum
from autoplan.common.nested import flatten_tensors
from autoplan.common.patterns import matches
from autoplan.execute.hooks.sequence import deals_out, is_shard
from autoplan.execute.tensor_parallel import applied
from autoplan.values import Collective, Traffic

_CHAIN = 8  # most nodes from a sum to the parameter whose gradient it is

Measured = dict[str, dict[str, dict[str, tuple[int, int]]]]  # block -> direction -> kind -> number, bytes a token


def measured_traffic(subject: Any, blocks: Iterable[str]) -> Measured:
    """Run one call and its backward on this rank; return the collectives of each block."""
    inputs = next(iter(subject.feeds.values()))
    done = applied(subject.model)
    recorder = _Recorder(1 if done is None else done.tp_size)
    modules = dict(subject.model.named_modules())
    subject.model.zero_grad(set_to_none=True)
    with recorder.watching({name: modules[name] for name in blocks if name in modules}):
        with listening(partial(recorder.note, "forward")):
            result = subject.forward(inputs)
        loss = weighted_sum(tensors_in(result))
        if loss is not None:
            with listening(partial(recorder.note, "backward")):
                subject.backward(loss)
    subject.model.zero_grad(set_to_none=True)
    return recorder.found


def against_the_least(measured: Mapping[str, Any], planned: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Return the measured traffic of each block with the bound of its plan. Equal blocks are listed once."""
    traffic_of: dict[str, Traffic] = {}
    for block, moves in measured.items():
        plan = next((traffic for traffic in planned if matches(traffic.block, block)), None)
        if plan is not None:
            moved = replace(plan, forward=moves["forward"], backward=moves["backward"])
            first = traffic_of.setdefault(plan.block, moved)
            if first != moved:
                traffic_of[block] = replace(moved, block=block)
    return tuple(traffic_of.values())


def _tokens(values: Any, ranks: int) -> int:
    """Return the number of tokens in the stream that a block takes in, as `analyse/moved.py` counts them."""
    stream = next((x for _, x in flatten_tensors(values) if x.is_floating_point() and x.dim() > 1), None)
    if stream is None:
        return 1
    return stream.numel() // stream.shape[-1] * (ranks if is_shard(stream) else 1)


class _Recorder:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.tokens: dict[str, int] = {}
        self.found: Measured = {}
        self.block = ""
        self.seen: set[Any] = set()
        self.sums: dict[tuple[str, str, str], list[int]] = {}

    def note(self, direction: str, kind: str, size: int) -> None:
        if self.block:
            total = self.sums.setdefault((self.block, direction, kind), [0, 0])
            total[0] += 1
            total[1] += size * (2 if kind == Collective.ALL_REDUCE else 1)
            self.found[self.block][direction][kind] = (total[0], total[1] // self.tokens[self.block])

    @contextmanager
    def watching(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record which block is running, and which nodes it creates, while the model runs."""
        handles = []
        for name, module in blocks.items():
            handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.block = name
            self.found.setdefault(name, {"forward": {}, "backward": {}})
            self.tokens.setdefault(name, _tokens((args, kwargs), self.ranks))
            self.seen.update(self._new_nodes((args, kwargs)))

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.block = ""
            nodes = self._new_nodes(output)
            for node in nodes:
                if isinstance(node, torch.autograd.function.BackwardCFunction):
                    self._claim(node, name, nodes)
            self.seen.update(nodes)

        return leave

    def _claim(self, node: Any, name: str, nodes: set[Any]) -> None:
        """Count what the node's backward does as the block's."""
        above = {other for other, _ in node.next_functions if other is not None}
        starts = deals_out(node) and not above & nodes  # the beginning of the stream
        if starts or _is_parameters(node, nodes):
            return
        node.register_prehook(lambda gradients: setattr(self, "block", name))
        node.register_hook(lambda *gradients: setattr(self, "block", ""))

    def _new_nodes(self, values: Any) -> set[Any]:
        """Return the nodes from which values come, up to those already known."""
        waiting = [tensor.grad_fn for _, tensor in flatten_tensors(values) if tensor.grad_fn is not None]
        nodes: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node not in nodes and node not in self.seen:
                nodes.add(node)
                waiting += [above for above, _ in node.next_functions if above is not None]
        return nodes


def _is_parameters(node: Any, nodes: set[Any]) -> bool:
    """Return whether the node's gradient reaches a parameter and nothing else, through nodes of the block alone."""
    for _ in range(_CHAIN):
        above = [other for other, _ in node.next_functions if other is not None]
        if len(above) != 1:
            return False
        node = above[0]
        if type(node).__name__ == "AccumulateGrad":
            return True
        if node not in nodes:
            return False
    return False
