"""The scoreboard: what its figures mean, and that one architecture cannot stop the others."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
from torch import nn

from autoplan.check.scoreboard import run as boards
from autoplan.check.scoreboard.score import How, main_stack, reductions_per_block, score, verdict_of
from autoplan.check.verify.on_ranks import recomputed
from autoplan.check.verify.sharded import CHECK_NAMES
from autoplan.cli.app import main
from autoplan.common.errors import AutoplanError
from autoplan.emit.tables.audit_report import scoreboard_view
from autoplan.emit.tables.terminal import plain_text
from autoplan.values import (
    AllReduce,
    AllReduceGradient,
    CallSite,
    Finding,
    NormCall,
    ParameterRule,
    Plan,
    Report,
    Runtime,
    Score,
    Scoreboard,
    Stack,
    Traffic,
)

ERROR = Finding("gradients", "error", "w", "gradient is off by 0.5 on rank 1")


def test_a_llama_has_megatrons_count() -> None:
    done = score("llama", "LlamaForCausalLM", How(2))
    assert (done.verdict, done.reason, done.share, done.unused) == ("exact", "", 1.0, ())
    assert (done.forward, done.backward) == (2, 2)
    # What was planned is what ran: two blocks, the embedding's sum forward, the head's backward.
    assert done.collectives["forward"]["all_reduce"] == 2 * 2 + 1
    assert done.collectives["backward"]["all_reduce"] == 2 * 2 + 1


def test_a_cut_stream_is_scored_at_the_lengths_asked_for() -> None:
    done = score("llama", "LlamaForCausalLM", How(2, sequence_parallel=True, lengths=(8, 12)))
    assert (done.verdict, done.regions, done.uncut) == ("exact", 2, "")
    assert (done.forward, done.backward) == (0, 2), "the norms' gradients are summed, once a step"
    prompted = score("cpmant", "CpmAntForCausalLM", How(2, sequence_parallel=True, lengths=(8,)))
    assert (prompted.verdict, prompted.regions, prompted.uncut) == ("exact", 2, ""), (
        "its stream is longer than its text"
    )


def test_checkpointed_blocks_run_again_and_are_counted() -> None:
    done = score("llama", "LlamaForCausalLM", How(2, checkpointing="block"))
    assert (done.verdict, done.recomputed) == ("exact", (2, 2))
    frozen = score("xlm", "XLMWithLMHeadModel", How(2, checkpointing="submodule"))
    assert (frozen.verdict, frozen.recomputed) == ("exact", (4, 4)), "a cache in every call"
    text = plain_text(scoreboard_view(Scoreboard("m", 2, "threads", (), (done, frozen), checkpointing="block")), 140)
    assert "2/2" in text and "all 6 blocks of 2 architectures checkpointed, 6 recomputed" in text


def test_a_block_without_a_checkpoint_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stacks = (Stack("", "other", ("0", "1")),)
    with pytest.raises(AutoplanError, match="0 was not checkpointed"):
        recomputed(model, stacks)
    assert recomputed(model.requires_grad_(False), stacks) == (0, 0), "frozen blocks need none"


def test_training_on_a_mesh_is_scored() -> None:
    done = score("llama", "LlamaForCausalLM", How(2, mesh="dp=2,tp=2"))
    assert (done.verdict, done.reason) == ("exact", "")


def test_position_tables_do_not_count_and_unused_parameters_do() -> None:
    assert score("gpt2", "GPT2LMHeadModel", How(2)).share == 1.0  # the position table stays whole
    done = score("bert", "BertModel", How(2))
    assert done.share == 1.0 and done.unused == ()


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (Report(True, gradients={"w": 1e-9}, forward=0.0), "exact"),
        (Report(False, (ERROR,), {"w": 0.5}, 0.0), "wrong"),
        (Report(False, (Finding("forward", "error", "", "the sharded model fails: oops"),)), "failed"),
        (
            Report(True, (Finding("gradients", "warn", "w", "NaN", kind="not-comparable"),), {"w": 0.0}, 0.0),
            "not comparable",
        ),
        (Report(True, (Finding("gradients", "warn", "w", "not comparable: so it says"),), {"w": 0.0}, 0.0), "exact"),
        (Report(True, (), {}, 0.0), "not comparable"),
    ],
)
def test_verdicts(report: Report, verdict: str) -> None:
    assert verdict_of(report)[0] == verdict


def test_the_worst_error_is_told() -> None:
    findings = (ERROR, Finding("gradients", "error", "v", "gradient is off by 0.7 on rank 0"))
    assert verdict_of(Report(False, findings, {"w": 0.5, "v": 0.7}, 0.0)) == (
        "wrong",
        "gradients: v gradient is off by 0.7 on rank 0 (and 1 more)",
    )


def test_reductions_are_those_of_a_block() -> None:
    """Sites in the blocks of the decoder, whatever their patterns; not the head's, not another tower's."""
    stacks = (Stack("v", "vision", ("v.0", "v.1", "v.2")), Stack("m.l", "decoder", ("m.l.0", "m.l.1")))
    runtime = Runtime(
        parameters=(ParameterRule("m.l.*.norm.weight", gradient="sum"), ParameterRule("m.l.*.up.weight", 0, "8!")),
        instructions=(
            AllReduce("m.l.*.down", "output", ()),
            AllReduceGradient("m.l.*.norm", "output", ()),
            AllReduceGradient("m.l.1", "input", ("x",)),
            AllReduceGradient("head", "input", ("x",)),
            AllReduce("v.*.down", "output", ()),
            NormCall("m.l.0.norm", CallSite("layer_norm", "forward:3:8"), 1, 8, 2),
        ),
    )
    plan = Plan("m", 2, layers=stacks, runtime=runtime)
    assert main_stack(stacks) == stacks[1]
    assert reductions_per_block(plan) == (1 + 2 / 2, 1 + 1 / 2 + 1 + 2 / 2)
    assert reductions_per_block(Plan("m", 2)) == (None, None)


# ------------------------------------------------------------------------------------------------ many of them


def answer(model_type: str, class_name: str, how: Any) -> Score:
    """Stands in for `score` in the worker processes."""
    if model_type == "bart":
        os._exit(7)
    if model_type == "bert":
        time.sleep(60)
    return Score(model_type, class_name, "exact", split=9, counted=10, seconds=0.1)


def worker(pipe: Any, pair: tuple[str, str], how: Any) -> None:
    pipe.send(answer(*pair, how))


@pytest.mark.slow
def test_a_crash_and_a_hang_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "_worker_main", worker)
    seen: list[tuple[int, str]] = []
    board = boards.scoreboard(
        "causal_lm",
        only=["llama", "bert", "bart", "gpt2"],
        jobs=4,
        timeout=15.0,
        progress=lambda done, total, name, result: seen.append((done, name)) if result else None,
    )
    verdicts = {score.model_type: (score.verdict, score.reason) for score in board.scores}
    assert verdicts == {
        "bart": ("failed", "its process exited with code 7"),
        "bert": ("failed", "no result within 15 s"),
        "gpt2": ("exact", ""),
        "llama": ("exact", ""),
    }
    assert list(verdicts) == ["bart", "bert", "gpt2", "llama"], "transformers' order, whichever ends first"
    assert [done for done, _ in seen] == [1, 2, 3, 4] and seen[-1][1] == "bert"
    assert not board.ok and board.totals()["failed"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mapping": "causal"}, "no mapping 'causal'"),
        ({"only": ["lama"]}, "no model type 'lama'.*types like it: .*llama"),
        ({"checks": "some"}, "choose one of fast, all"),
        ({"tp_size": 1}, "at least 2 ranks"),
        ({"lengths": [8, 1]}, "at least 2 positions"),
        ({"checkpointing": "all"}, "choose one of block, submodule, selective"),
        ({"mesh": "dp=2"}, "does not have tp=2.*write dp=2,tp=2"),
    ],
)
def test_what_cannot_be_scored(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(AutoplanError, match=f"(?s){words}"):
        boards.scoreboard(**{"mapping": "causal_lm", **arguments})


BOARD = Scoreboard(
    "causal_lm",
    2,
    "threads",
    ("parameters", "forward"),
    (
        Score(
            "a",
            "AModel",
            "exact",
            split=10,
            counted=10,
            forward=2.0,
            backward=2.5,
            error=1e-15,
            seconds=0.5,
            communication=(Traffic("b.*", {"all_reduce": (1, 24)}, {}, (1, 16), (0, 0)),),
        ),
        Score("b", "BModel", "wrong", "gradients: w gradient is off by 0.5", 5, 10, unused=("x", "y"), error=0.5),
        Score("c", "CModel", "cannot run", "no such class"),
    ),
    {"torch": "2"},
    3.0,
)


def test_the_table_has_verdicts_reasons_and_totals() -> None:
    text = plain_text(scoreboard_view(BOARD), 140)
    assert "AModel  exact        1.00  10/10                2       2.5         1.50  1e-15" in text
    assert "b.*    1 all_reduce 24 B   nothing  16 B in 1      nothing                1.50" in text
    assert "0 of 1 communicate no more" in text
    assert "wrong       gradients: w gradient is off by 0.5" in text and "cannot run  no such class" in text
    assert "1 of 2 shard at least 99% of their weights" in text


CUT = ["--sequence-parallel", "--seq", "8", "--seq", "12", "--checkpointing", "selective", "--mesh", "dp=2,tp=4"]


@pytest.mark.parametrize(("scores", "code"), [(BOARD.scores, 1), (BOARD.scores[::2], 0)])
def test_the_command(
    scores: tuple[Score, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def run(mapping: str, tp: int, *, progress: Any, **how: Any) -> Scoreboard:
        asked.append((mapping, tp, how))
        progress(1, 1, "a", BOARD.scores[0])
        return Scoreboard(mapping, tp, "threads", (), scores)

    monkeypatch.setattr(boards, "scoreboard", run)
    with pytest.raises(SystemExit) as caught:
        main(["scoreboard", "base", "--only", "a", "--only", "b", "--tp", "4", "--jobs", "2", "--json", *CUT])
    out, err = capsys.readouterr()
    assert caught.value.code == code
    how = {"only": ["a", "b"], "engine": "threads", "checks": "fast", "jobs": 2, "timeout": 180.0}
    how |= {"sequence_parallel": True, "lengths": [8, 12], "checkpointing": "selective", "mesh": "dp=2,tp=4"}
    assert asked == [("base", 4, how)]
    assert json.loads(out)["ok"] is (code == 0) and json.loads(out)["scores"][0]["share"] == 1.0
    assert err == "1/1 a exact share 1.00 0.5 s\n"


def test_all_checks_are_verifys() -> None:
    from autoplan.check.scoreboard.score import CHECK_SETS

    assert CHECK_SETS["all"] == CHECK_NAMES and set(CHECK_SETS["fast"]) < set(CHECK_NAMES)
