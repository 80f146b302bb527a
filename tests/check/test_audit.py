"""The auditor: what it says of right and wrong plans, in every form, and of input that is none."""

from __future__ import annotations

import json
import logging
import re
from functools import partial
from pathlib import Path

import pytest
import shipped_plans
import torch
from corpus.case import Case
from corpus.toys import ATTENTION, GOOD, MLP, TABLES, Attention, FusedAttention, Mlp, decoder, torch_styles
from planted_faults import FAULTS
from slow_cases import marked

import autoplan
from autoplan.check.audit.auditor import audit_source, compare_plans, subject_of, verdicts
from autoplan.check.audit.checks import CHECKS
from autoplan.check.audit.checks.around import gather_bytes
from autoplan.check.audit.lines import numbers_starred
from autoplan.check.audit.subject import Settings
from autoplan.cli.app import main
from autoplan.common.errors import AutoplanError
from autoplan.emit.tables.audit_report import markdown, sarif
from autoplan.hf.source import resolve
from autoplan.testing import assert_plan_ok
from autoplan.values import Finding, Report, replace

GIB = 2**30


def audited(plan, model=None, tp_size: int = 2, **options) -> Report:
    return autoplan.audit(decoder() if model is None else model, plan, tp_size, **options)


def levels(report: Report, check: str) -> set[str]:
    return {finding.level for finding in report.findings if finding.check == check}


# ------------------------------------------------------------------------------------------------ the checks


def test_every_check_is_one_documented_function() -> None:
    folder = Path(autoplan.__file__).parent / "check" / "audit" / "checks"
    names = [check.name for check in CHECKS]
    texts = [path.read_text() for path in folder.glob("*.py")]
    written = [
        name for text in texts for name in re.findall(r"^def (\w+)\(check: str, subject: Audited, earlier", text, re.M)
    ]
    assert sorted(names) == sorted(name.replace("_", "-") for name in written)
    for check in CHECKS:
        assert check.about.startswith(f"{check.name}: ") and len(check.about) > 200, check.name


def test_heads_that_are_gathered_again_keep_their_number() -> None:
    whole = {"layers.*.attn.qkv_proj": "colwise_gather_output", "layers.*.attn.o_proj": "rowwise_split_input"}
    report = audited(whole, decoder(FusedAttention))
    assert report.details["outcome"] == "exact"
    assert not levels(report, "head-counts")


def test_every_check_has_something_to_find() -> None:
    """Each check is named by a row of the corpus, or has a test here."""
    from test_corpus import CASES

    here = {"overlaps", "dialects", "edges", "embeddings", "frozen", "layouts", "runtime", "wrapping"}
    assert {case.check for case in CASES} | here == {check.name for check in CHECKS}
    assert all(isinstance(case, Case) for case in CASES)


def test_two_keys_for_one_module() -> None:
    report = audited(torch_styles({**ATTENTION, "layers.*.attn.q_*": "rowwise"})(None))
    assert levels(report, "overlaps") == {"error"} and not report.ok


def test_a_plan_that_cannot_run_leaves_no_traceback_of_torch() -> None:
    said: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(listener)
    try:
        report = audited(torch_styles({"w1": "colwise", "w3": "colwise", "w2": "colwise"})(None), Mlp())
    finally:
        logger.removeHandler(listener)
    assert not report.ok and said == []


def test_unknown_and_old_words() -> None:
    assert levels(audited({**GOOD, "head": "colwise_rep"}), "dialects") == {"note"}
    report = audited({**GOOD, "head": "columnwise"})
    assert levels(report, "dialects") == {"error"} and not report.ok

    class Strange:
        pass

    report = audited({**torch_styles(ATTENTION)(None), "head": Strange()})
    (found,) = [finding for finding in report.findings if finding.check == "dialects"]
    assert "test_audit" in found.message and "Strange" in found.message


def test_a_string_among_style_objects() -> None:
    report = audited({**torch_styles(ATTENTION)(None), "layers.*.mlp.w2": "rowwise"})
    assert levels(report, "dialects") == {"error"}


