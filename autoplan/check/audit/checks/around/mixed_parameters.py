"""mixed-parameters: some parameters become DTensors and others stay plain tensors.

`clip_grad_norm_` and the foreach optimizers then refuse, or count a replicated weight once per rank. Every parameter
should end on the mesh, whole ones as replicated.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited
from autoplan.values import Finding

NAME = "mixed-parameters"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.plan.dialect not in ("torch", "transformers"):
        return
    # A style of torch puts every parameter of its module on the mesh, those that it does not cut as replicated.
    lines = subject.plan.lines if subject.plan.dialect == "torch" else ()
    styled = [line for line in lines if line.style not in ("", "local_params")]
    cut = [w for w in subject.weights if w.said.dim is not None or w.said.line in styled]
    plain = [w for w in subject.weights if w not in cut and subject.parameters[w.name].requires_grad]
    if plain and cut:
        text = f"{len(plain)} parameters ({subject.folded(w.name for w in plain)}) are plain tensors next to "
        text += f"{len(cut)} DTensors: clip_grad_norm_ and foreach optimizers refuse the mixture"
        hint = "distribute the rest as Replicate(), or use autoplan.parallelize and autoplan.clip_gradients"
        yield Finding(NAME, "warn", "", text, hint, sum(w.bytes for w in plain))
