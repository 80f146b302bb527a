"""What a split costs when the model runs, as values: what ranks do together, of what, and with whom a module shares it.

An entry of a plan holds them (`Entry.reduces`), instructions say theirs (`Instruction.cost`). Code asks the fields;
people read `str(cost)`, and this file is the one place that makes text of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Cost"]


@dataclass(frozen=True)
class Cost:
    """`does`, the word for what ranks do ("sum", "gather"), with the output, or with what `of` says.

    Gradients are summed backward, all else is done forward. `of` "call": it is done by one call inside the module.
    `parameter`: whose gradient it is; `shared_rows`: only of the rows that several ranks hold. `as_sequence_shard`: of
    the sum each rank keeps its own positions. `at`: the module around this one that returns it. `shared_with`: others
    for which it is done, too; `with_next_branch`: the branch that runs after it does it for both.
    """

    does: str
    of: Literal["output", "call", "input-gradient", "parameter-gradient"] = "output"
    parameter: str = ""
    shared_rows: bool = False
    as_sequence_shard: bool = False
    at: str = ""
    shared_with: tuple[str, ...] = ()
    with_next_branch: bool = False

    @property
    def what(self) -> str:
        """Of what, when and where, without who shares it."""
        if self.of == "input-gradient":
            return "input gradient (backward)"
        if self.of == "parameter-gradient":
            return f"gradient of {self.parameter}{' on shared rows' * self.shared_rows} (backward)"
        if self.of == "call":
            return "inside the module (forward)"
        kept = ", sharded along the sequence" * self.as_sequence_shard
        return f"output{kept} (forward)" + (f", where {self.at} returns it" if self.at else "")

    @property
    def done(self) -> str:
        return f"{self.does} {self.what}" if self.of == "call" else f"{self.does} of the {self.what}"

    def __str__(self) -> str:
        """
        >>> print(Cost("sum", "input-gradient", shared_with=("k_proj", "v_proj")))
        sum of the input gradient (backward), shared with k_proj, v_proj
        """
        with_next = ("the branch that runs after it",) if self.with_next_branch else ()
        others = ", ".join((*self.shared_with, *with_next))
        return f"{self.done}, shared with {others}" if others else self.done