def test_edges_say_what_lies_where() -> None:
    """A forgotten row layer takes shards for whole; a reduce-scattered sequence is read as a full one."""
    report = audited({**ATTENTION, "layers.*.mlp.w1": "colwise", "layers.*.mlp.w3": "colwise"})
    found = [finding for finding in report.findings if finding.check == "edges"]
    assert {finding.where for finding in found} == {"layers.*.mlp.w1", "layers.*.mlp.w3"}
    assert all(finding.level == "error" and finding.proof for finding in found)
    assert all("outputs a shard, but layers.0.mlp.w2 expects whole" in finding.message for finding in found)

    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import RowwiseParallel

    report = audited(
        {**torch_styles({**ATTENTION, **MLP})(None), "layers.*.mlp.w2": RowwiseParallel(output_layouts=Shard(1))}
    )
    said = [finding.message for finding in report.findings if finding.check == "edges"]
    assert said and all("outputs a part of the sequence" in message for message in said)
    for good in (GOOD, torch_styles(GOOD)(None), "inferred"):
        assert not levels(audited(good), "edges")
    gathered = {**GOOD, "layers.*.attn.o_proj": "rowwise_split_input"}
    gathered |= {f"layers.*.attn.{name}_proj": "colwise_gather_output" for name in "qkv"}
    assert not levels(audit_source(resolve(decoder()), gathered, 2, run=False), "edges"), "layouts agree without a run"


