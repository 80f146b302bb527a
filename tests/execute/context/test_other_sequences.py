"""Context parallelism where a model has a second sequence: an encoder's, or a picture's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import autoplan
from autoplan.check.scoreboard.run import scoreboard
from autoplan.values import ExchangeToPieces, OwnPositions


class Mixer(torch.nn.Module):
    """Heads of one sequence read another, or the same."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], 4, 8).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(heads(self.q(x)), heads(self.k(other)), heads(self.v(other)))
        found: torch.Tensor = self.o(mixed.transpose(1, 2).reshape(x.shape))
        return found


class Block(torch.nn.Module):
    def __init__(self, crosses: bool = False) -> None:
        super().__init__()
        self.norm, self.mixer = torch.nn.LayerNorm(32), Mixer()
        self.cross = Mixer() if crosses else None

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm(x)
        x = x + torch.tanh(self.mixer(y, y))
        if self.cross is not None and other is not None:
            x = x + torch.tanh(self.cross(x, other))
        return x


class EncoderDecoder(torch.nn.Module):
    """What the encoder made is read by each block of the decoder, and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(40, 32)
        self.encoder = torch.nn.ModuleList(Block() for _ in range(2))
        self.decoder = torch.nn.ModuleList(Block(crosses=True) for _ in range(2))
        self.norm, self.head = torch.nn.LayerNorm(32), torch.nn.Linear(32, 40)

    def forward(self, input_ids: torch.Tensor, decoder_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = self.table(input_ids)
        for block in self.encoder:
            encoded = block(encoded)
        encoded, x = self.norm(encoded), self.table(decoder_ids)
        for block in self.decoder:
            x = block(x, encoded)
        return self.head(x), encoded


class WithPicture(torch.nn.Module):
    """A tower's stream, of which one position is read alone and the others stand in the text."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.table = torch.nn.Linear(6, 32), torch.nn.Embedding(40, 32)
        self.first = torch.nn.Parameter(torch.randn(1, 1, 32))
        self.tower = torch.nn.ModuleList(Block() for _ in range(2))
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.pool, self.head = torch.nn.Linear(32, 32), torch.nn.Linear(32, 40)

    def forward(self, input_ids: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.cat([self.first.expand(len(pixels), 1, 32), self.patches(pixels)], 1)
        for block in self.tower:
            y = block(y)
        pooled, x = self.pool(y[:, 0]), self.table(input_ids)
        x = x.masked_scatter((input_ids == 3)[..., None], y[:, 1:] * pooled[:, None])
        for layer in self.layers:
            x = layer(x)
        return self.head(x), y


class ReturnedTwice(torch.nn.Module):
    """A module in it returns the tower's stream under two names."""

    class Inner(WithPicture):
        def forward(self, input_ids: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
            logits, y = super().forward(input_ids, pixels)
            return logits, y, y

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, input_ids: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self.inner(input_ids, pixels)
        return found


class Collected(EncoderDecoder):
    """The model's own code reads across what the first block made, which the next block takes in."""

    def forward(self, input_ids: torch.Tensor, decoder_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.encoder[0](self.table(input_ids))
        encoded, x = self.norm(self.encoder[1](first) + first.cumsum(1)), self.table(decoder_ids)
        for block in self.decoder:
            x = block(x, encoded)
        return self.head(x), encoded


class Queries(EncoderDecoder):
    """Learned queries go through the second stack, each block of which is given all of the first one's stream; and a
    module that the model does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.spare = torch.nn.Parameter(torch.randn(1, 4, 32)), torch.nn.Linear(32, 32)

    def forward(self, input_ids: torch.Tensor, decoder_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        encoded, x = self.table(input_ids), self.queries.expand(len(input_ids), -1, -1)
        for block in self.encoder:
            encoded = block(encoded)
        for block in self.decoder:
            x = block(x, encoded)
        return self.head(encoded), x


class Placed(WithPicture):
    """The model's own code turns features, places them in the text, and returns them."""

    def forward(self, input_ids: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, x = self.patches(pixels), self.table(input_ids)
        for block in self.tower:
            y = block(y)
        features = self.pool(y).reshape(-1, 32)
        x = x.masked_scatter((input_ids == 3)[..., None], features)
        for layer in self.layers:
            x = layer(x)
        return self.head(x), features


class Gate(torch.nn.Module):
    """Shares of two streams, of which two calls read one value."""

    def __init__(self) -> None:
        super().__init__()
        self.share = torch.nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        share = torch.sigmoid(self.share)
        return x * share + y * (1 - share)


class GatedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm(x)
        found: torch.Tensor = self.gate(x, self.mixer(y, y))
        return found


class Gated(EncoderDecoder):
    """What the first block takes in is read whole in it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.ModuleList(GatedBlock() for _ in range(2))


class Counted(WithPicture):
    """A module that treats positions apart looks up how many there are."""

    class Scaled(torch.nn.Linear):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return super().forward(y) * {4: 2.0, 5: 0.5}[y.shape[1]]

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.Scaled(32, 32)

    def forward(self, input_ids: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, x = self.patches(pixels), self.table(input_ids)
        for block in self.tower:
            y = block(y)
        x = x.masked_scatter((input_ids == 3)[..., None], self.pool(y))
        for layer in self.layers:
            x = layer(x)
        return self.head(x), x


def feeds_of(kind: str, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 40, (2, length))
    if kind == "encoder":
        return {"input_ids": ids, "decoder_ids": torch.randint(4, 40, (2, length - 3))}
    ids[:, 1:6] = 3
    return {"input_ids": ids, "pixels": torch.randn(2, 5, 6)}


def test_cross_attention_runs_for_own_heads() -> None:
    torch.manual_seed(3)
    model, feeds = EncoderDecoder().double(), feeds_of("encoder", 14)
    plan = autoplan.plan(model, cp_size=2, inputs=feeds)
    exchanged = {one.pattern.replace("*", "0") for one in plan.runtime.of(ExchangeToPieces)}
    assert "decoder.0.cross.q" in exchanged  # and not run on all positions by every rank
    for length in (14, 11):
        assert autoplan.verify(model, plan, inputs=feeds_of("encoder", length)).ok


def test_a_tower_whose_positions_are_read_alone_is_cut_up_to_its_end() -> None:
    torch.manual_seed(3)
    model, feeds = WithPicture().double(), feeds_of("picture", 14)
    plan = autoplan.plan(model, cp_size=2, inputs=feeds)
    cut = {one.pattern.partition(".")[0] for one in plan.runtime.of(OwnPositions)}
    assert {"layers", "tower"} <= cut
    assert any("tower.1: select in the model reads across" in finding.message for finding in plan.findings)
    for length in (14, 11):
        assert autoplan.verify(model, plan, inputs=feeds_of("picture", length)).ok


def test_where_a_cut_tower_fails_in_the_trial_the_text_alone_is_cut() -> None:
    torch.manual_seed(3)
    model, feeds = Counted().double(), feeds_of("picture", 14)
    plan = autoplan.plan(model, cp_size=2, inputs=feeds)
    assert {one.pattern.partition(".")[0] for one in plan.runtime.of(OwnPositions)} <= {"layers", "table"}
    assert any("all blocks of tower: sharded along their sequence as well" in f.message for f in plan.findings)
    assert plan.proof.ok
    for length in (14, 11):
        assert autoplan.verify(model, plan, inputs=feeds_of("picture", length)).ok


@pytest.mark.parametrize(
    ("kind", "feed"),
    (
        (ReturnedTwice, "picture"),
        (Collected, "encoder"),
        (Queries, "encoder"),
        (Placed, "picture"),
        (Gated, "encoder"),
    ),
)
def test_what_several_read_is_counted_once(kind: type[torch.nn.Module], feed: str) -> None:
    torch.manual_seed(3)
    model = kind().double()
    plan = autoplan.plan(model, cp_size=2, inputs=feeds_of(feed, 14), prove="none")
    assert plan.runtime.of(OwnPositions)
    for length in (14, 11):
        report = autoplan.verify(model, plan, inputs=feeds_of(feed, length), checks=["forward"])
        assert report.ok, report


def test_what_failed_in_the_trial_is_refused_by_name() -> None:
    board = scoreboard("causal_lm", 1, cp_size=2, only=["xlm", "xmod"], lengths=(16,))
    assert [score.verdict for score in board.scores] == ["refused", "refused"]
    masked, adapted = (score.reason for score in board.scores)
    assert "mul_ in transformer uses a replicated value, and no module boundary precedes it" in masked
    assert "adapter_modules.de_DE.dense2 that was recorded empty" in adapted
