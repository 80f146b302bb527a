"""Longer lives of a model: compiled, checkpointed, copied, pruned, clipped by parts, distilled, adapted, evaluated."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=2)
T = ids(4, 6)
L = ids(4, 6, seed=1)


class Lm(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), Attention(), Mlp()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, input_ids, labels=None):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        z = self.head(self.norm(x))
        return z if labels is None else F.cross_entropy(z.flatten(0, 1), labels.flatten())


def tied():
    return Lm(tied=True)


def loss_of(m, ids, labels):
    return F.cross_entropy(m(ids).flatten(0, 1), labels.flatten())


def loop(do, base=Lm, given=(T, L), **options):
    """Register a case that trains a model. `do` takes the model and its inputs, and returns what is compared."""
    made = type(do.__name__, (base,), {"__module__": __name__, "__doc__": do.__doc__})
    case(call(*given, _do=do), vary=False, inputs={"input_ids": T} if base is Lm else None, **options)(made)
    return do


hostile = partial(loop, allowed=HOSTILE)


@loop
def MicroBatches(m, ids, labels):
    """Sums over micro-batches, divided by the number of labels that count."""
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
    labels = labels.masked_fill(labels < 6, -100)
    count = (labels != -100).sum()
    for part, target in zip(ids.split(2), labels.split(2), strict=True):
        loss = F.cross_entropy(m(part).flatten(0, 1), target.flatten(), reduction="sum") / count
        loss.backward()
    norm = nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    optimizer.step()
    return float(norm), m(ids)


@loop
def EarlyStopping(m, ids, labels):
    """The best state is kept as a dict of clones, in evaluation without gradients."""
    optimizer, best, state = torch.optim.SGD(m.parameters(), lr=2.0), float("inf"), None
    for _ in range(3):
        m.train()
        optimizer.zero_grad()
        loss_of(m, ids, labels).backward()
        optimizer.step()
        m.eval()
        with torch.no_grad():
            now = loss_of(m, ids, labels).item()
        if now < best:
            best, state = now, {name: tensor.clone() for name, tensor in m.state_dict().items()}
    m.load_state_dict(state)
    return best, m(ids)


@loop
def WarmUp(m, ids, labels):
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 3))
    losses = []
    for _ in range(3):
        loss = loss_of(m, ids, labels)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, optimizer.param_groups[0]["lr"], m(ids)


@loop
def ScaledLoss(m, ids, labels):
    """A gradient scaler as mixed precision uses it: unscale, look for infinities, step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    scaler.scale(loss_of(m, ids, labels)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), m(ids)


@loop
def ClippedByParts(m, ids, labels):
    """Each block's gradients by themselves."""
    loss_of(m, ids, labels).backward()
    norms = [float(nn.utils.clip_grad_norm_(block.parameters(), 0.01)) for block in m.blocks]
    norms.append(float(nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None])))
    torch.optim.SGD(m.parameters(), lr=1.0).step()
    return norms, m(ids)


@loop
def LayerwiseRates(m, ids, labels):
    groups = [{"params": block.parameters(), "lr": 0.5**n} for n, block in enumerate(m.blocks)]
    seen = {id(p) for block in m.blocks for p in block.parameters()}
    groups.append({"params": [p for p in m.parameters() if id(p) not in seen], "lr": 0.01})
    optimizer = torch.optim.Adagrad(groups)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(m, ids, labels).backward()
        optimizer.step()
    return m(ids)


@loop
def OneLayerAtATime(m, ids, labels):
    """LISA: another block learns in each step."""
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
    for n in range(2):
        for other, block in enumerate(m.blocks):
            block.requires_grad_(other == n)
        optimizer.zero_grad()
        loss_of(m, ids, labels).backward()
        optimizer.step()
    m.requires_grad_(True)
    return m(ids)


