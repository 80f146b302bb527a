"""Mistakes made in the right plan of a real model, in each dialect; each knows the rows that are its cause.

A right plan is what autoplan exports (or, where a dialect has no export, the same lines in its words). `mistakes` are
made at the first places that the plan has for them, or at random ones; `benchmarks/audited_mistakes.py` scores the
audits of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from planted_faults import FAULTS
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel, SequenceParallel
from wrong_plans import GatheringNorm, as_torch

import autoplan
from autoplan.check.verify.clone import Clone, clone_of
from autoplan.common.conventions import conventions
from autoplan.common.patterns import starred
from autoplan.emit.exports.export import to_deepspeed
from autoplan.emit.exports.hf import OLD_NAMES, to_hf
from autoplan.hf.source import resolve
from autoplan.values import Plan

DIALECTS = ("torch", "automodel", "hf", "hf-old", "shipped", "deepspeed", "plan file")
ARCHITECTURES = (
    "llama", "mixtral", "gpt2", "phi3", "falcon", "gemma3_text", "olmo2", "deepseek_v3", "mamba2", "nemotron_h",
    "bart:BartForConditionalGeneration", "t5", "llava",
)  # fmt: skip
_COLUMN, _ROW = ("colwise",), ("rowwise",)


@dataclass(frozen=True)
class Model:
    """A tiny model with its inputs and our plan for two ranks."""

    name: str
    clone: Clone
    plan: Plan

    @staticmethod
    def of(name: str) -> Model:
        clone = clone_of(resolve(name))
        return Model(name, clone, autoplan.plan(clone.model, 2, inputs=clone.feeds, prove="none"))

    @property
    def source(self) -> Any:
        return resolve(self.clone.model, inputs=self.clone.feeds)

    @property
    def tied(self) -> bool:
        model = self.clone.model
        return len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))


@dataclass(frozen=True)
class Right:
    """A right plan: what it says by key, in canonical styles (`says`) and as written (`rows`)."""

    dialect: str
    says: Mapping[str, str]
    rows: Mapping[str, Any]
    blocks: int = 0

    def written(self, rows: Mapping[str, Any]) -> Any:
        """A plan of these rows, as its library takes it."""
        if self.dialect != "deepspeed":
            return dict(rows)
        specs = [{"patterns": [expression(key)], **value} for key, value in rows.items()]
        return {"tensor_parallel": {"partition_config": {"use_default_specs": False, "layer_specs": specs}}}

    def value(self, style: str) -> Any:
        """A style in the words of the dialect; None where it has none."""
        if self.dialect in ("torch", "automodel"):
            return as_torch({"": style})[""] if style in _TORCH else None
        if self.dialect == "deepspeed":
            return {"partition_type": _DEEPSPEED[style]} if style in _DEEPSPEED else None
        return OLD_NAMES.get(style, style) if self.dialect == "hf-old" else style


_TORCH = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "rowwise_split_input")
_DEEPSPEED = {"colwise": "column", "rowwise": "row", "replicate": "skip"}


def expression(key: str) -> str:
    """A key as AutoTP's expressions say it."""
    return "^" + "[^.]+".join(part.replace(".", r"\.") for part in f"{key}.weight".split("*")) + "$"


