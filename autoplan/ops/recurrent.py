"""Recurrent networks as Python calls: all steps of all layers in one call, or one step of a cell."""

from __future__ import annotations

from autoplan.ops.records.answers import NEVER, Linear, Recurrent, by_rate
from autoplan.ops.records.record import python_call
from autoplan.ops.records.sizes import NO_SIZES

for _name, _gates, _states in (("lstm", 4, 2), ("gru", 3, 1), ("rnn_tanh", 1, 1), ("rnn_relu", 1, 1)):
    python_call(_name, sizes=NO_SIZES, linear=Linear.NO, random=by_rate(-1, "dropout"),  # between layers
                recurrent=Recurrent(_gates, _states, one_step=False))  # fmt: skip
    python_call(f"{_name}_cell", sizes=NO_SIZES, linear=Linear.NO, random=NEVER,
                recurrent=Recurrent(_gates, _states, one_step=True))  # fmt: skip
