"""Entries of a sharded model other than its own forward: a model inside it, called by itself.

The problem: a wrapper hands some calls on to the model inside without running itself. PEFT's `generate` is that of the
wrapped model; a multimodal model's language model may be run alone. Nobody would then turn the columns that leave the
head into logits, and whoever takes them for a whole vocabulary chooses other tokens without a word. So a head, and
every module above one, makes the same of them as the model itself does, where it is what was called. Where it is not
known at which place it returns its logits: heads hand out columns that know that they are columns, as beside a loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autoplan.common.patterns import matches
from autoplan.execute.hooks.install import Root
from autoplan.execute.hooks.running import Running
from autoplan.execute.vocabulary.split_logits import columns_in
from autoplan.values import SplitLogits as LogitsHead

__all__ = ["install_inner_entries"]


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