@loop
def BiasesAlone(m, ids, labels):
    """BitFit."""
    for name, p in m.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    optimizer = torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(m, ids, labels).backward()
        optimizer.step()
    return [name for name, p in m.named_parameters() if p.grad is not None], m(ids)


@loop
def Distilled(m, ids, labels):
    """A frozen copy of the sharded model teaches it."""
    teacher = copy.deepcopy(m).eval().requires_grad_(False)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.no_grad():
            target = (teacher(ids) / 2).log_softmax(-1)
        z = (m(ids) / 2).log_softmax(-1)
        loss = F.kl_div(z, target, log_target=True, reduction="batchmean") + loss_of(m, ids, labels)
        loss.backward()
        optimizer.step()
    return loss.detach(), m(ids)


@loop
def Preferred(m, ids, labels):
    """DPO: log-probabilities of two answers under the model and a copy."""
    before = copy.deepcopy(m).requires_grad_(False)

    def logp(model, tokens):
        return model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((1, 2))

    with torch.no_grad():
        old = logp(before, ids) - logp(before, labels)
    loss = -F.logsigmoid(0.1 * (logp(m, ids) - logp(m, labels) - old)).mean()
    loss.backward()
    torch.optim.SGD(m.parameters(), lr=1.0).step()
    return loss.detach(), m(ids)


@loop
def PolicyGradient(m, ids, labels):
    """Ratios of probabilities, clipped, with an entropy bonus."""
    with torch.no_grad():
        old = torch.distributions.Categorical(logits=m(ids)).log_prob(labels)
    for _ in range(2):
        m.zero_grad()
        law = torch.distributions.Categorical(logits=m(ids))
        ratio = (law.log_prob(labels) - old).exp()
        gain = (ids - labels).double() / 10
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * law.entropy().mean()
        loss.backward()
        torch.optim.SGD(m.parameters(), lr=0.5).step()
    return loss.detach(), m(ids)


@loop
def Perturbed(m, ids, labels):
    """Zeroth order: weights are moved both ways by the same draws, and no gradient is taken."""
    losses = []
    for sign in (1, -2, 1):
        torch.manual_seed(21)
        with torch.no_grad():
            for p in m.parameters():
                p.add_(torch.ones_like(p), alpha=0.01 * sign)
            losses.append(loss_of(m, ids, labels).item())
    return losses


@loop
def MixedUp(m, ids, labels):
    """Two passes whose losses are mixed, and one consistency term between them."""
    one, two = m(ids), m(ids.flip(0))
    p, q = one.log_softmax(-1), two.flip(0).log_softmax(-1)
    loss = F.cross_entropy(one.flatten(0, 1), labels.flatten()) * 0.3 + (p.exp() * (p - q)).sum(-1).mean()
    loss.backward()
    return loss.detach()


@loop
def RowsByRows(m, ids, labels):
    """Gradients of each row of the batch by itself, their norms compared."""
    norms = []
    for row, target in zip(ids, labels, strict=True):
        m.zero_grad()
        loss_of(m, row[None], target[None]).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in m.parameters()])))
    return norms


@loop
def SavedAndLoaded(m, ids, labels):
    """Model and optimizer are saved in the middle, loaded into themselves, and go on."""
    optimizer = torch.optim.Adam(m.parameters(), lr=0.05)
    losses = []
    for turn in range(3):
        if turn == 1:
            state, moments = copy.deepcopy(m.state_dict()), copy.deepcopy(optimizer.state_dict())
        if turn == 2:
            m.load_state_dict(state)
            optimizer.load_state_dict(moments)
        optimizer.zero_grad()
        loss = loss_of(m, ids, labels)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return losses, m(ids)


@partial(loop, base=tied().__class__)
def LossOfModel(m, ids, labels):
    """The model's own loss, and its logits in evaluation, in turn."""
    optimizer, found = torch.optim.AdamW(m.parameters(), lr=0.02), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(m.train(), ids, labels)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            found += [loss.item(), m.eval()(ids).argmax(-1), m(ids[:1, :3]).sum()]
    return found