def right_plan(model: Model, dialect: str) -> Right | None:
    """The right plan of a dialect; None where there is none that splits anything."""
    says = dict(to_hf(model.plan, drop=True))
    rows: dict[str, Any] = says
    if dialect == "shipped":  # what transformers itself has for the type
        says = rows = dict(conventions().shipped_plan(model.clone.model))
    elif dialect == "hf-old":
        rows = to_hf(model.plan, old=True, drop=True)
        says = {key: says[key] for key in rows}
    elif dialect == "deepspeed":
        specs = to_deepspeed(model.plan, drop=True)["tensor_parallel"]["partition_config"]["layer_specs"]
        rows = {spec["patterns"][0]: {k: v for k, v in spec.items() if k != "patterns"} for spec in specs}
        entries = {expression(entry.pattern): entry for entry in model.plan.entries}
        says = {entries[key].pattern: entries[key].style for key in rows}
        rows = {entries[key].pattern: value for key, value in rows.items()}
    elif dialect in ("torch", "automodel"):
        says = _in_torch(says, model)
        rows = as_torch(says)
        if dialect == "automodel":
            rows = _sequence_parallel(rows, says, model)
    says = {key: style for key, style in says.items() if style != "replicate"}
    rows = {key: value for key, value in rows.items() if key in says or dialect == "automodel"}
    blocks = max((int(part) + 1 for name, _ in model.clone.model.named_modules() for part in name.split(".")
                  if part.isdigit()), default=0)  # fmt: skip
    return Right(dialect, says, rows, blocks) if rows else None


def _in_torch(says: Mapping[str, str], model: Model) -> dict[str, str]:
    """Lines that stock styles can say: containers by all of their lines, both ends of a tied table not at all."""
    tables = [key for key, style in says.items() if style == "embedding_rowwise"]
    unsaid = {key.rpartition(".")[0] for key, style in says.items() if style not in _TORCH and "norm" not in key}
    unsaid |= {key for key in says if key in unsaid}
    kept = {
        key: style
        for key, style in says.items()
        if style in _TORCH and key.rpartition(".")[0] not in unsaid
        and not (model.tied and (key in tables or "*" not in key))
    }  # fmt: skip
    normed = {key.rpartition(".")[0] for key, style in says.items() if style == "replicated_with_grad_allreduce"}
    return {key: style for key, style in kept.items() if key.rpartition(".")[0] not in normed}


def _sequence_parallel(rows: Mapping[str, Any], says: Mapping[str, str], model: Model) -> dict[str, Any]:
    """Automodel's plan with sequence parallelism, for decoders in the shape of llama."""
    names = {starred(name) for name, _ in model.clone.model.named_modules()}
    inner = [key for key in says if "*" in key]
    needed = {"model.embed_tokens", "model.norm", "model.layers.*.input_layernorm", "lm_head"}
    ends = {"model.embed_tokens", "model.layers.*.mlp.down_proj", "lm_head"}  # what a row leaves out is whole
    if not needed <= names or not ends <= set(says) or any(
        says[key] not in (*_COLUMN, *_ROW) for key in inner
    ):  # fmt: skip
        return {}
    part = {"output_layouts": Shard(1), "use_local_output": False}
    gathering = {"model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"}
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **part),
        "model.norm": SequenceParallel(),
        **{name: GatheringNorm() for name in sorted(gathering & names)},
        **{key: RowwiseParallel(**part) if says[key] == "rowwise" else rows[key] for key in inner},
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


# ------------------------------------------------------------------------------------------------ mistakes


@dataclass(frozen=True)
class Mistake:
    """A wrong plan. `causes`: for each mistake in it, the keys or modules one of which the finding must name."""

    kind: str
    plan: Any
    causes: tuple[tuple[str, ...], ...]
    tp_size: int = 2