def test_every_layer_is_named_and_what_was_not_tried_is_marked() -> None:
    """A trace holds few layers, and the trial is of a tiny clone at tp 2: findings are about the whole model at 8."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 256}
    config = LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8)
    layer = "model.layers.*"
    plan = {f"{layer}.self_attn.{name}_proj": "colwise" for name in "qkvo"} | {
        f"{layer}.mlp.{name}_proj": "colwise" for name in ("gate", "up", "down")} | {
        f"{layer}.mlp.nothing": "colwise"}  # fmt: skip
    report = audited(plan, config, 8)
    edges = {place for finding in report.findings if finding.check == "edges" for place in finding.about}
    assert [place for place in edges if place.endswith("v_proj")] == [f"{layer}.self_attn.v_proj"]
    assert "at tp=2 in place of tp=8" in report.details["ran"] and report.tp_size == 8
    assert {report.details["verdicts"][f"{layer}.{name}"] for name in ("self_attn.o_proj", "mlp.down_proj")} == {
        "wrong"
    }
    (dead,) = [finding for finding in report.findings if finding.check == "dead-keys"]
    assert dead.hint.startswith("remove it") and not any(
        "(not audited)" in f.hint for f in (dead, *report.findings[:2])
    )


def test_frozen_parameters_stay_frozen() -> None:
    """A style of one's own makes new parameters and forgets what was frozen; torch's own remembers."""
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel

    class Forgetful(ColwiseParallel):
        def _apply(self, module, device_mesh):
            module = super()._apply(module, device_mesh)
            module.weight = nn.Parameter(module.weight.detach())
            return module

    model = decoder()
    for layer in model.layers:
        layer.attn.q_proj.requires_grad_(False)
    good = torch_styles(GOOD)(None)
    report = audited({**good, "layers.*.attn.q_proj": Forgetful()}, model)
    (found,) = [finding for finding in report.findings if finding.check == "frozen"]
    assert found.level == "error" and found.where == "layers.*.attn.q_proj" and "True after" in found.proof
    assert report.details["verdicts"]["layers.*.attn.q_proj"] == "wrong"
    assert audited(good, model).ok and not model.layers[0].attn.q_proj.weight.requires_grad


@pytest.mark.parametrize(("habit", "module"), [("edits", "down"), ("reads", "up"), ("none", "")])
def test_layers_that_cannot_be_wrapped(habit: str, module: str) -> None:
    from test_obstacles import Blocks

    source = resolve(Blocks(habit, habit), inputs={"x": torch.randn(2, 6, 8)})
    report = audit_source(source, {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, 2)
    found = [finding for finding in report.findings if finding.check == "wrapping"]
    assert [finding.where.split(", ")[0] for finding in found] == ([f"layers.*.{module}"] if module else [])
    assert report.ok == (not module) and all(finding.level == "error" and finding.proof for finding in found)


def test_a_table_left_whole_costs_bytes() -> None:
    report = audited({**ATTENTION, **MLP})
    assert report.ok and levels(report, "embeddings") == {"note"}
    (found,) = [finding for finding in report.findings if finding.check == "embeddings"]
    assert found.bytes == 64 * 32 * 4 // 2


def test_the_residual_stream_is_not_cut() -> None:
    report = audited({"layers.*.mlp.w1": "rowwise", "layers.*.mlp.w2": "rowwise"})
    (found, *_) = [finding for finding in report.findings if finding.check == "layouts"]
    assert found.level == "error" and found.proof and "residual" in found.message


def test_a_changed_plan_of_ours_is_noticed_without_running() -> None:
    source = resolve(decoder(partial(FusedAttention)))
    subject = subject_of(source, "inferred", 2, run=False)
    tried = 0
    for fault in FAULTS:
        spoiled = None if fault.tamper is not None else fault.spoil(subject.plan.plan)
        if spoiled is not None:
            report = audit_source(source, spoiled, 2, run=False)
            assert levels(report, "runtime") | levels(report, "head-counts") == {"warn"}, fault.name
            tried += 1
    assert tried >= 10
    assert not levels(audit_source(source, subject.plan.plan, 2, run=False), "runtime")


# ------------------------------------------------------------------------------------------------ verdicts and proof


def test_verdicts() -> None:
    found = audited({**GOOD, "layers.*.attn.q_proj": "colwise"}).details["verdicts"]
    assert found["layers.*.attn.q_proj"] == "same" and found["head"] == "costlier" and found["embed"] == "same"
    gathered = {f"layers.*.attn.{name}_proj": "colwise_gather_output" for name in "qkv"}
    report = audited({**GOOD, **gathered, "layers.*.attn.o_proj": "rowwise_split_input"})
    assert report.ok and report.details["verdicts"]["layers.*.attn.q_proj"] == "costlier"


def test_a_wrong_entry_is_proven_on_ranks() -> None:
    report = audited(GOOD, decoder(partial(Attention, norm="head")))
    assert not report.ok
    (found, *_) = [finding for finding in report.findings if finding.check == "gradients"]
    assert "q_norm" in found.where and "off by" in found.proof and "replicated_with_grad_allreduce" in found.hint
    assert report.forward is not None and report.forward < 1e-9, "forward is exact: only gradients show it"


def test_a_suspicion_that_is_exact_is_no_error() -> None:
    """The same finding is an error, a warning or a note, as the ranks say."""
    subject = subject_of(resolve(decoder()), {**ATTENTION, **MLP}, 2)
    assert subject.suspect("pairing", "", "it looks odd").level == "note"
    assert replace(subject, numbers=None).suspect("pairing", "", "it looks odd").level == "warn"
    wrong = replace(subject, numbers=Report(False, (Finding("forward", "error", "x", "off"),)))
    assert wrong.suspect("pairing", "", "it looks odd").level == "error"
    gradient = Finding("gradients", "error", "layers.1.norm.weight", "off")
    partly = replace(subject, numbers=Report(False, (gradient,)))
    assert partly.suspect("pairing", "", "odd", names=["layers.0.norm.weight"]).level == "error"
    assert partly.suspect("pairing", "", "odd", names=["head.weight"]).level == "note"
    assert verdicts(subject, ()) == dict.fromkeys(subject.plan.raw, "same")


@pytest.mark.parametrize(
    "model_type", marked(["llama", "qwen3", "mixtral", "deepseek_v3", "phi3"], long=["deepseek_v3"], slow=["qwen3"])
)
def test_exact_shipped_plans_have_no_error(model_type: str) -> None:
    report = autoplan.audit(model_type, "hf", 2)
    assert report.ok and report.details["outcome"] == "exact", report


@pytest.mark.parametrize(
    ("model_type", "where"),
    marked([("apertus", "alpha"), ("inkling2_text", "experts")], long=[("inkling2_text", "experts")]),
)
def test_wrong_shipped_plans_are_proven(model_type: str, where: str) -> None:
    report = autoplan.audit(model_type, "hf", 2)
    errors = [finding for finding in report.findings if finding.level == "error"]
    assert not report.ok and any(where in finding.where and finding.proof for finding in errors), report


def test_sizes_come_from_the_full_model() -> None:
    """8 key/value heads: 16 ranks would each hold half of one, whatever a tiny clone at tp 2 says."""
    from transformers import LlamaConfig

    config = LlamaConfig(num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=2)
    report = autoplan.audit(config, "hf", 16)
    assert levels(report, "units") == {"error"}
    assert autoplan.audit(config, "hf", 8).ok


def test_features_may_be_cut_unevenly() -> None:
    """transformers cuts 2 × 45 packed features as 23 and 22; heads are another matter."""
    from transformers import Phi3Config

    config = Phi3Config(intermediate_size=45, hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
    config.pad_token_id = 0
    assert not levels(autoplan.audit(config, "hf", 2), "units")


def test_the_published_gather() -> None:
    """Llama-3.1-8B at tp 4: the head's forward 33.579 → 29.665 GB, the step 51.93 → 35.66 GB."""
    subject = subject_of(resolve(decoder()), GOOD, 2, Settings(tokens=8192), run=False)
    forward, step = gather_bytes(replace(subject, tp_size=4), 128_256)
    assert forward / GIB == pytest.approx(33.579 - 29.665, rel=0.001)
    assert step / GIB == pytest.approx(51.93 - 35.66, rel=0.02)


