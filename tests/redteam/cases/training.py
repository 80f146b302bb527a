"""Training loops as people write them: optimizers by hand, averages of weights, clipping, freezing, loading."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=2)
T = ids(2, 6)
L = ids(2, 6, seed=1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(), nn.LayerNorm(16), Mlp()

    def forward(self, x):
        return self.mlp(self.norm(self.attention(x)))


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mlp, self.head = nn.Embedding(32, 16), Mlp(), nn.Linear(16, 32, bias=False)

    def forward(self, input_ids, labels=None):
        z = self.head(self.mlp(self.table(input_ids)))
        return z if labels is None else F.cross_entropy(z.flatten(0, 1), labels.flatten())


def loop(do, base=Net, given=X, **options):
    """Register a case that trains a model. `do` takes the model and its input, and returns what is compared."""
    build = type(do.__name__, (base,), {"__module__": __name__, "__doc__": do.__doc__})
    case(call(given, _do=do), vary=False, **options)(build)
    return do


def hostile(do):
    return loop(do, allowed=HOSTILE)


def lm(do):
    return loop(do, base=Lm, given=T)


def step(model, x, optimizer, times=2):
    losses = []
    for _ in range(times):
        optimizer.zero_grad()
        loss = (model(x) - Y).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@loop
def GroupsByDims(m, x):
    """No decay for biases and norms."""
    groups = [
        {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in m.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    return step(m, x, torch.optim.AdamW(groups, lr=0.01), 3), m(x)


@loop
def GroupsByName(m, x):
    slow = [p for name, p in m.named_parameters() if "mlp" in name]
    fast = [p for name, p in m.named_parameters() if "mlp" not in name]
    optimizer = torch.optim.SGD([{"params": slow, "lr": 0.001}, {"params": fast}], lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    first = step(m, x, optimizer)
    scheduler.step()
    return first, step(m, x, optimizer), m(x)


@loop
def ManyOptimizers(m, x):
    """Each in turn: what they keep follows the weights."""
    makes = (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
    return [step(m, x, make(m.parameters(), lr=0.003)) for make in makes], m(x)


@loop
def AdafactorOnShards(m, x):
    """Rows and columns of statistics, and the root mean square of a whole weight."""
    return step(m, x, torch.optim.Adafactor(m.parameters(), lr=0.01), 3), m(x)


@loop
def FirstGroupAdded(m, x):
    optimizer = torch.optim.Adam(m.attention.parameters(), lr=0.01)
    first = step(m, x, optimizer)
    optimizer.add_param_group({"params": list(m.mlp.parameters()), "lr": 0.001})
    return first, step(m, x, optimizer)


@hostile
def TrustRatio(m, x):
    """LAMB: each weight's step is scaled by the norm of the weight."""
    for _ in range(2):
        m.zero_grad()
        (m(x) - Y).pow(2).mean().backward()
        with torch.no_grad():
            for p in m.parameters():
                p.add_(p.grad, alpha=-0.01 * float(p.norm() / (p.grad.norm() + 1e-6)))
    return m(x)


@hostile
def StepsByData(m, x):
    """Plain SGD through .data, as old tutorials write it."""
    for _ in range(2):
        m.zero_grad()
        (m(x) - Y).pow(2).mean().backward()
        for p in m.parameters():
            p.data -= 0.05 * p.grad.data
    return m(x)


@hostile
def StepsByDataAdd(m, x):
    m.zero_grad()
    (m(x) - Y).pow(2).mean().backward()
    for p in m.parameters():
        p.data.add_(p.grad.data, alpha=-0.05)
        p.grad = None
    return m(x)


@hostile
def DataReplaced(m, x):
    m.zero_grad()
    (m(x) - Y).pow(2).mean().backward()
    for p in m.parameters():
        p.data = p.data - 0.05 * p.grad
    return m(x)


@hostile
def GradientsCentred(m, x):
    """Gradient centralisation: each row's mean is taken off."""
    optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
    m.zero_grad()
    (m(x) - Y).pow(2).mean().backward()
    for p in m.parameters():
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
    optimizer.step()
    return m(x)


