"""Whose plan is it? Wrappers (PEFT, `torch.compile`, FSDP, checkpointing) are looked through to the model inside.

A wrapper changes the paths of parameters: a plan written for the inner class then has keys relative to it. What a
wrapper is, is read off the tree: it holds the model as the one child that has (nearly) all parameters, under one of the
names that wrapping libraries use.
"""

from __future__ import annotations

from autoplan.values.module_tree import NamedModules

__all__ = ["ancestors_of", "unwrapped"]

_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_model", "module", "model")
_LIBRARIES = ("peft.", "torch.", "accelerate.", "deepspeed.")


def unwrapped(model: NamedModules) -> tuple[str, NamedModules]:
    """The innermost model and its path inside the wrappers ("" when there are none)."""
    path: list[str] = []
    while True:
        inner = _inner(model)
        if inner is None:
            return ".".join(path), model
        path.append(inner)
        model = dict(model.named_children())[inner]


def _inner(model: NamedModules) -> str | None:
    if not type(model).__module__.startswith(_LIBRARIES):
        return None
    held = dict(model.named_children())
    return next((name for name in _INNER if name in held), None)


def ancestors_of(cls: type) -> tuple[tuple[str, str], ...]:
    """(module, qualname) of a class and of what it descends from, nearest first."""
    return tuple((base.__module__, base.__qualname__) for base in cls.__mro__ if base.__module__ != "builtins")