def test_one_block_of_experts_or_layers_by_function() -> None:
    report = audited("inferred", layers=lambda model: [model.layers[0]])
    assert levels(report, "layers") == {"warn"}
    assert not levels(audited("inferred", layers=lambda model: list(model.layers)), "layers")
    with pytest.raises(AutoplanError, match="class name, path or module"):
        audited("inferred", layers=[3])


def test_a_unit_of_two_dtypes() -> None:
    model = decoder()
    model.layers[1].input_norm.to(torch.float64)
    subject = subject_of(resolve(decoder()), GOOD, 2, Settings(layers="Block"), run=False)
    (check,) = [check for check in CHECKS if check.name == "layers"]
    assert not list(check.run(subject, ()))
    (found,) = check.run(replace(subject, model=model), ())
    assert "2 dtypes" in found.message and found.level == "warn"


def test_names_as_transformers_stars_them() -> None:
    assert numbers_starred("model.layers.3.mlp.w1") == "model.layers.*.mlp.w1"


# ------------------------------------------------------------------------------------------------ bad input


def test_an_empty_plan_shards_nothing() -> None:
    report = audited({})
    (found,) = [finding for finding in report.findings if finding.check == "coverage"]
    assert "shards nothing" in found.message and found.bytes == sum(p.nbytes for p in decoder().parameters())
    assert report.ok and found.level == "warn"


def test_a_plan_of_another_model_is_rejected() -> None:
    report = audited({"blocks.*.query": "colwise", "blocks.*.output": "rowwise"})
    (found,) = [finding for finding in report.findings if finding.check == "coverage"]
    assert not report.ok and "no row matches the model" in found.message
    whole = audited({"layers.*.attn.q_proj": "replicate", "layers.*.attn.*": "replicate", "encoder.x": "colwise"})
    assert whole.ok and not [finding for finding in whole.findings if "no row matches" in finding.message]
    some = audited({"encoder.layers.0.x": "colwise", **GOOD})
    assert some.ok and "dead-keys" in [finding.check for finding in some.findings]


def test_plans_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "plan.json"
    broken.write_text('{"layers": ')
    (tmp_path / "raises_on_import.py").write_text("raise RuntimeError('no such cluster')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for plan, said in (
        (str(broken), "cannot parse"),
        ("raises_on_import.PLAN", "RuntimeError: no such cluster"),
        ("no/such/file.yaml", "not an existing file"),
        ("hf", "no transformers plan"),
        ({3: "colwise"}, "which is not a path"),
    ):
        with pytest.raises(AutoplanError, match=said):
            audited(plan)
    with pytest.raises(AutoplanError, match="plan for tp=4"):
        audited(autoplan.plan(decoder(), tp_size=4, prove="none"))


