"""NeMo-RL#1051, torchtitan#875: the plan leaves DTensors inside a region whose code takes local tensors."""

from corpus.case import Case, Setting
from corpus.toys import ATTENTION, MLP, decoder, torch_styles


def left_as_dtensors(model):
    from torch.distributed.tensor.parallel import ColwiseParallel

    plan = torch_styles({**ATTENTION, **MLP})(model)
    return {**plan, "layers.*.attn.q_proj": ColwiseParallel(use_local_output=False)}


CASE = Case(
    17, "NeMo-RL#1051, torchtitan#875", "got mixed torch.Tensor and DTensor", "numbers",
    bad=Setting(decoder, left_as_dtensors),
    good=Setting(decoder, torch_styles({**ATTENTION, **MLP})),
    silent=False,
)  # fmt: skip
