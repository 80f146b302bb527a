"""Keep hooks working when a module is replaced, entered by another method than forward, or packs its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.patterns import matches
from autoplan.common.torch_internals import DisableTorchFunction, forward_hooks, own_modules
from autoplan.execute.executors import Running, cannot_be_pickled
from autoplan.execute.hooks.install import Hooks, Worker, listen
from autoplan.execute.hooks.root import Root
from autoplan.execute.vocabulary.split_logits import columns_in
from autoplan.patches.classes import give_class, reduced, subclass_of
from autoplan.values import Runtime
from autoplan.values import SplitLogits as LogitsHead

# Replaced modules of a sharded model: their hooks move to the replacement, or the change is refused.
#
# The problem: libraries replace modules long after a model was sharded. PEFT wraps linear layers to add adapters, and
# removes the wrappers again when it merges them. The plan acts by hooks on the planned module: when that one is gone,
# an all-reduce is silently missing.
#
# So the parents of all planned modules notice when a child is set. A wrapper without weights of its own changes
# nothing. Where a wrapper is removed, its hooks move to the module inside. Anything else is refused.

_PLANNED = "_autoplan_children"  # of a parent: the full name of each planned child, by its own name


def watch_children(modules: Mapping[str, nn.Module], planned: Iterable[str]) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Make the parents of planned modules notice replacements; return the parents with their former classes."""
    before = []
    for name in planned:
        parent, _, own = name.rpartition(".")
        if not name or parent not in modules:
            continue
        module = modules[parent]
        if _PLANNED not in vars(module):
            before.append((module, type(module)))
            vars(module)[_PLANNED] = {}
            kind: Any = type(module)
            give_class(module, _watching(kind))
        vars(module)[_PLANNED][own] = name
    return before


