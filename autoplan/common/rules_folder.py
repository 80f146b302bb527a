"""Where the rule files are: `rules/` at the top of a checkout, `autoplan/_rules` inside an installed wheel."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from autoplan.common.errors import AutoplanError

__all__ = ["rules_folder"]


@lru_cache(maxsize=1)
def rules_folder() -> Path:
    """The folder that holds `roles/`, `plans/` and `inputs/`."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "_rules", package.parent / "rules")
    for place in places:
        if (place / "inputs").is_dir():
            return place
    raise AutoplanError(
        f"autoplan's rule files are missing: looked in {places[0]} and {places[1]}",
        hint="reinstall autoplan; the wheel carries them",
    )
