"""Weights in the hands of others: rows that are set, pieces that are filled, numbers that are logged, new draws."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats, ids
from ..parts import joined, parted

X = floats(2, 6, 16)
T = ids(2, 6)
BOTH = (2, 4)


class Packed(nn.Module):
    """Q, K and V in one weight, gate and up in another: on ranks their rows lie in another order."""

    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.o = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.both, self.down, self.head = nn.Linear(16, 64), nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, input_ids):
        x = self.table(input_ids)
        q, k, v = (parted(one, 4) for one in self.qkv(x).chunk(3, -1))
        x = x + self.o(joined((q @ k.mT / 2).softmax(-1) @ v))
        gate, up = self.both(x).chunk(2, -1)
        return self.head(x + self.down(F.silu(gate) * up))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 16)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


def on(do, base=Packed, given=T, tp=BOTH, **options):
    """Register a case that does something with a model's weights. `do` takes the model and its input."""
    build = type(do.__name__, (base,), {"__module__": __name__, "__doc__": do.__doc__})
    case(call(given, _do=do), tp=tp, vary=False, **options)(build)
    return do


def recurrent(do):
    return on(do, base=Recurrent, given=X, dp=2)


@on
def RowsOfPacked(m, x):
    with torch.no_grad():
        m.qkv.weight[3] = 0
        m.qkv.weight[16:20, 1] = 0.5
        m.both.weight[40:] *= 0.5
        m.qkv.bias[[0, 17, 40]] = 1.0
    return m(x)


@on
def PiecesOfPacked(m, x):
    """Each of the three is started anew."""
    torch.manual_seed(2)
    with torch.no_grad():
        for piece in m.qkv.weight.chunk(3):
            piece.normal_(0, 0.3)
        q, k, v = m.qkv.bias.split(16)
        q.zero_()
        k.fill_(0.1)
        v.copy_(q + k)
        m.both.weight.narrow(0, 32, 8).mul_(2)
        m.head.weight.select(0, 7).zero_()
        for row in m.head.weight.unbind(0)[:3]:
            row.add_(1)
    return m(x)


@on
def PackedByData(m, x):
    m.qkv.weight.data[:16].div_(math.sqrt(2))
    m.qkv.weight.data[20] = m.qkv.weight.data[21]
    m.both.bias.data[:32] = torch.linspace(-1, 1, 32, dtype=torch.float64)
    return m(x)


@on
def ReadRows(m, x):
    """Values of rows are read, and compared with those of the whole."""
    w = m.qkv.weight.detach()
    n = m.both.weight.data
    return w[17].sum().item(), w[:16].norm().item(), float(n[33, 2]), n[40:44].tolist(), [float(r.sum()) for r in n[:2]]


@on
def PenaltyOnRows(m, x):
    """A gradient through some rows of a packed weight."""
    loss = m.qkv.weight[:16].pow(2).sum() + m.qkv.weight[40].sum() * 2
    loss.backward()
    return m(x)


@on
def GradientsOfRows(m, x):
    """Gradients of some rows are taken out, and others are scaled."""
    m(x).pow(2).sum().backward()
    m.qkv.weight.grad[16:32] = 0
    m.qkv.bias.grad[:16].mul_(3)
    m.table.weight.grad[5].zero_()
    torch.optim.SGD(m.parameters(), lr=0.01).step()
    m.zero_grad()
    return m(x)


@on
def DrawnAnew(m, x):
    """All of them, as model code does it."""
    torch.manual_seed(11)
    for module in m.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.2)
            nn.init.uniform_(module.bias, -0.1, 0.1)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
    return m(x)


@on
def DrawnByModules(m, x):
    torch.manual_seed(12)
    m.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    return m(x)


@on
def DrawnWithGenerator(m, x):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        m.qkv.weight.normal_(0, 0.2, generator=generator)
        m.down.weight.uniform_(-0.2, 0.2, generator=generator)
        m.head.bias.bernoulli_(0.5, generator=generator)
    return m(x)


@on
def DrawnFor(m, x):
    """kaiming, xavier and a mask by dropout of a weight."""
    torch.manual_seed(13)
    nn.init.kaiming_normal_(m.both.weight, mode="fan_out")
    nn.init.kaiming_uniform_(m.qkv.weight, a=math.sqrt(5))
    nn.init.xavier_normal_(m.o.weight, gain=0.5)
    with torch.no_grad():
        m.down.weight.exponential_(2.0)
    return m(x)


@on
def LoggedNorms(m, x):
    """What a training script logs: norms and means of weights and of gradients."""
    m(x).pow(2).sum().backward()
    norms = {name: p.grad.norm().item() for name, p in m.named_parameters()}
    means = {name: (p.detach().mean().item(), p.abs().max().item()) for name, p in m.named_parameters()}
    total = math.sqrt(sum(value**2 for value in norms.values()))
    finite = all(bool(torch.isfinite(p.grad).all()) for p in m.parameters())
    return norms, means, total, finite, f"{float(m.qkv.weight.grad.pow(2).sum()):.6f}"


@on
def SkippedIfLarge(m, x):
    """The step is left out if the norm is above a limit: all ranks must agree."""
    m(x).pow(2).sum().backward()
    total = sum(p.grad.pow(2).sum().item() for p in m.parameters()) ** 0.5
    for limit in (total * 0.99, total * 1.01):
        if total < limit:
            torch.optim.SGD(m.parameters(), lr=0.01).step()
    m.zero_grad()
    return m(x)


@recurrent
def ForgetBias(m, x):
    """The forget gate's bias is one, as everybody sets it."""
    for name, p in m.lstm.named_parameters():
        if "bias" in name:
            n = p.size(0)
            p.data[n // 4 : n // 2].fill_(1)
    return m(x)


@recurrent
def OrthogonalGates(m, x):
    """Each gate's weight gets a value of its own."""
    with torch.no_grad():
        for name, p in m.lstm.named_parameters():
            if "weight" in name:
                for n, gate in enumerate(p.chunk(4, 0)):
                    gate.fill_(0.05 * (n + 1))
    return m(x)


@on
def ColumnsNormalised(m, x):
    with torch.no_grad():
        m.down.weight[:, 4:8] = F.normalize(m.down.weight[:, 4:8], dim=0)
        m.o.weight[:, 0] = m.o.weight[:, 1] + m.o.weight[:, 2]
        m.qkv.weight[-16:] = m.qkv.weight[:16]
    return m(x)


@on
def GrownTable(m, x):
    """New rows are the mean of the old ones; the table keeps its size."""
    with torch.no_grad():
        mean = m.table.weight[:28].mean(0, keepdim=True)
        m.table.weight[28:] = mean
        m.head.weight[28:] = m.head.weight[:28].mean(0)
        m.head.bias[28:] = m.head.bias[:28].min()
    return m(x)


@on
def SwappedRows(m, x):
    with torch.no_grad():
        m.table.weight[[1, 2]] = m.table.weight[[2, 1]]
        m.table.weight[x[0]] = m.table.weight[x[0]] * 0.5
        m.qkv.weight[m.qkv.bias > 0.1] = 0
    return m(x)
