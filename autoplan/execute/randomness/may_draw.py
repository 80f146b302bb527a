"""May a model draw random numbers: what its rates say, and what its code says of calls that nobody recorded.

Asked when a plan is applied, of the model alone. (Not in dropout.py, which does something about the answer.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autoplan.common.code.forward_code import names_in, plain_function
from autoplan.common.conventions import conventions
from autoplan.ops import call_record

__all__ = ["draws_in_code", "may_draw"]


def may_draw(model: nn.Module) -> bool:
    """Is any dropout, noise or jitter of the model or its configs turned on? Many are there with a rate of zero.

    Asked for compiled code only, which would have to be interrupted to switch streams.
    """
    for module in model.modules():
        rate = getattr(module, "p", 0.0) if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
        if rate > 0 or _turned_on(vars(module)) or _turned_on(_settings(module)):
            return True
    return False


def draws_in_code(model: nn.Module) -> frozenset[str]:
    """Do forwards of a model, or what they call in its packages, name functions that draw: "always", or at a "rate"?

    Calls that nobody recorded may then come to them. Of a model with a known kind of config nothing is read: its rates
    say what draws.
    """
    if conventions().config_of(model) is not None:
        return frozenset()
    kinds = {type(module) for module in model.modules()}
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - {"torch"}
    waiting = [(plain_function(kind.forward), kind) for kind in kinds]
    read: set[Any] = set()
    found: set[str] = set()
    while waiting:
        function, kind = waiting.pop()
        if function is None or (function, kind) in read:
            continue
        read.add((function, kind))
        names = set(names_in(function.__code__))
        found.update(call_record(name).random.when for name in names)
        below = (plain_function(getattr(kind, name, function.__globals__.get(name))) for name in names)
        waiting += [(f, kind) for f in below if f is not None and (f.__module__ or "").partition(".")[0] in packages]
    return frozenset(found - {"never"})


def _settings(module: nn.Module) -> Mapping[str, Any]:
    """What the config of a module says by name, whatever kind of config it is."""
    known = conventions().config_of(module)
    if known is not None:
        return dict(known.to_dict())
    config = getattr(module, "config", None)
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def _turned_on(settings: Mapping[str, Any]) -> bool:
    for name, value in settings.items():
        if isinstance(value, dict) and not str(name).startswith("_") and _turned_on(value):
            return True
        if isinstance(value, float) and value > 0 and conventions().is_rate(str(name)):
            return True
    return False
