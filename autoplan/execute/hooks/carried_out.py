"""Everything that carries out an instruction: importing this registers one executor for each class."""

import autoplan.execute.calls.fused_attention
import autoplan.execute.calls.norms
import autoplan.execute.calls.recurrent
import autoplan.execute.calls.reductions
import autoplan.execute.calls.variance
import autoplan.execute.calls.vector_norms
import autoplan.execute.hooks.boundaries
import autoplan.execute.hooks.experts
import autoplan.execute.parameters.integers
import autoplan.execute.sequence.apply
import autoplan.execute.vocabulary.ends  # noqa: F401
