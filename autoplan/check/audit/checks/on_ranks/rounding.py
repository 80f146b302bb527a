"""rounding: is a difference between sizes a bug, or the order of sums?

A sum over ranks adds in another order, which in bfloat16 alone moves logits in the third digit. Exact in double
precision and different in the dtype asked for is rounding, and its size is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.capture.copies import copied
from autoplan.check.audit.subject import Audited
from autoplan.common.errors import AutoplanError
from autoplan.values import Finding

NAME = "rounding"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    dtype, clone = subject.settings.dtype, subject.extra.get("clone")
    if dtype is None:
        return
    if clone is None or subject.numbers is None:
        yield Finding(NAME, "note", "", f"not run in {dtype}: {subject.unproven}")
        return
    import torch

    from autoplan.check.audit.trial import sharding_for
    from autoplan.check.verify.sharded import check_sharding
    from autoplan.common.random_values import cast_numbers, inputs_in

    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise AutoplanError(f"dtype={dtype!r} is not a torch dtype", hint="use 'bfloat16' or 'float16'")
    model = copied(clone.model)
    cast_numbers(model, wanted)
    feeds = inputs_in(wanted, clone.feeds)
    report = check_sharding(model, feeds, sharding_for(subject.plan), subject.numbers.tp_size, checks=("forward",))
    forward, gradient = report.forward or 0.0, max(report.gradients.values(), default=0.0)
    seen = f"in {dtype}, outputs differ by up to {forward:.1e} and gradients by up to {gradient:.1e}"
    if subject.is_wrong:
        text = f"{seen}, which is not rounding: the plan is wrong in double precision too"
        yield Finding(NAME, "error", "", text, "see the other findings", proof=subject.proof())
    else:
        yield Finding(NAME, "note", "", f"{seen}: this is rounding, since the plan is exact in double precision")
