"""A written plan in one vocabulary: the weights to shard, with the side of each. Units and sums are left to analysis,
so that a plan can be refused but not made wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from autoplan.analyse.picture.dataflow import dataflow
from autoplan.analyse.picture.flow import Flow, node_of
from autoplan.analyse.solve import Solution, solve
from autoplan.analyse.splits.packed import Demands
from autoplan.common.errors import AutoplanError, IndivisibleError
from autoplan.common.layout import Layout
from autoplan.common.patterns import fold_names, matches, nearest, starred, suggestion
from autoplan.decide.plan.folding import Names
from autoplan.values import ParameterFact, TensorInfo, Trace
from autoplan.values.reasons import CutElsewhere, DoesNotDivide, KeptWhole, NotNamed, Reason, sentence

Cut = Literal["out", "in", "rows", "width", "experts", "any", "whole", "nothing"]

# The side of its weight that a style shards. "experts": the first dim of a stack, so that each rank has complete ones.
# "whole": it is replicated; "nothing": it is about the module's inputs or outputs, which analysis places by itself;
# "any": as its axis requires.
CUTS: dict[str, Cut] = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "packed_colwise"), "out"),
    **dict.fromkeys(("rowwise", "rowwise_scatter", "rowwise_split_input", "packed_rowwise"), "in"),
    **dict.fromkeys(("embedding_rowwise", "embedding_rowwise_scatter"), "rows"),
    "embedding_colwise": "width",
    **dict.fromkeys(("distributed_norm", "local"), "any"),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "mla_kv_a_proj"), "whole"),
    **dict.fromkeys(("all_reduce", "local_params", "moe_identity_expert", "moe_tp_experts"), "nothing"),
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


# Turn a written plan into demands on the solver, and check that each line got the sharding it asks for.
#
# An axis runs through several weights: it is split in all of them or in none. So `demands_of` refuses the axes of
# everything that the plan replicates, and `check_choices` explains conflicts, with the line that would fix them.

Fields = dict[str, dict[str, int]]  # parameter -> {"out": 0, "in": 1}

# The meaning of a cut for each kind of weight: a lookup table has rows and width, a product out and in.
_SAY_PACKING = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
_MEANS = {"out": ("out", "width"), "in": ("in", "rows"), "rows": ("rows", "out"), "width": ("width", "in")}


def demands_of(choices: ChosenCuts, trace: Trace) -> Demands:
    """Return the dims that must not be split under a written plan, and the weights whose products may be gathered."""
    fields = weight_fields(dataflow(trace))
    whole: dict[tuple[str, int], Reason] = {}
    gathered: set[str] = set()
    for info in trace.tensors:
        if info.kind != "parameter" or not info.names:
            continue
        choice = _choice(choices, info)
        forbidden = _kept_dims(choice, choices, info, fields)
        for name in info.names[:1]:
            whole.update({(name, dim): why for dim, why in forbidden.items()})
        if choice is not None and choice.gathers:
            gathered.update(info.names)
    return Demands(whole, frozenset(gathered), choices.decides_all)


def _choice(choices: ChosenCuts, info: TensorInfo | ParameterFact) -> ChosenCut | None:
    """Return the line for a parameter under any of its names: a tied one may be named by either, or by both alike."""
    by_cut = {choice.cut: choice for name in info.names if (choice := choices.of(name)) is not None}
    # The rows of a tied table are its head's columns
    cuts = {{"rows": "out", "width": "in"}.get(cut, cut) for cut in by_cut}
    if len(cuts) > 1:
        first, second = list(by_cut.values())[:2]
        raise WrittenPlanError(
            f"{choices.name}: {' and '.join(info.names)} are one tied parameter, but {first} and {second} differ",
            hint="give both the same sharding: embedding_rowwise for the table is colwise for the head",
        )
    return next(iter(by_cut.values()), None)


def _kept_dims(choice: ChosenCut | None, choices: ChosenCuts, info: TensorInfo, fields: Fields) -> dict[int, Reason]:
    """Return dims that may not be split, with the reason."""
    name, dims = info.names[0], range(len(info.shape))
    if choice is None or choice.cut == "nothing":
        if not choices.decides_all or len(info.shape) < 2:
            return {}  # vectors follow the axis they belong to
        return dict.fromkeys(dims, NotNamed(choices.name, name))
    if choice.cut == "any":
        return {}
    if choice.cut == "whole":
        return dict.fromkeys(dims, KeptWhole(choices.name, name, str(choice)))
    wanted = _wanted_dim(choice, info, fields)
    return {d: CutElsewhere(choices.name, name, wanted, str(choice)) for d in dims if d != wanted}


def _wanted_dim(choice: ChosenCut, info: TensorInfo | ParameterFact, fields: Fields) -> int | None:
    """Return the dim that a choice shards; None if it has nothing to shard (the bias of a row-wise projection)."""
    if choice.cut == "experts":
        return 0
    if len(info.shape) < 2:
        return 0 if info.shape and choice.cut in ("out", "rows") else None
    if not (choice.by_position and len(info.shape) > 2):
        dims = next((fields[name] for name in info.names if name in fields), {})
        for field in _MEANS[choice.cut]:
            if field in dims:
                return dims[field]
    return len(info.shape) - (2 if choice.cut in ("out", "rows") else 1)


def weight_fields(flow: Flow) -> Fields:
    """Return which dim of a weight is its output, its input, its rows, its width, as the forward uses it."""
    fields: Fields = {}
    for box in flow:
        for name, dim in node_of(flow, box).dims:
            if dim.parameter and dim.dim is not None:
                fields.setdefault(dim.parameter, {}).setdefault(name, dim.dim)
    return fields


def same_in_folded_blocks(choices: ChosenCuts, trace: Trace) -> bool:
    """Return whether the plan has the same styles for every block that one traced block stands for."""
    names = Names(trace)
    for info in trace.tensors:
        if info.kind == "parameter" and info.names:
            styles = {
                None if (choice := choices.of(other)) is None else choice.style for other in names.expand(info.names[0])
            }
            if len(styles) > 1:
                return False
    return True


# The outcome


def check_choices(choices: ChosenCuts, solution: Solution) -> tuple[str, ...]:
    """Raise if a line did not get its sharding. Returns notes on what a tolerant plan had to replicate."""
    fields = weight_fields(dataflow(solution.trace))
    notes = []
    for fact in solution.parameters:
        choice = _choice(choices, fact) if not fact.buffer else None
        if choice is None or choice.cut in ("whole", "nothing", "any"):
            continue
        wanted = _wanted_dim(choice, fact, fields)
        if len(fact.shape) < 2 or wanted is None:
            continue
        if fact.dim is None and choices.optional and not choices.trial:
            continue  # the list of what is replicated says why
        if fact.dim != wanted:
            notes.append(_missed(choices, choice, fact, wanted, solution))
        elif fact.layout is not None and not choices.trial:
            # A packed weight sharded as if it were plain is scrambled silently, and vice versa
            assert fact.layout is not None
            says_packed = choice.style.startswith("packed_")
            # Heads over groups of ranks are not in written plans: analysis does this if tp exceeds the heads
            if (
                is_packed(fact.layout, solution.tp_size) != says_packed
                and choice.style in _SAY_PACKING
                and "@" not in fact.layout
            ):
                right = choice.style.removeprefix("packed_") if says_packed else f"packed_{choice.style}"
                contents = "one run of units" if says_packed else "several segments, sharded separately"
                raise WrittenPlanError(
                    f"{choices.name}: {choice} shards {fact.names[0]} as {'packed' if says_packed else 'plain'}, but "
                    f"dim {fact.dim} holds {contents}: {fact.layout}",
                    hint=f"write {choice.pattern!r}: '{right}'",
                )
    return tuple(dict.fromkeys(notes))


def _missed(choices: ChosenCuts, choice: ChosenCut, fact: ParameterFact, wanted: int, solution: Solution) -> str:
    """Report a requested sharding that was not made: raise with the reason, or return it if the plan is tolerant."""
    name, size = fact.names[0], fact.shape[wanted]
    reasons = [c.reason for c in solution.classes if (name, wanted) in c.parameters and c.reason is not None]
    otherwise = "none of its dims can be sharded" if fact.dim is None else f"it is sharded along dim {fact.dim}"
    reason = sentence(reasons) or otherwise
    if choices.trial or (choices.tolerant and fact.dim is None):
        return f"{choices.name}: {choice} does not shard {name}: {reason}"
    if any(isinstance(reason, DoesNotDivide) for reason in reasons):
        legal = ", ".join(map(str, solution.legal_tp))
        problem = f"{choices.name}: {choice} cannot shard dim {wanted} of {name}: {reason}"
        raise IndivisibleError(problem, hint=f"valid tp: {legal}")
    problem = f"{choices.name}: {choice} would shard dim {wanted} ({size}) of {name}, but {reason}"
    free = solve(solution.trace, solution.tp_size)
    same = next((f for f in free.parameters if f.names == fact.names), None)
    if same is None or same.dim != wanted:
        cut = "" if same is None or same.dim is None else f"dim {same.dim} ({same.layout})"
        other = f"; analysis would shard {cut}" if cut else ""
        raise WrittenPlanError(problem, hint=f"write {choice.pattern!r}: 'replicate'{other}")
    others = ", ".join(dict.fromkeys(_lines_for(same, free)))
    hint = f"add {others}; or replicate it: {choice.pattern!r}: 'replicate'"
    raise WrittenPlanError(f"{problem} (half of a column/row pair)", hint=hint)


def _lines_for(fact: ParameterFact, free: Solution) -> Iterator[str]:
    """Yield `pattern: style` for every other weight that the axis of `fact` shards."""
    fields, names = weight_fields(dataflow(free.trace)), Names(free.trace)
    for other in free.parameters:
        if other.axis == fact.axis and other.dim is not None and other.names != fact.names and len(other.shape) > 1:
            dims = next((fields[n] for n in other.names if n in fields), {})
            field = next((f for f, dim in dims.items() if dim == other.dim), "out" if other.dim == 0 else "in")
            style = {"out": "colwise", "in": "rowwise", "rows": "embedding_rowwise", "width": "embedding_colwise"}
            # The module of the parameter, or the parameter if the module has several weights, in every block alike
            is_weight = other.names[0].endswith(".weight")
            name = other.names[0].rpartition(".")[0] if is_weight else other.names[0]
            universe = names.modules if is_weight else names.parameters
            alike = [like for like in universe if starred(like) == starred(name)]
            pattern = names.fold(alike, parameters=not is_weight)[0] if alike else name
            packed = "packed_" if is_packed(other.layout or "1", free.tp_size) else ""
            yield f"{pattern!r}: '{packed if field in ('out', 'in') else ''}{style.get(field, 'colwise')}'"


def is_packed(layout: str, tp: int) -> bool:
    """Return whether this dim is sharded segment by segment, so that a rank's rows are not one run."""
    return not Layout.parse(layout).one_run(tp)
