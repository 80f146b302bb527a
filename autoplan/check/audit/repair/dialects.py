"""How a cut is said in a dialect, whether two values say the same, and how a row reads. A value is what stands at a
key."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.check.audit.lines import ForeignPlan
from autoplan.decide.written_plans.dialects import ALIASES
from autoplan.decide.written_plans.foreign import kind_of, spec_for
from autoplan.values import Entry


@dataclass(frozen=True)
class Dialect:
    """The part that all dialects share: a dict of key and value."""

    plan: ForeignPlan

    def value_at(self, name: str) -> Any:
        """What the plan says of a module or parameter; None where no row reaches it."""
        line = self.plan.line_at(name)
        return None if line is None else self.plan.raw.get(line.pattern)

    def value(self, style: str, entry: Entry | None = None) -> Any:
        """The value for a style's canonical name; None where the dialect has none."""
        raise NotImplementedError

    def key_of(self, value: Any) -> Any:
        """Equal for values that say the same."""
        return value

    def text(self, value: Any) -> str:
        """A value as a reader of the dialect writes it."""
        return repr(value)

    def row(self, pattern: str, value: Any) -> str:
        """A row as a reader of the dialect writes it."""
        return f"{pattern!r}: {self.text(value)}"

    def written(self, rows: Iterable[tuple[Any, Any]]) -> Mapping[str, Any]:
        """A plan of these rows."""
        return {key: copy.deepcopy(value) for key, value in rows}


class Transformers(Dialect):
    """Style names by module or parameter."""

    def value(self, style: str, entry: Entry | None = None) -> Any:
        return style.removesuffix("_scatter") if style not in ("sequence_parallel",) else None

    def key_of(self, value: Any) -> Any:
        name = ALIASES.get(value, value)
        return None if name == "replicate" else name


class Torch(Dialect):
    """Style objects by module."""

    def value(self, style: str, entry: Entry | None = None) -> Any:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

        made = {
            "colwise": ColwiseParallel,
            "rowwise": RowwiseParallel,
            "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
            "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
            "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
            # The norm of (batch, sequence, heads, head dim) on a rank's heads: its weight's gradient is summed.
            "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
        }.get(style)
        return None if made is None else made()

    def key_of(self, value: Any) -> Any:
        return value if value is None or isinstance(value, str) else (type(value), self.text(value))

    def text(self, value: Any) -> str:
        """The call that makes such an object: its class, and the arguments that are no defaults."""
        if isinstance(value, str):
            return repr(value)
        cls = type(value)
        try:
            plain = vars(cls())
        except TypeError:  # it has arguments that must be given
            plain = {}
        given = []
        for name, held in vars(value).items():
            if name.startswith("_") or (name in plain and repr(plain[name]) == repr(held)):
                continue
            if name == "sequence_sharding":
                given.append(f"sequence_dim={held[0].dim}")
                continue
            if name in ("prepare_module_input", "prepare_module_output", "with_kwargs"):
                continue
            if isinstance(held, tuple) and len(held) == 1 and cls.__name__ not in LAYOUTS_ONLY:
                held = held[0]
            if held is not None and (name not in plain or repr(plain[name]) != repr(held)):
                given.append(f"{name}={_layout_text(held)}")
        return f"{cls.__name__}({', '.join(given)})"


LAYOUTS = ("Replicate", "Shard", "Partial")
LAYOUTS_ONLY = ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")


def _layout_text(value: Any) -> str:
    """`Shard(-1)`, as one writes it."""
    if isinstance(value, (tuple, list)):
        inside = ", ".join(_layout_text(item) for item in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    name = type(value).__name__
    if name == "Shard":
        return f"Shard({value.dim})"
    return f"{name}()" if name in LAYOUTS else repr(value)


class DeepSpeed(Dialect):
    """Specs by regular expressions on parameter names."""

    def value_at(self, name: str) -> Any:
        spec = spec_for(self.plan.raw, self.parameter(name))
        return None if spec is None else {key: value for key, value in spec.items() if key != "patterns"}

    def parameter(self, name: str) -> str:
        return name if name.rpartition(".")[2] in ("weight", "bias") else f"{name}.weight"

    def value(self, style: str, entry: Entry | None = None) -> Any:
        from autoplan.emit.exports.configs import packed_shape

        kinds: dict[str, dict[str, Any]] = {
            "colwise": {"partition_type": "column"},
            "rowwise": {"partition_type": "row"},
            "colwise_gather_output": {"partition_type": "column", "gather_output": True},
            "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
        }
        if style == "packed_colwise" and entry is not None and (shape := packed_shape(entry)) is not None:
            return {"partition_type": "column", "shape": shape, "partition_dim": 0}
        return kinds.get(style)

    def key_of(self, value: Any) -> Any:
        if value is None:
            return None
        kind = kind_of(value)
        dim = value.get("partition_dim", 0 if kind == "column" else 1)
        options = (bool(value.get("gather_output")), bool(value.get("grad_allreduce")))
        if kind == "skip":
            return ("skip",) if options[1] else None
        return kind, dim, repr(value.get("shape")), options[0]

    def expression(self, name: str) -> str:
        """The expression that means a pattern's weights."""
        return "^" + r"\d+".join(re.escape(part) for part in self.parameter(name).split("*")) + "$"

    def row(self, pattern: str, value: Any) -> str:
        return repr({"patterns": [self.expression(pattern)], **value})

    def written(self, rows: Iterable[tuple[Any, Any]]) -> Mapping[str, Any]:
        data = copy.deepcopy(dict(self.plan.raw))
        inner = data
        for key in ("tensor_parallel", "partition_config"):
            inner = inner.get(key, inner)
        inner["layer_specs"] = [
            {"patterns": [self.expression(key)] if isinstance(key, str) else list(key), **value} for key, value in rows
        ]
        return data

    def matches(self, spec: Mapping[str, Any], parameter: str) -> bool:
        return any(re.match(expression, parameter) for expression in spec.get("patterns", ()))


def dialect_of(plan: ForeignPlan) -> Dialect | None:
    kinds = {"transformers": Transformers, "torch": Torch, "deepspeed": DeepSpeed}
    return kinds[plan.dialect](plan) if plan.dialect in kinds else None
