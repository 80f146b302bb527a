"""A red team: small hostile models by class, sharded on real ranks and compared with the unsharded model.

`case.py` says what a case is, `cases/` holds them by class, `script.py` is what is run on a model, `compare.py` holds
two runs against each other, `worker.py` judges one case on one rank, and `pool.py` keeps the ranks. Nothing of
autoplan's own checks takes part in the comparison. `known.py` lists the cases that fail today.
"""
