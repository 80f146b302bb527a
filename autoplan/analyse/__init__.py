"""What each tensor dimension of a trace is. Pure Python over plain data: no torch."""
