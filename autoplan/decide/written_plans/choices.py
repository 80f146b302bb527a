"""A written plan in one vocabulary: the weights to shard, with the side of each. Units and sums are left to analysis,
so that a plan can be refused but not made wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from autoplan.common.errors import AutoplanError
from autoplan.common.patterns import fold_names, matches, nearest, suggestion

Cut = Literal["out", "in", "rows", "width", "experts", "any", "whole", "nothing"]

# The side of its weight that a style shards. "experts": the first dim of a stack, so that each rank has complete ones.
# "whole": it is replicated; "nothing": it is about the module's inputs or outputs, which analysis places by itself;
# "any": as its axis requires.
CUTS: dict[str, Cut] = {
    "colwise": "out",
    "colwise_gather_output": "out",
    "packed_colwise": "out",
    "rowwise": "in",
    "rowwise_scatter": "in",
    "rowwise_split_input": "in",
    "packed_rowwise": "in",
    "embedding_rowwise": "rows",
    "embedding_rowwise_scatter": "rows",
    "embedding_colwise": "width",
    "distributed_norm": "any",
    "local": "any",
    "replicate": "whole",
    "replicated_with_grad_allreduce": "whole",
    "sequence_parallel": "whole",
    "mla_kv_a_proj": "whole",
    "all_reduce": "nothing",
    "local_params": "nothing",
    "moe_identity_expert": "nothing",
    "moe_tp_experts": "nothing",
    "grouped_gemm": "experts",
    "ep_dispatch_experts": "nothing",
}


class WrittenPlanError(AutoplanError):
    """Raised for a written plan that cannot be right: an unknown style, a dead key, half of a pair."""


@dataclass(frozen=True)
class ChosenCut:
    """One line of a written plan. `written` is the style as it was written, `origin` where that was. `by_position`: in
    stacked (3-D) weights "out" means the last dim but one, as transformers counts, whatever the forward contracts."""

    pattern: str
    style: str
    origin: str
    written: str = ""
    by_position: bool = False

    @property
    def cut(self) -> Cut:
        return CUTS[self.style]

    @property
    def gathers(self) -> bool:
        """Return whether the product is wanted replicated on every rank."""
        return self.style == "colwise_gather_output"

    def __str__(self) -> str:
        return f"{self.pattern!r}: {self.written or self.style}"


@dataclass(frozen=True)
class ChosenCuts:
    """A written plan. `complete`: weights it does not name are replicated; otherwise analysis decides them.

    `source` is what entries will say. `tolerant`: keys that match nothing and splits that a model does not allow are
    noted rather than refused (a plan for an entire family of models); `trial`: so is every other contradiction (the
    plan was accepted for the model and is tried on a small clone of it). `optional`: this plan was not requested, so if
    it does not fit, analysis replaces it. `under` decides about what this plan does not name.
    """

    name: str
    source: Literal["user", "handwritten", "hf"]
    choices: tuple[ChosenCut, ...]
    complete: bool = True
    tolerant: bool = False
    trial: bool = False
    optional: bool = False
    notes: tuple[str, ...] = ()
    under: ChosenCuts | None = None
    _cache: dict[str, ChosenCut | None] = field(init=False, default_factory=dict, compare=False, repr=False)

    def of(self, parameter: str) -> ChosenCut | None:
        """Return the plan's line for a parameter: by its own key, by its module's, else from the plan underneath."""
        if parameter not in self._cache:
            self._cache[parameter] = self._find(parameter) or (self.under.of(parameter) if self.under else None)
        return self._cache[parameter]

    def source_of(self, parameter: str) -> str | None:
        """Return whose choice it is: "user", "handwritten", "hf", or None if no line names it."""
        if self._find(parameter) is not None:
            return self.source
        return self.under.source_of(parameter) if self.under else None

    def for_clone(self) -> ChosenCuts:
        """Return the same plan, to be tried on a clone of other sizes and fewer blocks."""
        under = self.under.for_clone() if self.under else None
        return replace(self, tolerant=True, trial=True, under=under)

    def without_optional(self) -> ChosenCuts | None:
        """Return the part that was requested; None if there is none."""
        under = self.under.without_optional() if self.under else None
        return None if self.optional else replace(self, under=under)

    @property
    def decides_all(self) -> bool:
        """Return whether a weight that no line names is replicated."""
        return self.complete or (self.under is not None and self.under.decides_all)

    def _find(self, parameter: str) -> ChosenCut | None:
        module = parameter.rpartition(".")[0]
        for name in (parameter, module):
            lines = [c for c in self.choices if matches(c.pattern, name) and (name == parameter or c.cut != "nothing")]
            if lines:
                # Several patterns may match one module if they agree
                first = lines[0]
                for other in lines[1:]:
                    if other.cut != first.cut:
                        raise WrittenPlanError(
                            f"{self.name}: two keys with different styles match {name!r}: {first} and {other}",
                            hint="keep one, or narrow the other's pattern",
                        )
                return first
        return None

    def check_keys(self, modules: Iterable[str], parameters: Iterable[str]) -> tuple[str, ...]:
        """Raise on a key that matches nothing; a tolerant plan lists them instead."""
        names = [*modules, *parameters]
        dead = [c for c in self.choices if not any(matches(c.pattern, name) for name in names)]
        if dead and not self.tolerant:
            first = dead[0]
            close = nearest(first.pattern, fold_names(names))
            more = f" (and {len(dead) - 1} more: {', '.join(c.pattern for c in dead[1:4])})" if len(dead) > 1 else ""
            raise WrittenPlanError(
                f"{self.name}: the key {first.pattern!r} matches no module and no parameter of the model{more}",
                hint=f"nearest paths: {', '.join(close)}" if close else "autoplan plan MODEL lists the model's paths",
            )
        below = self.under.check_keys(modules, parameters) if self.under else ()
        return tuple(f"{self.name}: {c.pattern!r} matches nothing and was ignored" for c in dead) + below


_LONGEST_KEY = 500


def check_key(key: object, plan: str) -> None:
    """Raise on a key of a plan that cannot be the path of a module."""
    if not isinstance(key, str):
        raise WrittenPlanError(f"{plan} has the key {key!r}, which is not a path", hint="keys are module paths with *")
    if len(key) > _LONGEST_KEY:
        raise WrittenPlanError(
            f"{plan} has a key of {len(key):,} characters: {key[:60]}…", hint="keys are module paths"
        )


def check_style(style: str, pattern: str, plan: str, aliases: dict[str, str] | None = None) -> str:
    """Return the canonical name of a style. Raises with the known ones."""
    if not isinstance(style, str):
        raise WrittenPlanError(
            f"{plan}: {pattern!r} has the style {str(style)[:80]!r}, which is not a style name",
            hint=f"known styles: {', '.join(CUTS)}",
        )
    name = (aliases or {}).get(style, style)
    if name not in CUTS:
        hint = suggestion(style, (*CUTS, *(aliases or {})), f"known styles: {', '.join(CUTS)}")
        raise WrittenPlanError(f"{plan}: {pattern!r} has the unknown style {style!r}", hint=hint)
    return name