@hostile
def UnitwiseClipping(m, x):
    """AGC: rows of gradients are clipped by the norms of rows of weights."""
    optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
    m.zero_grad()
    (m(x) - Y).pow(2).mean().backward()
    for p in m.parameters():
        if p.dim() > 1:
            limit = p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.01
            norm = p.grad.norm(dim=1, keepdim=True)
            p.grad.copy_(torch.where(norm > limit, p.grad * (limit / norm.clamp(min=1e-6)), p.grad))
    optimizer.step()
    return m(x)


@loop
def ClippedByValue(m, x):
    optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
    (m(x) - Y).pow(2).mean().backward()
    torch.nn.utils.clip_grad_value_(m.parameters(), 0.003)
    optimizer.step()
    return m(x)


@loop
def ClippedByNorm(m, x):
    """Both norms, in steps that go on."""
    optimizer, norms = torch.optim.AdamW(m.parameters(), lr=0.01), []
    for kind in (2.0, float("inf"), 1.0):
        optimizer.zero_grad()
        (m(x) - Y).pow(2).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type=kind)))
        optimizer.step()
    return norms, m(x)


@hostile
def NormByHand(m, x):
    """The norm of all gradients, as many scripts log it."""
    (m(x) - Y).pow(2).mean().backward()
    total = sum(float(p.grad.detach().pow(2).sum()) for p in m.parameters() if p.grad is not None) ** 0.5
    return total, float(torch.stack([p.grad.norm() for p in m.parameters()]).norm())


@hostile
def NormOfAll(m, x):
    (m(x) - Y).pow(2).mean().backward()
    return float(torch.cat([p.grad.flatten() for p in m.parameters()]).norm())


@hostile
def PenaltyOutside(m, x):
    """A penalty on the weights, added to the loss by the loop."""
    loss = (m(x) - Y).pow(2).mean() + 0.01 * sum(p.pow(2).sum() for p in m.parameters())
    loss.backward()
    return loss.detach()


@hostile
def LassoOutside(m, x):
    loss = (m(x) - Y).pow(2).mean()
    for name, p in m.named_parameters():
        if name.endswith("weight"):
            loss = loss + 0.001 * p.abs().sum() + 0.001 * p.norm(dim=0).sum()
    loss.backward()
    return loss.detach(), m(x)


@hostile
def OrthogonalOutside(m, x):
    w = m.mlp.up.weight
    loss = (m(x) - Y).pow(2).mean() + 0.01 * (w.T @ w - torch.eye(16, dtype=w.dtype)).pow(2).sum()
    loss.backward()
    return loss.detach()


@loop
def AccumulatedScaled(m, x):
    optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
    for half in x.chunk(2):
        ((m(half) - Y[:1]).pow(2).mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return m(x)


@loop
def AveragedByTorch(m, x):
    ema = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(2):
        step(m, x, optimizer, 1)
        ema.update_parameters(m)
    return ema(x).detach(), m(x)


@loop
def AveragedCopy(m, x):
    """A copy of the sharded model whose weights follow it."""
    ema = copy.deepcopy(m).requires_grad_(False)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(2):
        step(m, x, optimizer, 1)
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), m.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
    return ema(x), m(x)


@hostile
def AveragedByState(m, x):
    """An average kept as a dict of tensors, put in for evaluation and taken out again."""
    shadow = {name: p.detach().clone() for name, p in m.named_parameters()}
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    step(m, x, optimizer)
    for name, p in m.named_parameters():
        shadow[name] = 0.9 * shadow[name] + 0.1 * p.detach()
    backup = {name: p.detach().clone() for name, p in m.named_parameters()}
    for name, p in m.named_parameters():
        p.data.copy_(shadow[name])
    out = m(x).detach()
    for name, p in m.named_parameters():
        p.data.copy_(backup[name])
    return out, m(x)


@hostile
def Lookahead(m, x):
    slow = [p.detach().clone() for p in m.parameters()]
    step(m, x, torch.optim.Adam(m.parameters(), lr=0.05), 3)
    with torch.no_grad():
        for p, q in zip(m.parameters(), slow, strict=True):
            q += 0.5 * (p - q)
            p.copy_(q)
    return m(x)


