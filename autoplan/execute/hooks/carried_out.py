"""Everything that carries out an instruction: importing this registers one executor for each class."""

import autoplan.execute.calls.reductions
import autoplan.execute.hooks.boundaries
import autoplan.execute.hooks.sequence
import autoplan.execute.vocabulary.leaving  # noqa: F401
