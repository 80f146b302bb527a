"""Modules whose arguments are concatenated, with each other or with what layers made of others."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from unfamiliar import Mlp

__all__ = ["JOINED"]


class Critic(nn.Module):
    """Vectors, concatenated along dim 1; what is told of them comes flattened, and noise is drawn outside."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.into, self.mlp, self.value = nn.Linear(11, 5), nn.Linear(16, 16), Mlp(16), nn.Linear(16, 1)

    def _value(self, x, a):
        return self.value(self.mlp(self.into(torch.cat([x, a], 1))))

    def forward(self, observations, actions, rewards, next_observations, dones, noise):
        after = torch.tanh(self.policy(next_observations) + noise)
        best = self._value(next_observations, after)
        wanted = rewards.flatten() + (1 - dones.flatten()) * 0.9 * best.view(-1)
        return F.mse_loss(self._value(observations, actions).view(-1), wanted)


class Interest(nn.Module):
    """One id each of what is offered, beside histories of the same."""

    def __init__(self) -> None:
        super().__init__()
        self.goods, self.kinds, self.mlp = nn.Embedding(50, 8), nn.Embedding(12, 8), Mlp(16)
        self.attend, self.out = nn.Parameter(torch.randn(16, 16)), nn.Linear(32, 1)

    def forward(self, goods, kinds, goods_his, kinds_his):
        offered = torch.cat([self.goods(goods), self.kinds(kinds)], 1)
        past = self.mlp(torch.cat([self.goods(goods_his), self.kinds(kinds_his)], 2))
        scores = torch.bmm(past, (offered @ self.attend).unsqueeze(-1))
        return self.out(torch.cat([offered, (past * scores.softmax(1)).sum(1)], 1))


class Dream(nn.Module):
    """Steps come first: what is told of them is turned, and concatenated with what layers made of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.rnn, self.mlp = nn.Conv2d(3, 12, 32), nn.LSTM(12 + 5, 16), Mlp(16)

    def forward(self, obs, action, reward):
        batch, steps = obs.shape[:2]
        seen = self.see(obs.flatten(0, 1)).mean((2, 3)).view(batch, steps, -1).transpose(0, 1)
        action, reward = (one.transpose(0, 1) for one in (action, reward))
        made = self.mlp(self.rnn(torch.cat([action, seen], -1))[0])
        return F.mse_loss(made[..., 0], reward)


class Calendar(nn.Module):
    """What is known of each time goes beside what is known of the whole series."""

    def __init__(self) -> None:
        super().__init__()
        self.shop, self.rnn, self.mlp = nn.Embedding(20, 6), nn.GRU(1 + 7 + 3, 16, batch_first=True), Mlp(16)

    def forward(self, shop_cat, past_time_feat, past_target, future_time_feat, future_target):
        scale = past_target[:, -8:].abs().mean(1, keepdim=True)
        series = torch.cat((past_target[:, -8:], future_target[:, :-1]), 1) / scale
        shop = torch.cat((self.shop(shop_cat.squeeze(-1)), scale), -1)
        times = torch.cat((past_time_feat[:, -7:], future_time_feat), 1)
        known = torch.cat((shop.unsqueeze(1).expand(-1, times.shape[1], -1), times), -1)
        return self.mlp(self.rnn(torch.cat((series.unsqueeze(-1), known), -1))[0])


class Mesh(nn.Module):
    """Positions of nodes, looked up by an edge list that comes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, 3))
        self.nodes, self.edges, self.mlp = nn.Linear(2 + 4, 16), nn.Linear(3, 16), Mlp(16)

    def forward(self, velocity, node_type, mesh_pos, edge_index):
        senders, receivers = edge_index
        way = mesh_pos[senders] - mesh_pos[receivers]
        edges = self.edges(torch.cat([way, way.norm(dim=-1, keepdim=True)], -1) / self.scale)
        nodes = self.nodes(torch.cat([velocity, F.one_hot(node_type, 4).to(velocity.dtype)], -1))
        return self.mlp(nodes.index_add(0, receivers, edges))


class Pairs(nn.Module):
    """A mask of pairs, given in whatever shape: it is viewed before anything else is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mlp = nn.Linear(7, 16), Mlp(16)

    def forward(self, xh, node_mask, edge_mask):
        batch, n, _ = xh.shape
        edge_mask = edge_mask.view(batch * n * n, 1)
        x = self.mlp(self.into(xh.view(batch * n, -1) * node_mask.view(batch * n, 1)))
        between = (x.view(batch, n, 1, 16) * x.view(batch, 1, n, 16)).view(-1, 16) * edge_mask
        return x.view(batch, n, 16) + between.view(batch, n, n, 16).sum(2)


class Columns(nn.Module):
    """Columns of a table, each written in its place, then flattened: a norm tells how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.tensor([0, 4, 9, 12]))
        self.kinds, self.numbers = nn.Embedding(20, 8), nn.ModuleList([nn.Linear(1, 8) for _ in range(3)])
        self.norm, self.into, self.mlp = nn.LayerNorm(56), nn.Linear(56, 16), Mlp(16)

    def forward(self, x_categ, x_cont):
        kinds, numbers = self.kinds(x_categ + self.first), x_cont.new_empty(*x_cont.shape, 8)
        for at, layer in enumerate(self.numbers):
            numbers[:, at] = layer(x_cont[:, at, None])
        return self.mlp(self.into(self.norm(torch.cat([kinds, numbers], 1).flatten(1))))


class Steps(nn.Module):
    """A cell, whose states are set back where an episode ended: one number for each row, not for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell, self.mlp = nn.Linear(8, 16), nn.LSTMCell(16, 16), Mlp(16)

    def forward(self, obs, hidden, masks):
        h, c = (state * masks.unsqueeze(-1) for state in hidden)
        h, c = self.cell(self.into(obs), (h, c))
        return self.mlp(h), (h, c)


class Squeezed(nn.Module):
    """Ids in a column of one are stacked with ids of other columns."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.item = nn.ModuleList([nn.Embedding(10, 8), nn.Embedding(12, 8)]), nn.Embedding(20, 8)
        self.into, self.mlp = nn.Linear(8, 16), Mlp(16)

    def forward(self, x_user, x_item):
        rows = [table(x_user[:, at]) for at, table in enumerate(self.users)] + [self.item(x_item.squeeze(1))]
        return self.mlp(self.into(torch.stack(rows, 1).sum(1)))


JOINED = {one.__name__: one for one in (Critic, Interest, Dream, Calendar, Mesh, Pairs, Columns, Steps, Squeezed)}
