"""Models of series, graphs, proteins, agents and shops as their repositories write them: all of them sound."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats, ids

SERIES = floats(2, 24, 4)
EDGES = torch.tensor([[0, 0, 1, 2, 3, 3, 4, 5, 5, 1, 2, 4], [1, 2, 2, 3, 4, 5, 5, 0, 1, 0, 0, 3]])
NODES = floats(6, 16)


@case(call(floats(4, 12)))
class NBeats(nn.Module):
    """Blocks that each take away what they explain: one of a trend, one of seasons, one of any kind."""

    class Block(nn.Module):
        def __init__(self, size, theta, basis, units=32):
            super().__init__()
            self.fc = nn.ModuleList([nn.Linear(size, units), nn.Linear(units, units)])
            self.theta, self.basis = nn.Linear(units, theta), basis

        def forward(self, x):
            for layer in self.fc:
                x = torch.relu(layer(x))
            return self.basis(self.theta(x))

    def __init__(self, backcast=12, horizon=4, degree=3):
        super().__init__()
        grid_b, grid_f = torch.arange(backcast) / backcast, torch.arange(horizon) / horizon
        self.register_buffer("tb", torch.stack([grid_b**i for i in range(degree)]))
        self.register_buffer("tf", torch.stack([grid_f**i for i in range(degree)]))
        freq = torch.arange(1, 3)[:, None] * 2 * math.pi
        self.register_buffer("sb", torch.cat([torch.cos(freq * grid_b), torch.sin(freq * grid_b)]))
        self.register_buffer("sf", torch.cat([torch.cos(freq * grid_f), torch.sin(freq * grid_f)]))
        self.backcast, self.horizon = backcast, horizon
        self.blocks = nn.ModuleList(
            [
                self.Block(backcast, 2 * degree, self.trend),
                self.Block(backcast, 8, self.season),
                self.Block(backcast, backcast + horizon, self.generic),
            ]
        )

    def trend(self, t):
        return t[:, :3] @ self.tb, t[:, 3:] @ self.tf

    def season(self, t):
        return torch.einsum("bp,pt->bt", t[:, :4], self.sb), torch.einsum("bp,pt->bt", t[:, 4:], self.sf)

    def generic(self, t):
        return t[:, : self.backcast], t[:, -self.horizon :]

    def forward(self, x):
        residuals, forecast = x.flip(dims=(1,)), x[:, -1:]
        for block in self.blocks:
            back, fore = block(residuals)
            residuals, forecast = residuals - back, forecast + fore
        return forecast


@case(call(floats(2, 12, 5), floats(2, 3)))
class TemporalFusion(nn.Module):
    """TFT: gated residual nets, a softmax over variables, an LSTM, attention whose heads share values."""

    class Grn(nn.Module):
        def __init__(self, d_in, d, d_out, ctx=0):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(d_in, d), nn.Linear(d, d)
            self.ctx = nn.Linear(ctx, d, bias=False) if ctx else None
            self.gate, self.norm = nn.Linear(d, 2 * d_out), nn.LayerNorm(d_out)
            self.skip = nn.Linear(d_in, d_out) if d_in != d_out else None

        def forward(self, x, c=None):
            h = self.fc1(x)
            if c is not None:
                h = h + self.ctx(c)
            h = F.glu(self.gate(self.fc2(F.elu(h))), -1)
            return self.norm(h + (x if self.skip is None else self.skip(x)))

    def __init__(self, n=5, d=16, h=4):
        super().__init__()
        self.n, self.h, self.d = n, h, d
        self.static = self.Grn(3, d, d)
        self.embed = nn.ModuleList(nn.Linear(1, d) for _ in range(n))
        self.select, self.each = self.Grn(n * d, d, n, ctx=d), nn.ModuleList(self.Grn(d, d, d) for _ in range(n))
        self.lstm = nn.LSTM(d, d, batch_first=True)
        self.q, self.k, self.v, self.o = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d // h), nn.Linear(d // h, d)
        self.out = nn.Linear(d, 3)

    def forward(self, x, s):
        c = self.static(s)
        v = torch.stack([e(x[..., i : i + 1]) for i, e in enumerate(self.embed)], dim=-1)
        w = torch.softmax(self.select(v.flatten(2), c.unsqueeze(1)), dim=-1).unsqueeze(2)
        v = torch.stack([g(v[..., i]) for i, g in enumerate(self.each)], dim=-1)
        y, _ = self.lstm((w * v).sum(-1), (c.unsqueeze(0), torch.zeros_like(c).unsqueeze(0)))
        b, t, d = y.shape
        q, k = (f(y).view(b, t, self.h, -1).transpose(1, 2) for f in (self.q, self.k))
        mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), 1)
        att = (q @ k.transpose(-1, -2) / math.sqrt(d // self.h)).masked_fill(mask, -1e9).softmax(-1)
        return self.out(y + self.o((att @ self.v(y).unsqueeze(1)).mean(1)))


@case(call(SERIES))
class Mixer(nn.Module):
    """TSMixer: mixing over time with batch norm over both, then over features."""

    def __init__(self, length=24, channels=4, hidden=16, pred=6):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm1d(length * channels), nn.BatchNorm1d(length * channels)
        self.time = nn.Sequential(nn.Linear(length, length), nn.ReLU(), nn.Dropout(0.0))
        self.feat = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels))
        self.head = nn.Linear(length, pred)

    def forward(self, x):
        y = self.norm1(torch.flatten(x, 1, -1)).reshape(x.shape)
        x = x + self.time(y.transpose(1, 2)).transpose(1, 2)
        y = self.norm2(torch.flatten(x, 1, -1)).reshape(x.shape)
        x = x + self.feat(y)
        return self.head(x.transpose(1, 2)).transpose(1, 2)


def scatter_softmax(src, index, n):
    peak = torch.full((n, *src.shape[1:]), -torch.inf, dtype=src.dtype).index_reduce(0, index, src.detach(), "amax")
    out = (src - peak[index]).exp()
    total = torch.zeros(n, *src.shape[1:], dtype=src.dtype).index_add(0, index, out)
    return out / (total[index] + 1e-16)


@case(call(NODES, EDGES), vary=False)
class GraphAttention(nn.Module):
    """GAT v2: heads by edges, a softmax over who points to a node, joined, then a mean over heads."""

    class Conv(nn.Module):
        def __init__(self, d, out, h, concat):
            super().__init__()
            self.h, self.out, self.concat = h, out, concat
            self.lin_l, self.lin_r = nn.Linear(d, h * out), nn.Linear(d, h * out)
            self.att = nn.Parameter(torch.randn(1, h, out) * 0.3)
            self.bias = nn.Parameter(torch.zeros(h * out if concat else out))

        def forward(self, x, edge_index):
            n = x.size(0)
            src, dst = edge_index
            left, right = self.lin_l(x).view(-1, self.h, self.out), self.lin_r(x).view(-1, self.h, self.out)
            e = (F.leaky_relu(left[src] + right[dst], 0.2) * self.att).sum(dim=-1)
            a = scatter_softmax(e, dst, n)
            out = torch.zeros_like(left).index_add(0, dst, left[src] * a.unsqueeze(-1))
            out = out.view(-1, self.h * self.out) if self.concat else out.mean(dim=1)
            return out + self.bias

    def __init__(self, d=16):
        super().__init__()
        self.conv1, self.conv2 = self.Conv(d, 8, 4, True), self.Conv(32, 6, 4, False)

    def forward(self, x, edge_index):
        return self.conv2(F.elu(self.conv1(x, edge_index)), edge_index)


@case(call(NODES, floats(6, 3), EDGES), inputs={"h": NODES, "x": floats(6, 3), "edges": EDGES}, vary=False)
class Equivariant(nn.Module):
    """EGNN: messages of features and distances, which move the places too."""

    def __init__(self, d=16, hidden=32):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * d + 1, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.att = nn.Sequential(nn.Linear(hidden, 1), nn.Sigmoid())
        last = nn.Linear(hidden, 1, bias=False)
        nn.init.xavier_uniform_(last.weight, gain=0.1)
        self.coord = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), last)
        self.node = nn.Sequential(nn.Linear(hidden + d, hidden), nn.SiLU(), nn.Linear(hidden, d))

    def forward(self, h, x, edges):
        row, col = edges
        diff = x[row] - x[col]
        radial = (diff**2).sum(1, keepdim=True)
        m = self.edge(torch.cat([h[row], h[col], radial], dim=1))
        m = m * self.att(m)
        trans = torch.clamp(diff / (radial.sqrt() + 1) * self.coord(m), -100, 100)
        count = x.new_zeros(x.shape).index_add(0, row, torch.ones_like(trans)).clamp(min=1)
        x = x + x.new_zeros(x.shape).index_add(0, row, trans) / count
        agg = h.new_zeros(h.shape[0], m.shape[1]).scatter_add(0, row.unsqueeze(-1).expand(-1, m.shape[1]), m)
        return h + self.node(torch.cat([h, agg], dim=1)), x


class Gated(nn.Module):
    """Attention with gates and a bias from pairs, as AlphaFold writes it."""

    def __init__(self, d, c=8, h=4):
        super().__init__()
        self.h, self.c = h, c
        self.q, self.k, self.v = (nn.Linear(d, h * c, bias=False) for _ in range(3))
        self.g, self.o = nn.Linear(d, h * c), nn.Linear(h * c, d)

    def forward(self, x, bias):
        q, k, v = (f(x).view(*x.shape[:-1], self.h, self.c) for f in (self.q, self.k, self.v))
        a = torch.einsum("...qhc,...khc->...hqk", q / math.sqrt(self.c), k) + bias
        o = torch.einsum("...hqk,...khc->...qhc", torch.softmax(a, -1), v)
        return self.o((o * torch.sigmoid(self.g(x)).view(o.shape)).flatten(-2))


@case(
    call(floats(1, 3, 6, 16), floats(1, 6, 6, 16, seed=1)),
    inputs={"m": floats(1, 3, 6, 16), "z": floats(1, 6, 6, 16, seed=1)},
    vary=False,
)
class Evoformer(nn.Module):
    """Rows of an alignment attend with a bias of pairs; the mean of outer products goes back to the pairs."""

    def __init__(self, d=16, h=4, c=8):
        super().__init__()
        self.nm, self.nz, self.no, self.nt = (nn.LayerNorm(d) for _ in range(4))
        self.bias, self.row = nn.Linear(d, h, bias=False), Gated(d)
        self.a, self.b, self.outer = nn.Linear(d, c), nn.Linear(d, c), nn.Linear(c * c, d)
        self.t1, self.t2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, m, z):
        bias = self.bias(self.nz(z)).permute(0, 3, 1, 2).unsqueeze(1)
        m = m + self.row(self.nm(m), bias)
        m = m + self.t2(F.relu(self.t1(self.nt(m))))
        y = self.no(m)
        a, b = self.a(y).transpose(-2, -3), self.b(y).transpose(-2, -3)
        outer = torch.einsum("...bac,...dae->...bdce", a, b)
        outer = outer.reshape(*outer.shape[:-2], -1)
        return m, z + self.outer(outer) / (m.shape[1] + 1e-3)


@case(call(floats(1, 6, 16), floats(1, 6, 6, 8), floats(1, 6, 3, 3), floats(1, 6, 3, seed=4)), vary=False)
class InvariantPoints(nn.Module):
    """IPA: scalars, pairs and points of each head attend together; points come back in their own frames."""

    def __init__(self, s=16, z=8, h=4, c=4, p=2):
        super().__init__()
        self.h, self.c, self.p = h, c, p
        self.q, self.kv = nn.Linear(s, h * c), nn.Linear(s, 2 * h * c)
        self.qp, self.kvp = nn.Linear(s, h * p * 3), nn.Linear(s, h * 2 * p * 3)
        self.b, self.head_weights = nn.Linear(z, h), nn.Parameter(torch.full((h,), 0.54))
        self.out = nn.Linear(h * (z + c + 4 * p), s)

    def forward(self, s, z, rot, trans):
        b, n, _ = s.shape
        q = self.q(s).view(b, n, self.h, -1)
        k, v = self.kv(s).view(b, n, self.h, -1).split(self.c, dim=-1)
        to_global = lambda pts: torch.einsum("bnij,bnhpj->bnhpi", rot, pts) + trans[:, :, None, None]  # noqa: E731
        qp = to_global(self.qp(s).view(b, n, self.h, self.p, 3))
        kp, vp = to_global(self.kvp(s).view(b, n, self.h, 2 * self.p, 3)).split([self.p, self.p], dim=-2)
        a = torch.einsum("bihc,bjhc->bhij", q, k) * math.sqrt(1.0 / (3 * self.c))
        a = a + math.sqrt(1.0 / 3) * self.b(z).permute(0, 3, 1, 2)
        d = ((qp.unsqueeze(2) - kp.unsqueeze(1)) ** 2).sum(-1).sum(-1)
        w = F.softplus(self.head_weights) * math.sqrt(1.0 / (3 * (self.p * 9.0 / 2)))
        a = torch.softmax(a - 0.5 * (d * w).permute(0, 3, 1, 2), dim=-1)
        o = torch.einsum("bhij,bjhc->bihc", a, v).flatten(-2)
        op = torch.einsum("bhij,bjhpx->bihpx", a, vp) - trans[:, :, None, None]
        op = torch.einsum("bnji,bnhpj->bnhpi", rot, op)
        norm = torch.sqrt((op**2).sum(-1) + 1e-8).flatten(-2)
        pair = torch.einsum("bhij,bijc->bihc", a, z).flatten(-2)
        return self.out(torch.cat([o, *torch.unbind(op.flatten(2, 3), dim=-1), norm, pair], dim=-1))


@case(call(ids(4, below=30), ids(4, 6, below=30), torch.tensor([6, 3, 4, 1])), vary=False)
class InterestNetwork(nn.Module):
    """DIN: what was bought weighed by what is offered, with Dice, whose gate is a batch norm."""

    class Dice(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.bn, self.alpha = nn.BatchNorm1d(n, eps=1e-8, affine=False), nn.Parameter(torch.full((n,), 0.1))

        def forward(self, x):
            p = torch.sigmoid(self.bn(x.reshape(-1, x.shape[-1])).view(x.shape))
            return p * x + (1 - p) * self.alpha * x

    def __init__(self, d=8):
        super().__init__()
        self.item = nn.Embedding(30, d)
        self.att = nn.Sequential(nn.Linear(4 * d, 32), self.Dice(32), nn.Linear(32, 1))
        self.fc = nn.Sequential(nn.Linear(3 * d, 32), self.Dice(32), nn.Linear(32, 16), self.Dice(16), nn.Linear(16, 1))

    def forward(self, target, history, lengths):
        q, k = self.item(target), self.item(history)
        e = q.unsqueeze(1).expand_as(k)
        score = self.att(torch.cat([e, k, e - k, e * k], dim=-1)).squeeze(-1)
        mask = torch.arange(history.shape[1], device=history.device)[None, :] < lengths[:, None]
        score = torch.where(mask, score, torch.full_like(score, -(2**32) + 1)).softmax(-1)
        interest = torch.bmm(score.unsqueeze(1), k).squeeze(1)
        return self.fc(torch.cat([interest, q, interest * q], dim=-1)).sigmoid()


@case(call(floats(4, 16)))
class CrossOfExperts(nn.Module):
    """DCN V2: low-rank crosses, some of them at once, weighed by a gate."""

    def __init__(self, d=16, low=8, experts=4, layers=2):
        super().__init__()
        self.experts, self.layers = experts, layers
        self.u = nn.ParameterList(nn.Parameter(torch.randn(experts, d, low) * 0.2) for _ in range(layers))
        self.v = nn.ParameterList(nn.Parameter(torch.randn(experts, d, low) * 0.2) for _ in range(layers))
        self.c = nn.ParameterList(nn.Parameter(torch.randn(experts, low, low) * 0.2) for _ in range(layers))
        self.gating = nn.ModuleList(nn.Linear(d, 1, bias=False) for _ in range(experts))
        self.bias, self.out = nn.Parameter(torch.zeros(layers, d)), nn.Linear(d, 1)

    def forward(self, x0):
        x = x0
        for i in range(self.layers):
            outs, gates = [], []
            for e in range(self.experts):
                gates.append(self.gating[e](x))
                v = torch.tanh(x @ self.v[i][e])
                v = torch.tanh(v @ self.c[i][e].t())
                outs.append(x0 * (v @ self.u[i][e].t() + self.bias[i]))
            mixed = torch.stack(outs, 2) @ torch.stack(gates, 1).softmax(1)
            x = mixed.squeeze(2) + x
        return self.out(x)


@case(call(floats(2, 4, 6), floats(2, 4, 3), floats(2, 4, 1), ids(2, 4, below=10)))
class DecisionTransformer(nn.Module):
    """Returns, states and actions in turn; each is read where it stood."""

    def __init__(self, d=16, h=4):
        super().__init__()
        self.d, self.h = d, h
        self.time, self.ret, self.state, self.action = (
            nn.Embedding(10, d),
            nn.Linear(1, d),
            nn.Linear(6, d),
            nn.Linear(3, d),
        )
        self.ln, self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.proj = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.p_state, self.p_action, self.p_ret = (
            nn.Linear(d, 6),
            nn.Sequential(nn.Linear(d, 3), nn.Tanh()),
            nn.Linear(d, 1),
        )

    def forward(self, states, actions, returns, steps):
        b, t = states.shape[:2]
        e = self.time(steps)
        x = torch.stack((self.ret(returns) + e, self.state(states) + e, self.action(actions) + e), dim=1)
        x = self.ln(x.permute(0, 2, 1, 3).reshape(b, 3 * t, self.d))
        q, k, v = self.c_attn(self.n1(x)).split(self.d, dim=2)
        q, k, v = (y.view(b, 3 * t, self.h, -1).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(b, 3 * t, self.d)
        x = x + self.c_proj(y)
        x = x + self.proj(F.gelu(self.fc(self.n2(x))))
        x = x.reshape(b, t, 3, self.d).permute(0, 2, 1, 3)
        return self.p_state(x[:, 2]), self.p_action(x[:, 1]), self.p_ret(x[:, 2])


@case(call(floats(2, 12), ids(2, 3, below=4)))
class MuZero(nn.Module):
    """A learned model unrolled; gradients into its state are halved by hooks, states scaled to [0, 1]."""

    def __init__(self, d=16, actions=4):
        super().__init__()
        self.actions = actions
        self.rep = nn.Sequential(nn.Linear(12, 32), nn.ELU(), nn.Linear(32, d))
        self.dyn = nn.Sequential(nn.Linear(d + actions, 32), nn.ELU(), nn.Linear(32, d))
        self.rew, self.pol, self.val = (
            nn.Sequential(nn.Linear(d, 32), nn.ELU(), nn.Linear(32, n)) for n in (5, actions, 5)
        )

    @staticmethod
    def scaled(s):
        low, high = s.min(1, keepdim=True)[0], s.max(1, keepdim=True)[0]
        scale = high - low
        scale[scale < 1e-5] += 1e-5
        return (s - low) / scale

    def forward(self, obs, actions):
        s = self.scaled(self.rep(obs))
        outs = [(self.pol(s), self.val(s))]
        for t in range(actions.shape[1]):
            a = F.one_hot(actions[:, t], self.actions).to(s.dtype)
            s = self.scaled(self.dyn(torch.cat((s, a), dim=1)))
            outs.append((self.pol(s), self.val(s), self.rew(s)))
            if s.requires_grad:
                s.register_hook(lambda grad: grad * 0.5)
        return outs


@case(call(floats(2, 3, 4), floats(2, 3, 16)))
class QMix(nn.Module):
    """Values of agents mixed by weights that a net makes of the state, and that are never negative."""

    def __init__(self, agents=4, state=16, embed=32):
        super().__init__()
        self.agents, self.embed = agents, embed
        self.w1 = nn.Sequential(nn.Linear(state, 64), nn.ReLU(), nn.Linear(64, embed * agents))
        self.w2 = nn.Sequential(nn.Linear(state, 64), nn.ReLU(), nn.Linear(64, embed))
        self.b1, self.v = (
            nn.Linear(state, embed),
            nn.Sequential(nn.Linear(state, embed), nn.ReLU(), nn.Linear(embed, 1)),
        )

    def forward(self, qs, states):
        b = qs.size(0)
        states, qs = states.reshape(-1, states.shape[-1]), qs.view(-1, 1, self.agents)
        w1 = torch.abs(self.w1(states)).view(-1, self.agents, self.embed)
        b1 = self.b1(states).view(-1, 1, self.embed)
        hidden = F.elu(torch.bmm(qs, w1) + b1)
        w2 = torch.abs(self.w2(states)).view(-1, self.embed, 1)
        return (torch.bmm(hidden, w2) + self.v(states).view(-1, 1, 1)).view(b, -1, 1)
