"""What only later releases of a library have: under an older one it is not tried, and the reason is printed."""

from __future__ import annotations

import pytest

from autoplan.common.requirements import older_than


def since(release: tuple[int, int], what: str) -> None:
    """Skip the running test where the installed transformers is older."""
    if older_than("transformers", release):
        pytest.skip(f"NOT TRIED: this transformers has no {what}")
