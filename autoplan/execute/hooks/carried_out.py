"""All files with executors: importing this module registers one executor for each class of instruction."""

import autoplan.execute.calls.reductions
import autoplan.execute.hooks.boundaries
import autoplan.execute.hooks.halo
import autoplan.execute.hooks.sequence
import autoplan.execute.vocabulary.leaving  # noqa: F401