@hostile
def SharpnessByHand(m, x):
    (m(x) - Y).pow(2).mean().backward()
    norm = torch.stack([p.grad.norm() for p in m.parameters()]).norm()
    moves = [p.grad * (0.05 / (norm + 1e-12)) for p in m.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(m.parameters()), moves)
    m.zero_grad()
    (m(x) - Y).pow(2).mean().backward()
    with torch.no_grad():
        torch._foreach_sub_(list(m.parameters()), moves)
    return m(x)


@loop
def FrozenThenThawed(m, x):
    """Linear probing, then all of it; the optimizer holds all from the start."""
    optimizer = torch.optim.Adam(m.parameters(), lr=0.01)
    m.attention.requires_grad_(False)
    first = step(m, x, optimizer)
    m.attention.requires_grad_(True)
    return first, step(m, x, optimizer), m(x)


@loop
def EvaluatedBetween(m, x):
    optimizer = torch.optim.Adam(m.parameters(), lr=0.01)
    found = []
    for _ in range(2):
        m.train()
        found += step(m, x, optimizer, 1)
        m.eval()
        with torch.inference_mode():
            found.append(m(x).sum())
    return found


@lm
def LabelsThenNone(m, ids):
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(m(ids).flatten(0, 1), L.flatten())
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            found += [loss.detach(), m(ids).argmax(-1)]
    return found


@loop
def StateRestored(m, x):
    """The best weights are kept, and put back."""
    best = copy.deepcopy(m.state_dict())
    first = step(m, x, torch.optim.SGD(m.parameters(), lr=0.5))
    m.load_state_dict(best)
    return first, m(x)


