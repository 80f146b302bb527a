"""Read rules (rules/roles/*.toml) into frozen values. A rule without `match` is a document: it explains what applies
when no other does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx

from autoplan.common.errors import AutoplanError
from autoplan.common.files.decode import misshapen
from autoplan.common.files.plain import BYTES, NotPlain, parse_plain, read_text
from autoplan.common.files.rule_files import rules_folders
from autoplan.decide.rulebook.conditions import Condition, parse_condition
from autoplan.decide.rulebook.pattern import Pattern, parse_pattern

GENERIC = "generic"

# The styles of a module: the sharding of its weight, its input and its output.
STYLES = {
    "colwise": "output features sharded; replicated input, sharded output",
    "rowwise": "input features sharded; sharded input, output summed over ranks",
    "packed_colwise": "like colwise, for weights whose rows on a rank are not contiguous: segments, replicated parts",
    "packed_rowwise": "like rowwise, likewise",
    "colwise_gather_output": "output features sharded; the output is gathered",
    "embedding_rowwise": "rows of a table sharded; ids of other ranks give zero, and the outputs are summed over ranks",
    "embedding_colwise": "columns of a table sharded; sharded output",
    "local": "per-channel or per-head parameters, sharded with the values that they are applied to",
    "distributed_norm": "a norm over a sharded width: sharded weight, statistics summed over ranks",
    "expert_parallel": "experts of a stack on different ranks; each rank runs its experts, the outputs are summed",
    "replicate": "replicated",
    "replicated_with_grad_allreduce": "replicated; each rank has a partial gradient; the gradients are summed",
    "rowwise_scatter": "sequence parallel: like rowwise, with a reduce-scatter along the sequence",
    "embedding_rowwise_scatter": "sequence parallel: like embedding_rowwise, with a reduce-scatter along the sequence",
    "sequence_parallel": "sequence parallel: replicated weight on values sharded along the sequence",
}

# The kinds of modules that other systems, which split one layer at a time, distinguish. A rule declares its kind by
# `exported_as`: exports look for this and never for a rule by its id.
EXPORTS = {
    "layers": "ordinary column and row layers",
    "small": "small parameters next to such layers, or next to a latent, which no style changes",
    "table": "the token embedding",
    "head": "the layer that computes the logits",
    "tied_head": "a head that shares the weight of the embedding",
    "expert_stack": "experts in stacked weights",
    "halves": "two weights of equal size packed into one",
    "latent": "attention whose keys and values come from one latent",
    "latent_query": "the same for its queries, only next to such attention",
}


class RuleError(AutoplanError):
    """Raised when a rule file cannot be read, or when rules beat each other in a circle."""


_REFUSAL = NotPlain(error=RuleError, hint="fix the file")
_STYLE = (str, [str])
_SHAPE = {
    **dict.fromkeys(("id", "summary", "why", "limits", "unit", "exported_as", "unseen"), str),
    **{"seen_in": [str], "beats": [str], "holds_experts": bool, "units": {"*": str}, "roles": {"*": str}},
    "match": {"flow!": str, "where": [str]},
    "yields": {"sequence_parallel": {"*": _STYLE}, "*": _STYLE},
    "example": [{"name!": str, "graph!": str, "expect!": {"*": _STYLE}, "tp": int, "because": str}],
}


@dataclass(frozen=True)
class Example:
    """A picture and the expected outcome: a style per box, or a refusal that says `because`."""

    name: str
    graph: str
    expect: tuple[tuple[str, tuple[str, ...]], ...]
    tp: int = 2
    because: str = ""


@dataclass(frozen=True)
class Match:
    """The pattern of a rule. Texts are kept next to their parsed form: they are printed, and mutated in tests."""

    flow: str
    where: tuple[str, ...]
    pattern: Pattern
    conditions: tuple[Condition, ...]


@dataclass(frozen=True)
class Rule:
    """One rule file. `yields` maps a box to the styles that it may have; `roles` to the name of its role."""

    id: str
    summary: str
    why: str
    limits: str
    seen_in: tuple[str, ...]
    text: str
    units: tuple[tuple[str, str], ...] = (("", "feature"),)
    match: Match | None = None
    yields: tuple[tuple[str, tuple[str, ...]], ...] = ()
    sequence_parallel: tuple[tuple[str, str], ...] = ()
    roles: tuple[tuple[str, str], ...] = ()
    beats: tuple[str, ...] = ()
    examples: tuple[Example, ...] = ()
    unseen: str = ""
    exported_as: str = ""
    holds_experts: bool = False

    def unit(self, name: str) -> str:
        """Return the unit that is sharded over ranks at a box, as reasons name it."""
        units = dict(self.units)
        return units.get(name, units[""])

    def role(self, name: str) -> str:
        return dict(self.roles).get(name, name.replace("_", " "))


def load_rules(folder: Path | None = None) -> tuple[Rule, ...]:
    """Return all role rules, ordered by id: the order of files never decides anything."""
    return _load(rules_folders() if folder is None else (folder,))


@cache
def _load(folders: tuple[Path, ...]) -> tuple[Rule, ...]:
    """Load the rules of some folders; of two rules with one id that of the earlier folder counts."""
    files = {path.stem: path for folder in reversed(folders) for path in (folder / "roles").glob("*.toml")}
    texts = {name: read_text(files[name], _REFUSAL, BYTES["toml"]) for name in sorted(files)}
    rules = tuple(parse_rule(text, name) for name, text in texts.items())
    ids = {rule.id for rule in rules}
    for rule in rules:
        for other in rule.beats:
            if other not in ids:
                raise RuleError(f"rule {rule.id!r} beats {other!r}, which does not exist")
    circle = next(iter(nx.simple_cycles(nx.DiGraph((rule.id, other) for rule in rules for other in rule.beats))), None)
    if circle:
        raise RuleError(f"rules beat each other in a cycle: {' beats '.join([*circle, circle[0]])}")
    return rules


def rule_named(name: str) -> Rule | None:
    """Return the rule that an entry of a plan cites; None if it no longer exists."""
    return next((rule for rule in load_rules() if rule.id == name), None)


def exported_as(name: str) -> str:
    """Return the kind of a rule's modules for exports, one of EXPORTS; an empty string if the rule has none."""
    rule = rule_named(name)
    return rule.exported_as if rule else ""