def test_a_plan_in_a_file(tmp_path: Path) -> None:
    written = tmp_path / "plan.yaml"
    written.write_text("\n".join(f"{key!r}: {style}" for key, style in GOOD.items()))
    assert audited(str(written)).details["verdicts"]["embed"] == "same"
    ours = tmp_path / "ours.yaml"
    autoplan.plan(decoder(), tp_size=2, prove="none").save(ours)
    assert set(audited(str(ours)).details["verdicts"].values()) == {"same"}


def deepspeed(**specs: str) -> dict:
    """A partition config of expressions by kind; "packed" is a column of three segments."""
    layers = [
        {"patterns": [expression], "partition_type": "column" if kind == "packed" else kind}
        | ({"shape": [3, -1]} if kind == "packed" else {})
        for kind, expression in specs.items()
    ]
    return {"tensor_parallel": {"partition_config": {"layer_specs": layers}}}


COLUMNS = r".*(attn\.[qkv]_proj|mlp\.w[13])\.weight$"
ROWS = r".*(attn\.o_proj|mlp\.w2)\.weight$"


def test_deepspeed_is_carried_out_by_an_imitation_that_says_so() -> None:
    report = audited(deepspeed(column=COLUMNS, row=ROWS))
    assert report.ok and report.details["ran"] == (
        "exact on 2 simulated ranks, run by an imitation of DeepSpeed's layers"
    )
    half = audited(deepspeed(column=COLUMNS, row=r".*attn\.o_proj\.weight$"))
    assert levels(half, "pairing") == {"error"} and levels(half, "numbers") == {"error"}
    unsummed = audited(deepspeed(column=COLUMNS, row=ROWS), decoder(partial(Attention, norm="head")))
    (found, *_) = [finding for finding in unsummed.findings if finding.check == "gradients"]
    assert unsummed.forward < 1e-9 and "off by" in found.proof, "forward is exact: only gradients show it"


def test_deepspeed_packs_and_halves_counts() -> None:
    """A packed weight in one piece is wrong, in three it is right: the number of heads is edited by its name."""
    rows = {"row": r".*(o_proj|w2)\.weight$"}
    assert audited(deepspeed(packed=r".*qkv_proj\.weight$", column=r".*mlp\.w[13]\.weight$", **rows), fused()).ok
    wrong = audited(deepspeed(column=r".*(qkv_proj|w[13])\.weight$", **rows), fused())
    assert levels(wrong, "packed") == {"error"}


