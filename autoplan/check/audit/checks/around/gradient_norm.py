"""gradient-norm: a norm for clipping that counts replicated parameters once per rank, and so clips early.

The given function is called on simulated ranks with the plan applied, and compared with the unsharded model's norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from autoplan.check.audit.subject import Audited
from autoplan.values import Finding

NAME = "gradient-norm"
_ALLOWED = 1e-5


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    function, clone = subject.settings.gradient_norm, subject.extra.get("clone")
    if function is None:
        return
    if clone is None or subject.numbers is None:
        yield Finding(NAME, "note", "", f"the norm function was not run: {subject.unproven}")
        return
    from autoplan.capture.copies import copied
    from autoplan.check.audit.trial import sharding_for
    from autoplan.check.ranks.common import one_compute_thread
    from autoplan.check.ranks.run import run_ranks
    from autoplan.check.verify.subject import Subject as Running

    size = subject.numbers.tp_size
    sharding = sharding_for(subject.plan)
    with one_compute_thread():
        whole = Running(copied(clone.model), clone.feeds)
        feed = next(iter(clone.feeds.values()))
        whole.forward_and_backward(feed)
        unique = {p for p in whole.model.parameters() if p.grad is not None}
        want = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in unique))
        models = [copied(clone.model) for _ in range(size)]
        got = run_ranks(partial(_on_rank, models=models, feed=feed, sharding=sharding, function=function), size)
    if not all(math.isclose(norm, want, rel_tol=_ALLOWED) for norm in got):
        worst = max(got, key=lambda norm: abs(norm - want))
        text = f"on {len(got)} ranks the function returns {worst:.6g}; the norm of the gradients is {want:.6g} "
        text += f"({worst / want:.3f} times)"
        hint = "count each value once: autoplan.global_norm does this from placements"
        proof = f"on {len(got)} simulated ranks: {', '.join(f'{norm:.6g}' for norm in got)}"
        yield Finding(NAME, "error", "", text, hint, proof=proof)


def _on_rank(rank: int, *, models: list[Any], feed: Any, sharding: Any, function: Any) -> float:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from autoplan.check.verify.subject import Subject as Running

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = sharding.shard(models[rank], mesh)
    Running(model, {"": feed}, gather=lambda model, grads: {}).forward_and_backward(feed)
    return float(function(model, mesh))
