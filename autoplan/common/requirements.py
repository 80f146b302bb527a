"""Which torch and transformers the project was made for: others are refused, not tried."""

from __future__ import annotations

import re

from autoplan.common.errors import AutoplanError

__all__ = ["check_versions", "installed_versions"]

_RANGES = {"torch": ((2, 11), (2, 14)), "transformers": ((5, 10), (6, 0))}


def installed_versions() -> dict[str, str]:
    """By library."""
    import torch
    import transformers

    return {"torch": str(torch.__version__), "transformers": str(transformers.__version__)}


def check_versions(installed: dict[str, str] | None = None) -> None:
    """Raise when an installed library is outside the range."""
    installed = installed_versions() if installed is None else installed
    for library, (low, high) in _RANGES.items():
        numbers = re.match(r"(\d+)\.(\d+)", installed[library])
        found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
        if not low <= found < high:
            wanted = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
            raise AutoplanError(
                f"{library} {installed[library]} is not supported", hint=f"pip install '{library}{wanted}'"
            )
