"""Text that pages and exports are made of: styles, a script, and programs with places to fill in.

In: the name of a file here. Out: its text. May import: what common may.
"""

from functools import cache
from pathlib import Path


@cache
def template(name: str) -> str:
    """Return the text of a file of this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