def test_deepspeed_sums_gradients_where_it_is_told() -> None:
    config = deepspeed(column=COLUMNS, row=ROWS)
    specs = config["tensor_parallel"]["partition_config"]["layer_specs"]
    specs.append({"patterns": [r".*[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True})
    assert audited(config, decoder(partial(Attention, norm="head"))).ok


def test_what_is_not_imitated_is_not_run() -> None:
    for config, model, said in (
        (deepspeed(column=r".*embed\.weight$"), None, "shards Embedding embed"),
        (deepspeed(column=r".*head\.weight$"), decoder(tied=True), "tied"),
        (deepspeed(column=r".*w1\.weight$"), decoder(mlp=partial(Mlp, hidden=45)), "are not divisible by 2"),
    ):
        report = audited(config, model)
        assert report.details["outcome"] == "untried"
        assert report.details["ran"].startswith("not run: ") and said in report.details["ran"]


def test_deepspeed_matches_from_the_start() -> None:
    report = audited(deepspeed(column=r"attn\.[qkv]_proj\.weight$"))
    cause, dead = [finding for finding in report.findings if finding.check == "dead-keys"]
    assert "matches no parameter" in dead.message and "begin with '.*'" in dead.hint
    assert report.ok and report.fixed is not None and all(f"{name}_proj" in cause.hint for name in "qkv")


def test_rules_that_transformers_would_keep() -> None:
    report = autoplan.audit("llama", {"lm_head": "colwise_gather_output"}, 2)
    assert any("would also apply" in f.message for f in report.findings if f.check == "dialects")


# ------------------------------------------------------------------------------------------------ what comes out


def test_sarif_and_markdown() -> None:
    report = audited({**TABLES, "layers.*.mlp.up_proj": "colwise"})
    checks = {check.name: check.about for check in CHECKS}
    (run,) = sarif(report, checks, "plan.yaml")["runs"]
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(run["results"]) == len(report.findings)
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"] and result["message"]["text"]
        assert result["level"] in ("error", "warning", "note")
    text = markdown(report)
    assert text.startswith("### ✅") and "| warn | dead-keys | `layers.*.mlp.up_proj` |" in text


def test_compare() -> None:
    source = resolve(decoder())
    assert compare_plans(source, "inferred", "inferred", 2).ok
    report = compare_plans(source, GOOD, {**TABLES, **ATTENTION}, 2)
    assert report.details["differ"] == 6, "three weights of two blocks"
    assert not any(finding.level == "error" for finding in report.findings)
    assert all("mlp" in finding.where for finding in report.findings)


def test_the_helper_for_a_projects_own_tests() -> None:
    assert assert_plan_ok(decoder(), GOOD).ok
    with pytest.raises(AssertionError, match="heads-gather"):
        assert_plan_ok(decoder(), GOOD, fail_on="warn")
    with pytest.raises(AssertionError, match="gradients"):
        assert_plan_ok(decoder(partial(Attention, norm="head")), GOOD)


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def fused():
    return decoder(FusedAttention)


PLAN = GOOD
BLIND = {**ATTENTION, **MLP}


def test_exit_codes_of_plans_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """One clear line and exit 2, whatever it is; a plan that shards nothing is read, and said to."""
    toy = ("audit", "corpus.toys:decoder", "--no-memory", "--plan")
    (tmp_path / "unparsable.json").write_text('{"layers": ')
    (tmp_path / "stops_on_import.py").write_text("raise RuntimeError('no such cluster')")
    (tmp_path / "nothing.yaml").write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    for plan, said in (
        (str(tmp_path / "unparsable.json"), "cannot parse"),
        ("stops_on_import.PLAN", "RuntimeError: no such cluster"),
        ("nowhere.PLAN", "no module named 'nowhere'"),
        ("nowhere.json", "there is no file nowhere.json"),
    ):
        assert exit_code(*toy, plan) == 2
        shown = capsys.readouterr()
        assert said in shown.err and "Traceback" not in shown.err and not shown.out
    assert exit_code(*toy, str(tmp_path / "nothing.yaml")) == 0
    assert "shards nothing" in capsys.readouterr().out
    assert exit_code(*toy, str(tmp_path / "nothing.yaml"), "--fail-on", "warn") == 1


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    good = ("audit", "corpus.toys:decoder", "--plan", "test_audit:PLAN")
    assert exit_code(*good, "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert exit_code(*good, "--no-memory", "--fail-on", "warn") == 1
    capsys.readouterr()
    assert exit_code("audit", "test_audit:fused", "--plan", "test_audit:BLIND", "--sarif") == 1
    assert json.loads(capsys.readouterr().out)["version"] == "2.1.0"
    assert exit_code("audit", "corpus.toys:decoder", "--plan", "nowhere.PLAN") == 2
    assert exit_code("audit", "corpus.toys:decoder", "--plan", "test_audit:PLAN", "--json", "--sarif") == 2
    assert exit_code("compare", "corpus.toys:decoder", "--a", "test_audit:PLAN", "--b", "inferred") == 1
    assert exit_code("compare", "corpus.toys:decoder", "--a", "inferred", "--b", "inferred") == 0


def test_shipped_plans_of_one_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert shipped_plans.main(["--mapping", "causal_lm", "--only", "apertus", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["verdict"] == "wrong" and "alpha" in row["proof"] and "gradients" in row["errors"]


def test_nothing_is_left_behind() -> None:
    model = decoder()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    audited(GOOD, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and not any(m._forward_hooks for m in model.modules())
