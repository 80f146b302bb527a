"""What a class claims is tried: each claim has a class for which it holds, and one for which it does not."""

from __future__ import annotations

import json
import re

import pytest
import torch
from corpus.toys import decoder

from autoplan.check.audit import claims as tried
from autoplan.cli.app import main
from autoplan.hf.source import resolve


def test_claims_that_hold(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", "llama", "--claims", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0 and report["ok"]
    claims = report["details"]["claims"]
    assert claims.pop("ep-plan") == "not claimed" and set(claims.values()) == {"holds"} and len(claims) == 5


def test_a_pipeline_that_computes_something_else() -> None:
    """transformers hands out embed_tokens, layers and norm; gpt_neox calls them otherwise, and runs its norm twice."""
    report = tried.audit_claims(resolve("gpt_neox"))
    (finding,) = [finding for finding in report.findings if finding.check == "pp-plan"]
    assert not report.ok and report.details["claims"]["pp-plan"] == "wrong"
    off = re.search(r"off by (\d+\.\d+)", finding.proof)
    assert "gpt_neox.final_layer_norm" in finding.where and off is not None and float(off[1]) > 0.1


def test_a_model_without_layers_cannot_be_split() -> None:
    report = tried.audit_claims(resolve("gpt2"))
    (finding,) = [finding for finding in report.findings if finding.check == "pp-plan"]
    assert finding.level == "note" and "cannot be split" in finding.message


def test_context_parallelism_without_attention() -> None:
    from autoplan.planning import capture_source

    source = resolve(torch.nn.Sequential(torch.nn.Linear(8, 8)), inputs={"input": torch.randn(2, 4, 8)})
    assert capture_source(source, source.module())
    (finding,) = tried._context(source, source.module(), True)
    assert finding.level == "error" and "no call" in finding.message
    assert not list(tried._context(resolve(decoder()), decoder(), True)), "the toy calls it"
    assert not list(tried._context(source, source.module(), False)), "nothing is claimed"


def test_blocks_that_no_class_names() -> None:
    model = decoder()
    (unknown,) = tried._blocks(model, ("DecoderLayer",))
    assert unknown.level == "error" and "Block" in unknown.hint
    (some,) = tried._blocks(model, ("DecoderLayer", "Block"))
    assert some.level == "note"
    (split,) = tried._blocks(model, ("Attention",))
    assert split.level == "warn" and split.hint == "add Block"
    assert not list(tried._blocks(model, ("Block",)))