def parse_rule(text: str, stem: str) -> Rule:
    """Parse one rule file; every problem names the file."""
    data = parse_plain(text, "toml", f"rules/roles/{stem}.toml", _REFUSAL)
    try:
        return _parse(data, text, stem)
    except AutoplanError as error:
        raise RuleError(f"rules/roles/{stem}.toml: {error.message}", hint=getattr(error, "hint", "")) from error


def _parse(data: Mapping[str, Any], text: str, stem: str) -> Rule:
    unknown = sorted(data.keys() - _SHAPE.keys())
    if unknown:
        raise RuleError(f"unknown key {unknown[0]!r}", hint=f"keys are {', '.join(sorted(_SHAPE))}")
    if data.get("id") != stem:
        raise RuleError(f"id is {data.get('id')!r}, but the file is named {stem!r}")
    if problem := misshapen(data, _SHAPE):
        raise RuleError(problem)
    match = _match(data["match"]) if "match" in data else None
    names = match.pattern.names if match else ()
    sequence_parallel = data.get("yields", {}).get("sequence_parallel", {})
    plain = {name: style for name, style in data.get("yields", {}).items() if name != "sequence_parallel"}
    for name in (*plain, *sequence_parallel, *data.get("roles", {}), *data.get("units", {})):
        if name not in names:
            raise RuleError(f"{name!r} is not a box of the flow ({', '.join(names) or 'none'})")
    if "unseen" in data and data.get("seen_in"):
        raise RuleError("it has `seen_in` and `unseen`", hint="keep `seen_in`: an architecture shows the rule")
    value = data.get("exported_as", "")
    if value and value not in EXPORTS:
        raise RuleError(f"{value!r} is not known to any export", hint=f"exported_as is one of {', '.join(EXPORTS)}")
    return Rule(
        id=stem,
        summary=_text(data, "summary"),
        why=_text(data, "why"),
        limits=_text(data, "limits"),
        seen_in=tuple(data.get("seen_in", ())),
        text=text,
        units=(("", data.get("unit", "feature")), *data.get("units", {}).items()),
        match=match,
        yields=tuple((name, _styles(style)) for name, style in plain.items()),
        sequence_parallel=tuple((name, _styles(style)[0]) for name, style in sequence_parallel.items()),
        roles=tuple(data.get("roles", {}).items()),
        beats=tuple(data.get("beats", ())),
        examples=tuple(_example(item) for item in data.get("example", ())),
        unseen=_text(data, "unseen") if "unseen" in data else "",
        exported_as=str(value),
        holds_experts=data.get("holds_experts", False) is True,
    )


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value.strip():
        raise RuleError(f"{key!r} is missing")
    return " ".join(value.split())


def _styles(value: Any) -> tuple[str, ...]:
    styles = (value,) if isinstance(value, str) else tuple(value)
    if not styles:
        raise RuleError("a box needs a style", hint=f"styles are {', '.join(STYLES)}")
    for style in styles:
        if style not in STYLES:
            raise RuleError(f"{style!r} is not a style", hint=f"styles are {', '.join(STYLES)}")
    return styles


def _match(data: Mapping[str, Any]) -> Match:
    pattern = parse_pattern(data["flow"])
    where = tuple(data.get("where", ()))
    return Match(data["flow"], where, pattern, tuple(parse_condition(text, pattern.names) for text in where))


def _example(data: Mapping[str, Any]) -> Example:
    expect = tuple((box, _styles(style)) for box, style in data["expect"].items())
    return Example(data["name"], data["graph"], expect, int(data.get("tp", 2)), data.get("because", ""))
