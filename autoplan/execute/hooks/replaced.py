"""Keep hooks working when a module is replaced, or entered by another method than forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.patterns import matches
from autoplan.execute.executors import Running, cannot_be_pickled
from autoplan.execute.hooks.install import Root, Worker, listen
from autoplan.execute.vocabulary.split_logits import columns_in
from autoplan.patches.classes import give_class, subclass_of
from autoplan.values import SplitLogits as LogitsHead

# A module of a sharded model that is replaced: what the plan does at it goes with it, or the change is refused.
#
# The problem: libraries take modules out and put others in their place, long after a model was sharded. PEFT wraps
# linear layers to add adapters, and takes the wrappers off again when it merges them. What the plan does is done by
# hooks of the module that it was planned for: with that one gone a sum over ranks is silently missing.
#
# So the parents of all planned modules notice when a child is set. A wrapper that brings no weights of its own changes
# nothing. Where a wrapper is taken off, what was done at it is done at what was inside. Anything else is refused.

_PLANNED = "_autoplan_children"  # of a parent: the full name of each planned child, by its own name


def watch_children(modules: Mapping[str, nn.Module], planned: Iterable[str]) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Have the parents of planned modules notice replacements; returns parents with the classes they had."""
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
    """The parents as they were."""
    for module, cls in before:
        vars(module).pop(_PLANNED, None)
        give_class(module, cls)


@cache
def _watching(cls: Any) -> type[nn.Module]:
    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        where = self.__dict__.get(_PLANNED, {}).get(name)
        if where is not None and isinstance(value, nn.Module):
            old = self._modules.get(name)
            if old is not None and old is not value:
                _replaced(where, old, value)
        super(subclass, self).__setattr__(name, value)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        how, what, *rest = super(subclass, self).__reduce_ex__(max(2, protocol))
        if getattr(how, "__name__", "") == "__newobj__" and what == (subclass,):
            return (_rebuild, (_Kind(cls),), *rest)
        return (how, what, *rest)

    subclass: Any = subclass_of(cls, {"__setattr__": __setattr__, "__reduce_ex__": __reduce_ex__})
    found: type[nn.Module] = subclass
    return found


class _Kind:
    """The class to make a copy of; it cannot be found by its name."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kind:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_pickled()


def _rebuild(kind: _Kind) -> nn.Module:
    made: Any = _watching(kind.cls)
    module: nn.Module = made.__new__(made)
    return module


def _replaced(where: str, old: nn.Module, new: nn.Module) -> None:
    """One planned module in the place of another."""
    if any(module is old for module in new.modules()):
        known = {id(parameter) for parameter in old.parameters()}
        if any(id(parameter) not in known for parameter in new.parameters()):
            raise AutoplanError(
                f"{where} is wrapped in a {type(new).__name__} with weights of its own, after the model was sharded",
                hint=f"wrap it first (get_peft_model, {conventions().adding[0][0]}), then autoplan.plan and "
                "autoplan.parallelize: adapters are cut as the layers that they belong to",
            )
        return
    if any(module is new for module in old.modules()):
        # What is done at `old` is done at `new` from here on, which was inside it
        found = {id(hook.__self__): hook.__self__ for hook in old._forward_hooks.values() if _is_ours(hook)}
        for worker in list(found.values()):
            if not worker.can_move:
                raise AutoplanError(
                    f"{where}: the plan changes calls inside of this {type(old).__name__}, which is to be taken off",
                    hint="merge in place (model.merge_adapter()), or save the adapter and merge it into the whole one",
                )
            worker.stop()
            worker.handles = listen(new, worker)
        return
    raise AutoplanError(
        f"{where} was sharded, and is to be replaced by another {type(new).__name__}",
        hint="replace it before autoplan.parallelize; autoplan.applied(model).undo() gives the whole model back",
    )


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), Worker)


# Entries of a sharded model other than its own forward: a model inside it, called by itself.
#
# The problem: a wrapper hands some calls on to the model inside without running itself. PEFT's `generate` is that of
# the wrapped model; a multimodal model's language model may be run alone. Nothing would then turn the columns that
# leave the head into logits, and whoever takes them for a whole vocabulary chooses other tokens without a word. So a
# head, and every module above one, makes the same of them as the model itself does, where it is what was called.
# Where it is not known at which place it returns its logits: heads hand out columns that know that they are columns,
# as beside a loss.


def install_inner_entries(
    model: nn.Module, heads: tuple[LogitsHead, ...], running: Running, random: tuple[bool, bool]
) -> list[RemovableHandle]:
    """Hooks on each module between the model and its heads, and on these."""
    modules = dict(model.named_modules())
    found = [name for name in modules if any(name == head.pattern or matches(head.pattern, name) for head in heads)]
    above = {name[:at] for name in found for at, letter in enumerate(name) if letter == "."}
    handles = []
    for name in sorted((above & set(modules)) | set(found)):
        entry = _InnerEntry(modules[name], (), [], running, random)
        handles += [
            modules[name].register_forward_pre_hook(entry.before, with_kwargs=True, prepend=True),
            modules[name].register_forward_hook(entry.after, with_kwargs=True),
            modules[name].register_forward_hook(entry.clean_up, with_kwargs=True, always_call=True),
        ]
    return handles


class _InnerEntry(Root):
    """Acts where its module is what was called: then no other run counts."""

    called = False

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.running.depth == 0:
            self.called = True
            super().before(module, args, kwargs)
            self.running.loss |= not self.running.whole_logits

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._is_outermost:
            return output
        with torch._C.DisableTorchFunction():
            return columns_in(output, self.next_to_a_loss)

    def clean_up(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._is_outermost:
            self.called = False
            super().clean_up(module, args, kwargs, output)

    @property
    def _is_outermost(self) -> bool:
        return self.called and self.running.depth == 1
