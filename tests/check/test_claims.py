"""What a class claims is tried: each claim has a class for which it holds, and one for which it does not."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest
from corpus.toys import decoder

from autoplan.check.audit import claims as tried
from autoplan.check.verify.clone import clone_of
from autoplan.cli.app import main
from autoplan.hf.source import resolve

ABSENT = "NOT TRIED: accelerate is absent; `make test-hosts` installs it and runs these"


def test_claims_that_hold(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", "llama", "--claims", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0 and report["ok"]
    claims = report["details"]["claims"]
    assert claims.pop("context-parallel") == ("holds" if find_spec("accelerate") else "doubtful"), (
        "not tried without it"
    )
    assert claims.pop("ep-plan") == "not claimed" and set(claims.values()) == {"holds"} and len(claims) == 4


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
    assert finding.level == "note" and finding.where == "transformer.layers" and "does not have" in finding.message


def test_a_model_that_asks_for_single_precision_is_tried_in_it() -> None:
    """xglm's least number of a mask overflows in double."""
    claims = tried.audit_claims(resolve("xglm")).details["claims"]
    assert claims["no-split-modules"] == claims["checkpointing"] == "holds"


@pytest.mark.hosts
@pytest.mark.parametrize(("kind", "made_by"), [("bloom", "baddbmm"), ("mpt", "add"), ("gpt_neo", ""), ("xglm", "")])
def test_context_parallelism_that_computes_something_else(kind: str, made_by: str) -> None:
    """Attention that is no call of scaled_dot_product_attention sees the positions of its rank alone."""
    pytest.importorskip("accelerate", reason=ABSENT)
    source = resolve(kind)
    (finding,) = tried._context(source, clone_of(source).model, True)
    off = re.search(r"off by (\d[.\d]*)", finding.proof)
    assert finding.level == "error" and finding.kind == "wrong-numbers"
    assert off is not None and float(off[1]) > 0.01
    assert made_by in finding.proof and f"modeling_{kind}.py:" in finding.proof


@pytest.mark.hosts
@pytest.mark.parametrize(("kind", "raises"), [("mistral", "sliding_attention"), ("gpt2", "mask")])
def test_context_parallelism_that_cannot_run(kind: str, raises: str) -> None:
    """accelerate refuses windows, and torch a mask."""
    pytest.importorskip("accelerate", reason=ABSENT)
    source = resolve(kind)
    (finding,) = tried._context(source, clone_of(source).model, True)
    assert finding.level == "error" and finding.kind == "cannot-run" and raises in finding.message


@pytest.mark.hosts
def test_context_parallelism_that_is_right() -> None:
    """Where it is claimed nothing is said, and where it is refused that it need not be."""
    pytest.importorskip("accelerate", reason=ABSENT)
    source = resolve("llama")
    model = clone_of(source).model
    assert not list(tried._context(source, model, True)) and not list(tried._context(source, model, None))
    (finding,) = tried._context(source, model, False)
    assert finding.level == "note" and "its results match one device; support is not claimed" in finding.message
    toy = decoder()
    (untried,) = tried._context(resolve(toy), toy, True)
    assert untried.level == "warn", "it returns no logits by that name"


@pytest.mark.hosts
def test_one_claim_alone_and_what_is_not_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate", reason=ABSENT)
    with pytest.raises(SystemExit) as ended:
        main(["audit", "mamba2", "--cp", "--json"])
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert ended.value.code == 0 and report["details"]["claims"] == {"context-parallel": "not claimed"}
    assert "it cannot run" in finding["message"] and finding["hint"] == "plan it with cp_size=2"


def test_blocks_that_no_class_names() -> None:
    model = decoder()
    (unknown,) = tried._blocks(model, ("DecoderLayer",))
    assert unknown.level == "error" and "Block" in unknown.hint
    (some,) = tried._blocks(model, ("DecoderLayer", "Block"))
    assert some.level == "note"
    (split,) = tried._blocks(model, ("Attention",))
    assert split.level == "warn" and split.hint == "add Block"
    assert not list(tried._blocks(model, ("Block",)))