@loop
def OptimizerRestored(m, x):
    optimizer = torch.optim.Adam(m.parameters(), lr=0.01)
    first = step(m, x, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    other = torch.optim.Adam(m.parameters(), lr=0.01)
    other.load_state_dict(state)
    return first, step(m, x, other), m(x)


@hostile
def TiedLate(m, x):
    """The weights of two layers are tied after sharding."""
    m.attention.k.weight = m.attention.q.weight
    return m(x)


@hostile
def TiedAcrossCuts(m, x):
    """A layer cut by rows gets the weight of one cut by columns."""
    m.attention.o.weight = m.attention.q.weight
    return m(x)


@hostile
def ModuleSwapped(m, x):
    torch.manual_seed(3)
    m.mlp.down = nn.Linear(32, 16).double()
    return m(x)


@hostile
def WholeBlockSwapped(m, x):
    torch.manual_seed(3)
    m.mlp = Mlp(16, 24).double()
    return m(x)


@hostile
def NormSwapped(m, x):
    m.norm = nn.Identity()
    return m(x)


@hostile
def NormPutInside(m, x):
    m.mlp.up = nn.Sequential(m.mlp.up, nn.LayerNorm(32).double())
    return m(x)


@hostile
def ActivationAsHook(m, x):
    """A hook changes what a layer inside returns: a softmax over the cut units."""
    handle = m.mlp.up.register_forward_hook(lambda module, given, out: out.softmax(-1))
    out = m(x)
    handle.remove()
    return out, m(x)


@hostile
def WeightReplaced(m, x):
    """A new parameter of the whole size is put where a part was."""
    torch.manual_seed(5)
    m.mlp.up.weight = nn.Parameter(torch.randn(32, 16, dtype=torch.float64) * 0.1)
    return m(x)


@hostile
def RowsPruned(m, x):
    """Weights of the smallest size are zeroed, by a quantile of the whole."""
    with torch.no_grad():
        w = m.mlp.up.weight
        w.masked_fill_(w.abs() < w.abs().mean(), 0.0)
    return m(x)


@hostile
def NoiseOnGradients(m, x):
    (m(x) - Y).pow(2).mean().backward()
    for p in m.parameters():
        p.grad.add_(0.1 * p.grad.std() * torch.ones_like(p.grad))
    torch.optim.SGD(m.parameters(), lr=0.1).step()
    return m(x)


@loop
def StepInBackward(m, x):
    """Each weight steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in m.parameters()}

    def now(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(now) for p in m.parameters()]
    (m(x) - Y).pow(2).mean().backward()
    for handle in handles:
        handle.remove()
    return m(x)


@hostile
def VectorOfWeights(m, x):
    vector = nn.utils.parameters_to_vector(m.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, m.parameters())
    return m(x)


@hostile
def SecondOrderByTorch(m, x):
    """LBFGS flattens all weights, and calls the model in a closure."""
    optimizer = torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (m(x) - Y).pow(2).mean()
        loss.backward()
        return loss

    return optimizer.step(closure).detach(), m(x)


@loop
def GradientsByAutograd(m, x):
    loss = (m(x) - Y).pow(2).mean()
    gradients = torch.autograd.grad(loss, list(m.parameters()))
    with torch.no_grad():
        for p, g in zip(m.parameters(), gradients, strict=True):
            p.sub_(g, alpha=0.05)
    return m(x)


@hostile
def FisherOfWeights(m, x):
    """Elastic weight consolidation: squares of gradients, then a penalty around the old weights."""
    (m(x) - Y).pow(2).mean().backward()
    fisher = {n: p.grad.detach().pow(2) for n, p in m.named_parameters()}
    old = {n: p.detach().clone() for n, p in m.named_parameters()}
    step(m, x, torch.optim.SGD(m.parameters(), lr=0.1), 1)
    m.zero_grad()
    loss = m(x).pow(2).mean() + sum((fisher[n] * (p - old[n]).pow(2)).sum() for n, p in m.named_parameters())
    loss.backward()
    return loss.detach()


@loop
def Single(m, x):
    """The model is cast after sharding, trained a step, and cast back."""
    m.float()
    with torch.no_grad():
        first = m(x.float())
    m.double()
    return first.double().round(decimals=3), m(x).detach().round(decimals=3)


@hostile
def Counted(m, x):
    return sum(p.numel() for p in m.parameters()), [tuple(p.shape) for p in m.parameters()], m(x)


@hostile
def Printed(m, x):
    """Statistics of weights and gradients, as loggers take them."""
    m(x).sum().backward()
    found = {}
    for name, p in m.named_parameters():
        found[name] = [float(p.mean()), float(p.std()), float(p.abs().max()), float(p.grad.mean())]
    return found


@hostile
def Reinitialised(m, x):
    """The last layer starts anew, in place."""
    torch.manual_seed(4)
    nn.init.xavier_uniform_(m.mlp.down.weight)
    nn.init.normal_(m.mlp.up.weight, std=0.1)
    nn.init.orthogonal_(m.attention.o.weight)
    return m(x)


@hostile
def Reset(m, x):
    torch.manual_seed(4)
    m.mlp.down.reset_parameters()
    return m(x)


@lm
def TokensAdded(m, ids):
    """Rows of a table are set to the mean of the others, without gradient."""
    with torch.no_grad():
        m.table.weight[30:] = m.table.weight[:30].mean(0)
        m.head.weight[30:].zero_()
    return m(ids)


@lm
def RowOfGradientZeroed(m, ids):
    """Only new tokens learn."""
    F.cross_entropy(m(ids).flatten(0, 1), L.flatten()).backward()
    m.table.weight.grad[:20] = 0
    torch.optim.SGD([m.table.weight], lr=1.0).step()
    return m(ids)


@lm
def TableNormalised(m, ids):
    with torch.no_grad():
        m.table.weight.div_(m.table.weight.norm(dim=-1, keepdim=True))
        m.head.weight.copy_(F.normalize(m.head.weight, dim=-1))
    return m(ids)


@lm
def TableByData(m, ids):
    m.table.weight.data[3] = 0
    m.table.weight.data[[5, 20]] = 0.5
    m.head.weight.data[:, 2].fill_(0.25)
    m.head.weight.data.clamp_(-0.1, 0.1)
    return m(ids)
