"""Everything a check may look at, put together once (`auditor.py`).

`Audited.suspect` gives a suspicion its level: an error where the plan was wrong or could not run on simulated ranks; a
note where it was exact; a warning where it was not tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Any, Literal

from autoplan.analyse.picture.flow import Flow
from autoplan.analyse.solve import Solution
from autoplan.check.audit.executors import is_cut_by_autotp
from autoplan.check.audit.lines import ForeignPlan, Line
from autoplan.common.layout import Layout, chunk
from autoplan.common.patterns import best_match, fold_names, starred
from autoplan.decide.plan.folding import Names
from autoplan.decide.written_plans.choices import CUTS
from autoplan.emit.words import few
from autoplan.values import Finding, ParameterFact, Plan, Report, Stack
from autoplan.values.quantised import PackedWeight

Level = Literal["error", "warn", "note"]
# Styles of a layer whose input and output are whole, whatever its neighbours do.
EXACT_ALONE = ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise")


@dataclass(frozen=True)
class Settings:
    """The parts of a training setup besides its plan; None: not given and not checked."""

    tokens: int = 8192
    layers: Any = None
    gradient_norm: Any = None
    dtype: str | None = None


@dataclass(frozen=True)
class Said:
    """The effect of a plan on a parameter: the sharded dim (None: replicated), its packed parts, the line."""

    line: Line | None
    dim: int | None = None
    parts: int = 1
    rows: tuple[tuple[int, ...], ...] = ()  # by rank, of the cut dim


@dataclass(frozen=True)
class Weight:
    """One parameter of the model under each of its names, with what analysis says (`fact`) and what the plan says."""

    name: str
    names: tuple[str, ...]
    fact: ParameterFact
    said: Said

    @property
    def bytes(self) -> int:
        return self.fact.bytes

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def is_matrix(self) -> bool:
        return sum(size > 1 for size in self.fact.shape) > 1


@dataclass(frozen=True)
class Audited:
    """`solution`: what analysis does; `numbers`: the run (None: not run); `right`: our plan when all but choices is
    derived."""

    model: Any
    name: str
    plan: ForeignPlan
    tp_size: int
    solution: Solution
    flow: Flow
    stacks: tuple[Stack, ...]
    settings: Settings = Settings()
    numbers: Report | None = None
    unproven: str = ""
    ran_at_full_size: bool = False
    right: Plan | None = None
    refused: str = ""  # why `parallelize` would not apply the plan, where it was not run
    extra: Mapping[str, Any] = field(default_factory=dict)
    packed: tuple[PackedWeight, ...] = ()  # what is stored in place of weights, where the model is quantised

    # -------------------------------------------------------------------------------------------- the model

    @cached_property
    def folds(self) -> Names:
        return Names(self.solution.trace)

    @cached_property
    def modules(self) -> dict[str, Any]:
        return dict(self.model.named_modules(remove_duplicate=False))

    @cached_property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model.named_parameters(remove_duplicate=False))

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Every parameter once, blocks that were folded included."""
        weights = []
        for fact in self.solution.parameters:
            if fact.buffer:
                continue
            for group in zip(*(self.folds.expand(name) for name in fact.names), strict=False):
                weights.append(Weight(group[0], tuple(group), fact, self._said(group, fact)))
        return tuple(weights)

    @cached_property
    def by_name(self) -> dict[str, Weight]:
        return {name: weight for weight in self.weights for name in weight.names}

    def alike(self, first: Weight, other: Weight) -> Iterator[tuple[Weight, Weight]]:
        """Two weights in each block that theirs stands for: a trace holds few blocks of a kind."""
        ones, others = ([self.by_name[name] for name in self.folds.expand(weight.name)] for weight in (first, other))
        yield from zip_longest(ones, others, fillvalue=(ones if len(ones) < len(others) else others)[-1])

    def all_of(self, weights: Iterable[Weight]) -> Iterator[Weight]:
        """These weights in each block that theirs stands for."""
        yield from (self.by_name[name] for weight in weights for name in self.folds.expand(weight.name))

    def of_line(self, line: Line) -> list[Weight]:
        """The parameters that a line decides about."""
        return [weight for weight in self.weights if weight.said.line == line]

    # -------------------------------------------------------------------------------------------- what the plan does

    def _said(self, names: tuple[str, ...], fact: ParameterFact) -> Said:
        if self.plan.plan is not None:
            line = next((line for name in names if (line := self.plan.line_for(name)) is not None), None)
            said = self.said_by_rule(line, names[0])
            return Said(line) if said is None or (said.dim or 0) >= len(fact.shape) else said
        for name in names:
            line = self.plan.line_for(name)
            if line is not None:
                return said_by(self.plan, line, name, fact.shape, self.modules, self.tp_size)
        return Said(None)

    def said_by_rule(self, line: Line | None, name: str) -> Said | None:
        """What a plan of ours does to a parameter or buffer; None if it stays whole."""
        rule = best_match(self.plan.plan.runtime.parameters, name) if self.plan.plan is not None else None
        if rule is None or rule.dim is None or rule.layout is None:
            return None
        return Said(line, rule.dim, 1, Layout.parse(rule.layout).rows_of_all(self.tp_size))

    def wanted_rows(self, weight: Weight) -> tuple[tuple[int, ...], ...]:
        """The rows that analysis gives each rank."""
        assert weight.fact.layout is not None
        return Layout.parse(weight.fact.layout).rows_of_all(self.tp_size)

    # -------------------------------------------------------------------------------------------- what the ranks showed

    @property
    def is_wrong(self) -> bool:
        return bool(self.refused) or (self.numbers is not None and not self.numbers.ok)

    @property
    def outcome(self) -> Literal["untried", "exact", "wrong"]:
        """Return the outcome of running the plan, in a word."""
        return "untried" if self.numbers is None else "wrong" if self.is_wrong else "exact"

    @cached_property
    def wrong_names(self) -> dict[str, str]:
        """Tensors that came out wrong on simulated ranks, and how."""
        errors = self.numbers.findings if self.numbers is not None else ()
        return {f.where: f.message for f in errors if f.level == "error"}

    def proof(self, names: Iterable[str] = ()) -> str:
        """The finding of the run that concerns these tensors, else its first, as a sentence."""
        if self.numbers is None or not self.wrong_names:
            return self.refused
        where = next((name for name in names if name in self.wrong_names), next(iter(self.wrong_names)))
        ranks = f"on {self.numbers.tp_size} simulated ranks"
        return f"{ranks}, {where}: {self.wrong_names[where]}" if where else f"{ranks}: {self.wrong_names[where]}"

    @property
    def level(self) -> Level:
        """Return the level of a suspicion, given the outcome of the run."""
        return "error" if self.is_wrong else "warn" if self.numbers is None else "note"

    def suspect(
        self, check: str, where: str | tuple[str, ...], message: str, hint: str = "", *, names: Iterable[str] = ()
    ) -> Finding:
        """A finding that is an error only if the run says so. `where`: the patterns that it is about; `names`: the
        tensors, whose gradients must be among the wrong ones where every output is exact."""
        level: Level = "note" if self.is_wrong and self._cleared(names) else self.level
        text = {
            "error": message,
            "warn": f"{message} (not run on ranks: {self.unproven})",
            "note": f"{message}; yet it is exact on simulated ranks",
        }[level]
        proof = self.proof(names) if level == "error" else ""
        if isinstance(where, str):
            return Finding(check, level, where, text, hint, proof=proof)
        return Finding(check, level, few(where), text, hint, proof=proof, places=where)

    def _cleared(self, names: Iterable[str]) -> bool:
        """Return whether the run showed that these tensors are right, although others are wrong."""
        if self.numbers is None:
            return False
        errors = [finding for finding in self.numbers.findings if finding.level == "error"]
        if any(finding.check != "gradients" for finding in errors):
            return False  # an output is wrong, or nothing ran: everything may be to blame
        wrong = {starred(finding.where) for finding in errors}
        concerned = {starred(name) for name in names}
        return bool(concerned) and not concerned & wrong

    # -------------------------------------------------------------------------------------------- saying it

    def patterns(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names of parameters or modules as few patterns."""
        wanted = list(dict.fromkeys(names))
        universe = self.parameters if any(name in self.parameters for name in wanted) else self.modules
        return tuple(fold_names(wanted, universe))

    def folded(self, names: Iterable[str]) -> str:
        """The first of these patterns, as text."""
        return few(self.patterns(names))


def said_by(
    plan: ForeignPlan, line: Line, name: str, shape: tuple[int, ...], modules: Mapping[str, Any], tp: int
) -> Said:
    """Return what a line of a foreign plan does to a parameter of this shape."""
    dim, parts = _dim(plan, line, name, shape, modules)
    if dim is None:
        return Said(line)
    return Said(line, dim, parts, plain_rows(shape[dim], parts, tp))


def _dim(
    plan: ForeignPlan, line: Line, name: str, shape: tuple[int, ...], modules: Mapping[str, Any]
) -> tuple[int | None, int]:
    """Return the dim that a style of this dialect shards of this parameter, and in how many packed parts."""
    cut, rank = CUTS.get(line.style, "whole"), len(shape)
    parts = 2 if line.style.startswith("packed_") and rank > 1 else 1
    is_bias = rank == 1
    if not rank or cut in ("whole", "nothing", "any"):
        return None, 1
    if cut in ("rows", "width"):
        return (0 if cut == "rows" else rank - 1), parts
    owner = modules.get(name.rpartition(".")[0])
    if plan.dialect == "deepspeed" and not is_cut_by_autotp(owner):
        return None, 1
    # torch's styles take an embedding's rows for its input: row-wise cuts dim 0.
    table = plan.dialect == "torch" and any(c.__name__ == "Embedding" for c in type(owner).__mro__)
    if cut == "out":
        return (0 if is_bias else 1 if table else rank - 2), parts
    if is_bias and name.endswith("bias"):
        return None, 1
    return (0 if table else rank - 1), parts


@lru_cache(maxsize=1024)
def plain_rows(size: int, parts: int, tp: int) -> tuple[tuple[int, ...], ...]:
    """The rows of each rank when a dim is cut in consecutive pieces, each of `parts` equal parts by itself."""
    step = -(-size // parts)
    return tuple(
        tuple(start + row for start in range(0, size, step) for row in chunk(min(step, size - start), tp, rank))
        for rank in range(tp)
    )