@dataclass
class Maker:
    """Makes mistakes in a right plan, at places drawn by `chance`."""

    model: Model
    right: Right
    chance: random.Random
    modules: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.modules = {starred(name) for name, _ in self.model.clone.model.named_modules() if name}

    def pick(self, *styles: str, inner: bool = True) -> str | None:
        """A key with one of these styles."""
        keys = [key for key, style in self.right.says.items() if style in styles and key in self.right.rows
                and ("*" in key) == inner]  # fmt: skip
        return self.chance.choice(keys) if keys else None

    def with_value(self, key: str | None, value: Any, *, kind: str) -> Iterator[Mistake]:
        """One row says something else."""
        if key is not None and value is not None:
            either = self.other_end(key) if "missing" in kind else ()
            yield Mistake(kind, self.right.written({**self.right.rows, key: value}), ((key, *either),))

    def other_end(self, key: str) -> tuple[str, ...]:
        """The one other row of a container of two: where a whole value meets a split one, either may be the mistake."""
        home = key.rpartition(".")[0]
        others = tuple(k for k in self.right.says if k.rpartition(".")[0] == home and k != key)
        return others if len(others) == 1 else ()

    def without(self, *keys: str | None, kind: str) -> Iterator[Mistake]:
        """Rows are missing: one mistake."""
        if keys and None not in keys:
            rows = {key: value for key, value in self.right.rows.items() if key not in keys}
            yield Mistake(kind, self.right.written(rows), (tuple(str(key) for key in keys),))

    def renamed(self, key: str | None, new: str, *, kind: str) -> Iterator[Mistake]:
        """A row has another key."""
        if key is not None and new != key:
            rows = {new if k == key else k: value for k, value in self.right.rows.items()}
            yield Mistake(kind, self.right.written(rows), ((new, key),))

    def partners(self) -> tuple[str, ...]:
        """The second and later column layers of an attention: keys and values while queries are split."""
        container = next((k.rpartition(".")[0] for k, s in self.right.says.items() if s == "colwise" and "*" in k), "")
        columns = [k for k, s in self.right.says.items() if s == "colwise" and k.rpartition(".")[0] == container]
        return tuple(columns[1:])

    def make(self) -> Iterator[Mistake]:
        """One of each kind for which the plan has a place."""
        value, pick = self.right.value, self.pick
        yield from self.with_value(pick(*_ROW), value("colwise"), kind="column for row")
        yield from self.with_value(pick(*_COLUMN), value("rowwise"), kind="row for column")
        yield from self.without(pick(*_COLUMN), kind="column missing")
        yield from self.without(pick(*_ROW), kind="row missing")
        yield from self.without(*self.partners(), kind="keys and values whole")
        yield from self.with_value(pick(*_COLUMN), value("colwise_gather_output"), kind="column gathered")
        yield from self.with_value(pick(*_ROW), value("rowwise_split_input"), kind="row takes whole")
        yield from self.with_value(pick("colwise_gather_output"), value("colwise"), kind="gather missing")
        yield from self.with_value(pick("rowwise_split_input"), value("rowwise"), kind="split of the input missing")
        yield from self.with_value(pick("packed_colwise"), value("colwise"), kind="packed cut plainly")
        yield from self.with_value(pick("packed_colwise"), value("rowwise"), kind="packed the other way")
        yield from self.with_value(
            pick("colwise_gather_output", inner=False), value("colwise"), kind="head without gather"
        )
        yield from self.with_value(pick("colwise_gather_output", inner=False), value("rowwise"), kind="head by rows")
        yield from self.with_value(pick("embedding_rowwise", inner=False), value("rowwise"), kind="table by rows")
        yield from self.without(pick("embedding_rowwise", inner=False), kind="table missing")
        yield from self.without(pick("replicated_with_grad_allreduce"), kind="norm's gradient unsummed")
        yield from self.without(pick("mla_kv_a_proj"), kind="latent unsummed")
        yield from self.without(pick("moe_tp_experts"), kind="experts unsummed")
        yield from self.names()
        yield from self.additions()
        yield from self.pairs()
        if self.right.dialect in ("torch", "automodel"):
            yield from self.of_torch()

    def names(self) -> Iterator[Mistake]:
        """Keys that miss."""
        key = self.pick(*_COLUMN, *_ROW)
        if key is not None:
            home, _, own = key.rpartition(".")
            drop = self.chance.randrange(len(own))
            yield from self.renamed(key, f"{home}.{own[:drop]}{own[drop + 1 :] or 'x'}", kind="typo in a name")
            above, _, container = home.rpartition(".")
            yield from self.renamed(key, f"{above}.{container}s.{own}", kind="typo in a path")
        if self.right.dialect != "deepspeed":
            shorter = {f"module.{k}": v for k, v in self.right.rows.items()}
            yield Mistake("prefix", self.right.written(shorter), (tuple([*shorter, *self.right.rows]),))
        inner = self.pick(*_COLUMN, *_ROW)
        if inner is not None and self.right.dialect not in ("hf", "hf-old", "shipped") and self.right.blocks > 1:
            last = self.right.blocks - 1
            rows = {}
            for k, v in self.right.rows.items():
                names = [n for n, _ in self.model.clone.model.named_modules() if starred(n) == k]
                kept = [n for n in names if not (k == inner and f".{last}." in n)]
                rows |= dict.fromkeys(kept, v) if k == inner else {k: v}
            missing = tuple(n for n, _ in self.model.clone.model.named_modules()
                            if starred(n) == inner and f".{last}." in n)  # fmt: skip
            if missing:
                yield Mistake("last layer left out", self.right.written(rows), ((*missing, inner),))

    def additions(self) -> Iterator[Mistake]:
        """Rows for what must stay whole."""
        linears = {starred(n) for n, m in self.model.clone.model.named_modules() if type(m).__name__ == "Linear"}
        routers = sorted(m for m in self.modules if m.endswith((".gate", ".router")) and m not in self.right.says)
        if routers:
            yield from self.with_value(routers[0], self.right.value("colwise"), kind="router split")
        norms = sorted(
            m for m in self.modules if "norm" in m.rpartition(".")[2] and "*" in m and m not in self.right.says
        )
        if norms:
            yield from self.with_value(self.chance.choice(norms), self.right.value("colwise"), kind="norm split")
        free = sorted(linears - set(self.right.says) - set(routers))
        value = self.right.value("colwise")
        if free and value is not None:  # it, or the row that would complete it
            key = self.chance.choice(free)
            beside = tuple(sorted(n for n in linears if n.rpartition(".")[0] == key.rpartition(".")[0] and n != key))
            yield Mistake("lone column", self.right.written({**self.right.rows, key: value}), ((key, *beside),))

    def pairs(self) -> Iterator[Mistake]:
        """Two mistakes: two findings."""
        homes = sorted(
            {key.rpartition(".")[0] for key, s in self.right.says.items() if s in (*_COLUMN, *_ROW) and "*" in key}
        )
        other = {"colwise": "rowwise", "rowwise": "colwise"}
        chosen = []
        for home in self.chance.sample(homes, min(2, len(homes))):
            keys = [k for k, s in self.right.says.items() if k.rpartition(".")[0] == home and s in other]
            chosen.append(self.chance.choice(keys))
        if len(chosen) == 2:
            changes = {key: self.right.value(other[self.right.says[key]]) for key in chosen}
            yield Mistake(
                "two mistakes", self.right.written({**self.right.rows, **changes}), tuple((k,) for k in chosen)
            )
        if homes:
            home = self.chance.choice(homes)
            rows = [k for k, s in self.right.says.items() if k.rpartition(".")[0] == home and s == "rowwise"]
            columns = [k for k, s in self.right.says.items() if k.rpartition(".")[0] == home and s == "colwise"]
            if rows and len(columns) > 1:
                one, two = self.chance.choice(rows), self.chance.choice(columns)
                changes = {one: self.right.value("colwise"), two: self.right.value("rowwise")}
                yield Mistake("two in one part", self.right.written({**self.right.rows, **changes}), ((one,), (two,)))

    def of_torch(self) -> Iterator[Mistake]:
        """What only style objects can say."""
        sequence = self.right.dialect == "automodel"
        part = {"output_layouts": Shard(1)} if sequence else {}
        row, column = self.pick(*_ROW), self.pick(*_COLUMN)
        yield from self.with_value(row, RowwiseParallel(output_layouts=_partial()), kind="all-reduce missing")
        yield from self.with_value(column, ColwiseParallel(output_layouts=Shard(1)), kind="output on another dim")
        yield from self.with_value(row, RowwiseParallel(input_layouts=Shard(1), **part), kind="input on another dim")
        if row is not None:
            home = row.rpartition(".")[0]
            twice = PrepareModuleOutput(output_layouts=_partial(), desired_output_layouts=Replicate())
            if home in self.modules and not sequence and not home.endswith("attn"):
                yield from self.with_value(home, twice, kind="summed twice")
        head = next((k for k, s in self.right.says.items() if s == "colwise_gather_output" and "*" not in k), None)
        if sequence:
            yield from self.with_value(head, ColwiseParallel(input_layouts=Shard(1)), kind="head without gather")
            yield from self.with_value(row, RowwiseParallel(), kind="stream whole behind a row layer")
            yield from self.with_value(head, ColwiseParallel(output_layouts=Replicate()), kind="head takes whole")
            for norm in [k for k in self.right.rows if "norm" in k]:
                yield from self.without(norm, kind="norm missing")
                if "*" in norm:
                    yield from self.with_value(norm, SequenceParallel(), kind="norm gathers nothing")
        elif "model.norm" in self.modules:
            yield from self.with_value("model.norm", SequenceParallel(), kind="sequence split at one norm")
        if row is not None and column is not None:
            yield from self.renamed(column, f"{column.rpartition('.')[0]}.*", kind="wildcard too wide")


