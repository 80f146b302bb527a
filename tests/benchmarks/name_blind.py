"""Is a copy of an architecture whose classes and submodules have meaningless names split as the original is?

    python tests/benchmarks/name_blind.py MAPPING [model type …]

One line for each architecture: same (and exact), other (share of the original, of the copy), or why no copy could be
built: the renamer is no compiler, and code in other files may know the names. Measured, never asserted.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from renamer import renamed_copy

from autoplan.check.scoreboard.score import How, score, score_clone
from autoplan.check.verify.clone import clone_of
from autoplan.common.errors import AutoplanError
from autoplan.hf.source import resolve
from autoplan.hf.type_rules import architectures
from autoplan.values import Score

# Functions in a file that is not renamed run experts and towers by these names.
RUN_ELSEWHERE = (
    *("gate_up_proj", "down_proj", "act_fn", "num_experts"),
    *("has_bias", "has_gate", "is_transposed", "is_concatenated"),
)


@dataclass(frozen=True)
class Compared:
    model_type: str
    kind: str  # "same", "other", "wrong", "no copy", "no original"
    note: str = ""


def compared(model_type: str, class_name: str) -> Compared:
    original = score(model_type, class_name, How(2))
    if original.verdict != "exact":
        return Compared(model_type, "no original", f"{original.verdict}: {original.reason}")
    try:
        copy = _score_of_copy(f"{model_type}:{class_name}")
    except Exception as error:  # whatever renaming breaks is an answer, and not about autoplan
        return Compared(
            model_type, "no copy", f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
        )
    if copy.verdict != "exact":
        return Compared(model_type, "wrong", f"{copy.verdict}: {copy.reason}")
    if (copy.split, copy.counted) == (original.split, original.counted):
        return Compared(model_type, "same", f"{copy.share:.3f}")
    return Compared(model_type, "other", f"{original.share:.4f} and {copy.share:.4f}")


def _score_of_copy(name: str) -> Score:
    source = resolve(name)
    if source.model_class is None:
        raise AutoplanError(f"{name} is no class of transformers")
    module, names = renamed_copy(source.model_class.__module__, RUN_ELSEWHERE)
    renamed = replace(source, model_class=getattr(module, names[source.model_class.__name__]))
    return score_clone(clone_of(renamed), Score("", "", "cannot run"), How(2))


def main(mapping: str, chosen: list[str]) -> None:
    counts = dict.fromkeys(("same", "other", "wrong", "no copy", "no original"), 0)
    for model_type, class_name in architectures(mapping):
        if chosen and model_type not in chosen:
            continue
        found = compared(model_type, class_name)
        counts[found.kind] += 1
        print(f"{found.model_type:28} {found.kind:12} {found.note[:160]}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    main(sys.argv[1] if len(sys.argv) > 1 else "causal_lm", sys.argv[2:])