def watch_no_longer(before: Iterable[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Restore the classes of the parents."""
    for module, cls in before:
        vars(module).pop(_PLANNED, None)
        give_class(module, cls)


@cache
def _watching(cls: Any) -> type[nn.Module]:
    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        where = self.__dict__.get(_PLANNED, {}).get(name)
        if where is not None and isinstance(value, nn.Module):
            old = own_modules(self).get(name)
            if old is not None and old is not value:
                _replaced(where, old, value)
        super(subclass, self).__setattr__(name, value)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        return reduced(subclass, _rebuild, (_Kind(cls),), self, protocol)

    subclass: Any = subclass_of(cls, {"__setattr__": __setattr__, "__reduce_ex__": __reduce_ex__})
    return subclass


class _Kind:
    """A reference to the class of a copied module, which cannot be found by its name."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kind:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_pickled()


def _rebuild(kind: _Kind) -> nn.Module:
    kind_watching: Any = _watching(kind.cls)
    return kind_watching.__new__(kind_watching)


def _replaced(where: str, old: nn.Module, new: nn.Module) -> None:
    """Handle the replacement of one planned module by another."""
    if any(module is old for module in new.modules()):
        own = {id(parameter) for parameter in old.parameters()}
        if any(id(parameter) not in own for parameter in new.parameters()):
            raise AutoplanError(
                f"{where} was wrapped in a {type(new).__name__} with weights of its own after the model was sharded",
                hint=f"wrap it first (get_peft_model, {conventions().adding[0][0]}), then call autoplan.plan and "
                "autoplan.parallelize: adapters are sharded like their layers",
            )
        return
    if any(module is new for module in old.modules()):
        # `new` was inside of `old`: it takes over the hooks.
        owners = [getattr(hook, "__self__", None) for hook in forward_hooks(old)[1].values()]
        workers = {id(owner): owner for owner in owners if isinstance(owner, Worker)}
        for worker in list(workers.values()):
            if worker.calls is not None or worker.work.framed or worker.work.random:  # more than inputs and outputs
                raise AutoplanError(
                    f"{where}: the plan rewrites calls inside this {type(old).__name__}, which is being removed",
                    hint="merge in place (model.merge_adapter()), or save the adapter and merge it unsharded",
                )
            worker.stop()
            worker.handles = listen(new, worker)
        return
    raise AutoplanError(
        f"{where} was sharded and cannot be replaced by another {type(new).__name__}",
        hint="replace it before autoplan.parallelize; autoplan.applied(model).undo() restores the unsharded model",
    )


# Other entries of a sharded model than its forward: a submodule that is called by itself.
#
# The problem: a wrapper forwards some calls to the model inside without running itself. PEFT's `generate` is that of
# the wrapped model; a multimodal model's language model may run alone. Then nothing would turn the columns that leave
# the head into logits, and a caller who takes them for the full vocabulary silently chooses other tokens. So a head,
# and every module above one, treats logits as the model itself does when it is the module that was called. The position
# of logits in its output is unknown, so its heads return SplitLogits, as next to a loss.


def install_inner_entries(
    model: nn.Module, heads: tuple[LogitsHead, ...], running: Running, random: tuple[bool, bool]
) -> list[RemovableHandle]:
    """Install entry hooks on the heads and on each module between them and the model."""
    modules = dict(model.named_modules())
    at_heads = [name for name in modules if any(name == head.pattern or matches(head.pattern, name) for head in heads)]
    above = {name[:at] for name in at_heads for at, letter in enumerate(name) if letter == "."}
    handles = []
    for name in sorted((above & set(modules)) | set(at_heads)):
        handles += _InnerEntry(modules[name], running, random, Runtime(), None).listen(modules[name])
    return handles


class _InnerEntry(Root):
    """The entry hooks of a submodule, active only if it is the module that was called."""

    called = False

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.running.depth == 0:
            self.called = True
            super().before(module, args, kwargs)
            self.running.loss |= not self.running.whole_logits

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._is_outermost:
            return output
        with DisableTorchFunction():
            return columns_in(output, self.next_to_a_loss)

    def clean_up(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._is_outermost:
            self.called = False
            super().clean_up(module, args, kwargs, output)

    @property
    def _is_outermost(self) -> bool:
        return self.called and self.running.depth == 1


# torch's encoder stack with padding, in eval mode without gradients.
#
# There `nn.TransformerEncoder` packs the positions that are no padding into a nested tensor, which layers with hooks
# cannot take, and leaves zeros at the others. Sharded layers get dense tensors; the zeros are put behind the last one.

_NAMES = ("src", "mask", "src_key_padding_mask")


def keep_dense(model: nn.Module) -> Iterator[RemovableHandle]:
    """Keep the stacks dense whose layers have hooks; yield the handles of the hooks that do it."""
    stacks = (m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor)
    for stack in stacks:
        if any(hooks for inner in stack.layers.modules() for hooks in forward_hooks(inner)):
            dense = _Dense()
            yield stack.register_forward_pre_hook(dense.begin, with_kwargs=True)
            yield list(stack.layers)[-1].register_forward_hook(dense.put_zeros)
            yield stack.register_forward_hook(dense.end, always_call=True)


class _Dense(Hooks):
    def __init__(self) -> None:
        self.real: torch.Tensor | None = None  # the positions that are no padding, where the others become zeros

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        options = dict(zip(_NAMES, args, strict=False)) | kwargs
        source, padding = options["src"], options.get("src_key_padding_mask")
        with DisableTorchFunction():
            if padding is not None and _packs(module, source, options.get("mask")):
                real = padding.logical_not()
                aligned = bool((real.int().diff(dim=1) <= 0).all())
                self.real = real if aligned or not module.mask_check else None
        module.use_nested_tensor = False

    def put_zeros(self, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if self.real is None:
            return output
        if output.shape[:2] != self.real.shape:
            raise PlanMismatchError(
                "torch's encoder leaves zeros at padding in eval mode without gradients, which are not put into shards "
                "of the sequence",
                hint="make it with enable_nested_tensor=False",
            )
        return output.masked_fill(self.real.logical_not()[..., None], 0)

    def end(self, module: Any, args: Any, output: Any) -> None:
        self.real, module.use_nested_tensor = None, True


def _packs(encoder: Any, source: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether torch would use a nested tensor for a mask that is left aligned."""
    first = encoder.layers[0]
    ways = torch.backends.mha.get_fastpath_enabled(), source.dim() == 3, mask is None, not first.training
    others = torch.is_autocast_enabled(), torch.compiler.is_compiling(), source.is_nested
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in (source, *first.parameters()))
    return all(ways) and not any(others) and not needs
