"""TransformerEngine#715, NeMo-RL#3788: summing squares over ranks counts replicated parameters once per rank."""

import torch
import torch.distributed as dist

import autoplan
from corpus.case import Case, Setting
from corpus.toys import decoder, inferred


def summed_over_ranks(model, mesh):
    total = torch.zeros(())
    for parameter in model.parameters():
        gradient = parameter.grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        total = total + local.float().pow(2).sum()
    dist.all_reduce(total, group=mesh.get_group())
    return total.sqrt()


def from_placements(model, mesh):
    return autoplan.global_norm(model)


CASE = Case(
    15, "TransformerEngine#715, NeMo-RL#3788", "the norm for clipping is inflated", "gradient-norm",
    bad=Setting(decoder, inferred, options={"gradient_norm": summed_over_ranks}),
    good=Setting(decoder, inferred, options={"gradient_norm": from_placements}),
)  # fmt: skip