def one_step(m, *args):
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    loss = loss_of(m, *args)
    loss.backward()
    optimizer.step()
    return loss.detach(), m(args[0])


@case(call(T, L, _do=one_step), vary=False, inputs={"input_ids": T})
def TiedTable():
    return tied()


@case(call(T, L, _do=one_step), vary=False, inputs={"input_ids": T}, options={"activation_checkpointing": True})
def Checkpointed():
    return Lm()


@case(call(T, L, _do=one_step), vary=False, inputs={"input_ids": T}, options={"gather_logits": True})
def LogitsGathered():
    return Lm()


@loop
def CheckpointedOutside(m, ids, labels):
    """The caller checkpoints the whole model."""
    loss = F.cross_entropy(checkpoint(m, ids, use_reentrant=False).flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach()


@hostile
def Compiled(m, ids, labels):
    compiled = torch.compile(m, backend="eager")
    loss = loss_of(compiled, ids, labels)
    loss.backward()
    return loss.detach(), m(ids)


@hostile
def AdapterPutIn(m, ids, labels):
    """LoRA by hand, after sharding: a layer is wrapped."""

    class Lora(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.a, self.b = nn.Linear(16, 2, bias=False).double(), nn.Linear(2, 32, bias=False).double()
            nn.init.constant_(self.a.weight, 0.1)
            nn.init.constant_(self.b.weight, 0.2)

        def forward(self, x):
            return self.inner(x) + self.b(self.a(x))

    mlp = m.blocks[0][2]
    mlp.up = Lora(mlp.up)
    loss = loss_of(m, ids, labels)
    loss.backward()
    return loss.detach()


@hostile
def HeadPutIn(m, ids, labels):
    """Fine-tuning with another head."""
    torch.manual_seed(8)
    m.head = nn.Linear(16, 3).double()
    loss = F.cross_entropy(m(ids).mean(1), labels[:, 0] % 3)
    loss.backward()
    return loss.detach(), m.head.weight.grad


@hostile
def NormedWeightPutIn(m, ids, labels):
    """A parametrization is put on a layer after sharding."""
    parametrizations.weight_norm(m.blocks[0][2].up)
    return m(ids)


@hostile
def BlocksDropped(m, ids, labels):
    m.blocks = m.blocks[:1]
    return m(ids)


@hostile
def BlockRepeated(m, ids, labels):
    """Depth is grown by running the same blocks again."""
    m.blocks = nn.ModuleList([*m.blocks, *m.blocks])
    loss = loss_of(m, ids, labels)
    loss.backward()
    return loss.detach()


@hostile
def BlocksSwapped(m, ids, labels):
    m.blocks[0], m.blocks[1] = m.blocks[1], m.blocks[0]
    return m(ids)


@hostile
def BlockCopied(m, ids, labels):
    """A copy of a sharded block is put behind it."""
    m.blocks.append(copy.deepcopy(m.blocks[1]))
    loss = loss_of(m, ids, labels)
    loss.backward()
    return loss.detach(), len(list(itertools.chain(m.parameters())))


@hostile
def TiedAfterwards(m, ids, labels):
    m.head.weight = m.table.weight
    loss = loss_of(m, ids, labels)
    loss.backward()
    return loss.detach()


@hostile
def UntiedAfterwards(m, ids, labels):
    m.head.weight = nn.Parameter(m.table.weight.detach().clone())
    loss = loss_of(m, ids, labels)
    loss.backward()
    return loss.detach()


@hostile
def SmoothedInference(m, ids, labels):
    """Weights of two models are mixed, in dicts."""
    other = {name: tensor * 0.5 for name, tensor in m.state_dict().items()}
    mixed = {name: 0.5 * tensor + 0.5 * other[name] for name, tensor in m.state_dict().items()}
    m.load_state_dict(mixed)
    return m(ids)