def _partial() -> Any:
    from torch.distributed.tensor import Partial

    return Partial()


def mistakes(model: Model, right: Right, seed: int) -> list[Mistake]:
    """All kinds for which a right plan has a place."""
    return list(Maker(model, right, random.Random(f"{model.name} {right.dialect} {seed}")).make())


def mistakes_in_file(model: Model, seed: int) -> list[Mistake]:
    """Faults in a plan file: what differs from the right runtime is the cause."""
    found = []
    for fault in FAULTS:
        if fault.tamper is not None:
            continue
        spoiled: Plan | None = fault.spoil(model.plan)
        if spoiled is None or repr(spoiled.runtime) == repr(model.plan.runtime):
            continue
        changed: set[str] = set()
        for name in ("parameters", "instructions"):
            one, other = ([repr(item) for item in getattr(plan.runtime, name)] for plan in (model.plan, spoiled))
            items = [*getattr(model.plan.runtime, name), *getattr(spoiled.runtime, name)]
            changed |= {item.pattern for item in items if one.count(repr(item)) != other.count(repr(item))}
        if changed:
            found.append(Mistake(fault.name, spoiled, (tuple(sorted(changed)),)))
    found += _edited_entries(model, random.Random(f"{model.name} file {seed}"))
    return found


def _edited_entries(model: Model, chance: random.Random) -> Iterator[Mistake]:
    """Styles of entries that are edited by hand, the runtime left as it was or edited alike."""
    from autoplan.values import replace

    rules = [rule for rule in model.plan.runtime.parameters if rule.dim is not None and "*" in rule.pattern]
    edits: dict[str, Callable[[Any], Any]] = {
        "dim": lambda rule: replace(rule, dim=1 - rule.dim if rule.dim in (0, 1) else 0),
        "typo in a pattern": lambda rule: replace(rule, pattern=rule.pattern.replace(".weight", "s.weight")),
        "first layer only": lambda rule: replace(rule, pattern=rule.pattern.replace("*", "0", 1)),
        "whole": lambda rule: replace(rule, dim=None, layout=None),
    }
    for kind, edit in edits.items():
        if not rules:
            return
        rule = chance.choice([rule for rule in rules if edit(rule) != rule] or rules)
        changed = tuple(edit(one) if one is rule else one for one in model.plan.runtime.parameters)
        plan = replace(model.plan, runtime=replace(model.plan.runtime, parameters=changed))
        yield Mistake(kind, plan, ((rule.pattern, edit(rule).pattern),))
