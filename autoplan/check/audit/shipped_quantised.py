"""Every plan that the installed transformers ships, held against quantised weights: at which sizes do blocks part?

Each architecture is built on meta with its default config, as if it were quantised by a method. Nothing runs: which
rows a plan gives a rank, and which scales, is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoplan.check.audit.lines import ForeignPlan, read_foreign
from autoplan.check.audit.stored import Parting, partings
from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.patterns import fold_names

SIZES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Broken:
    """One shipped plan: the sizes at which the tensors of some weight part, and the first of them with its proof.

    `skipped`: why nothing could be said.
    """

    model_type: str
    class_name: str
    sizes: tuple[int, ...] = ()
    where: str = ""
    proof: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.model_type}: {self.skipped}"
        if not self.sizes:
            return f"{self.model_type}: no block is parted at tp {', '.join(map(str, SIZES))}"
        return f"{self.model_type}: parts blocks at tp {', '.join(map(str, self.sizes))}; {self.where}: {self.proof}"

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "sizes": list(self.sizes)}


def audit_quantised(
    method: str,
    mappings: Iterable[str],
    *,
    only: Sequence[str] = (),
    progress: Callable[[int, int, Broken], None] | None = None,
) -> tuple[Broken, ...]:
    """All architectures that ship a plan, in transformers' order."""
    from autoplan.hf.quantised.methods import USUAL_CONFIGS
    from autoplan.hf.type_rules import architectures

    if method not in USUAL_CONFIGS:
        raise AutoplanError(
            f"no default config for method {method!r}", hint=f"choose one of {', '.join(USUAL_CONFIGS)}"
        )
    wanted = dict.fromkeys((t, c) for m in mappings for t, c in architectures(m) if not only or t in only)
    rows: list[Broken] = []
    for model_type, class_name in wanted:
        row = _audited(method, model_type, class_name)
        if row is not None:
            rows.append(row)
            if progress:
                progress(len(rows), len(wanted), row)
    return tuple(rows)


def _audited(method: str, model_type: str, class_name: str) -> Broken | None:
    """None for one that ships no plan."""
    from autoplan.hf.quantised.methods import USUAL_CONFIGS
    from autoplan.hf.source import resolve

    try:
        source = resolve(f"{model_type}:{class_name}")
        assert source.config is not None
        source.config.quantization_config = dict(USUAL_CONFIGS[method])
        model = source.module()
        if not conventions().shipped_plan(model):
            return None
        foreign, packed = read_foreign("hf", model, source.name), source.packed(model)
    except AutoplanError as error:
        return Broken(model_type, class_name, skipped=error.message)
    assert isinstance(foreign, ForeignPlan)
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {tp: parted for tp in SIZES if (parted := partings(foreign, packed, modules, tp))}
    if not found:
        return Broken(model_type, class_name)
    first: Parting = next(iter(found.values()))[0]
    same = [one.weight for one in next(iter(found.values())) if one.proof == first.proof]
    where = fold_names(same, [name for name, _ in model.named_parameters()])[0]
    return Broken(model_type, class_name, tuple(found), where, f"{first.message}; {first.proof}")
