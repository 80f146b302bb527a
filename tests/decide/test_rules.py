"""Role rules: their own examples, the mutation check, the notation, and what happens when rules meet."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rules_readme import rules_readme

from autoplan.analyse.picture.flow import node_of
from autoplan.common.errors import AutoplanError
from autoplan.common.files.rule_files import rules_folder
from autoplan.decide.match import ENDS, match_rules
from autoplan.decide.rulebook.conditions import Condition
from autoplan.decide.rulebook.pattern import draw, parse_pattern
from autoplan.decide.rulebook.read import GENERIC, STYLES, Rule, RuleError, load_rules, parse_rule
from autoplan.decide.rulebook.rule_tests import test_rules as run_rule_tests

RULES = {rule.id: rule for rule in load_rules()}
LLAMA_MLP = """
norm:norm[64] -> gate:linear[64, 96!] -> product:mul.activated -> down:linear[96!, 64] -> sum:add
norm -> up:linear[64, 96!] -> product
norm -> sum
"""


def rule_text(**changes: str) -> str:
    """A small rule that passes its examples, with parts replaced."""
    parts = {
        "head": 'id = "pair"\nsummary = "s"\nwhy = "w"\nlimits = "l"\n',
        "flow": "up:linear -> down:linear",
        "where": '["split(up.out)"]',
        "yields": 'up = "colwise"\ndown = "rowwise"',
        "examples": (
            '[[example]]\nname = "yes"\ngraph = "a:linear[4, 8!] -> b:linear[8!, 4]"\n'
            'expect = { a = "colwise", b = "rowwise" }\n'
            '[[example]]\nname = "no"\ngraph = "a:linear[4, 8] -> b:linear[8, 4]"\nexpect = {}\n'
            'because = "up.out = 8 is not split"\n'
        ),
        **changes,
    }
    return (
        f"{parts['head']}[match]\nflow = '''\n{parts['flow']}\n'''\nwhere = {parts['where']}\n"
        f"[yields]\n{parts['yields']}\n{parts['examples']}"
    )


def claims(rule_ids: list[str], graph: str, tp: int | None = None) -> dict[str, str]:
    """Box -> rule that claims it."""
    flow = draw(graph)
    matching = match_rules(flow, [RULES[name] for name in rule_ids], tp)
    return {node_of(flow, box).module: found.rule.id for found in matching.found for _, box in found.claims}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_examples_hold_and_every_part_of_a_rule_is_needed(rule: Rule) -> None:
    results = run_rule_tests(strict=True, rules=[rule])
    assert [f"{result.what}: {result.text}" for result in results if not result.ok] == []


def test_the_mutation_check_finds_a_guard_that_nobody_needs() -> None:
    idle = parse_rule(rule_text(where='["split(up.out)", "up.out > 1"]'), "pair")
    assert [result.what for result in run_rule_tests(True, [idle]) if not result.ok] == ["without guard up.out > 1"]


def test_a_rule_that_fails_its_examples_is_not_mutated() -> None:
    broken = parse_rule(rule_text(where='["whole(up.out)"]'), "pair")
    results = run_rule_tests(True, [broken])
    assert [result.ok for result in results] == [False, False]
    assert all(result.what.startswith("example") for result in results)


def test_a_rule_without_a_refusal_fails() -> None:
    lenient = parse_rule(rule_text(examples=""), "pair")
    assert {result.what for result in run_rule_tests(rules=[lenient]) if not result.ok} == {
        "an example that matches",
        "an example that is refused",
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head": 'id = "other"\nsummary = "s"\nwhy = "w"\nlimits = "l"\n'}, "but the file is named 'pair'"),
        ({"head": 'id = "pair"\nsummary = "s"\nwhy = "w"\n'}, "'limits' is missing"),
        ({"head": 'id = "pair"\nsumary = "s"\nwhy = "w"\nlimits = "l"\n'}, "unknown key 'sumary'"),
        ({"flow": "up:lineer -> down:linear"}, "'lineer' is not a kind of box"),
        ({"flow": "up:linear -> down linear"}, "'down linear' is not a box"),
        ({"where": '["splits(up.out)"]'}, "'splits' is not a fact"),
        ({"where": '["split(upp.out)"]'}, "'upp' in 'split(upp.out)' is not a box of the flow"),
        ({"where": '["up.out is split"]'}, "is not a guard"),
        ({"yields": 'up = "columnwise"'}, "'columnwise' is not a style"),
        ({"yields": 'upp = "colwise"'}, "'upp' is not a box of the flow"),
        ({"flow": "''''"}, "as TOML"),
    ],
)
def test_a_rule_file_that_cannot_be_read_says_what_and_where(changes: dict[str, str], says: str) -> None:
    with pytest.raises(RuleError) as error:
        parse_rule(rule_text(**changes), "pair")
    assert says in str(error.value)
    assert "rules/roles/pair.toml" in str(error.value)


def test_beating_a_rule_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    text = rule_text().replace('limits = "l"\n', 'limits = "l"\nbeats = ["nobody"]\n')
    (tmp_path / "roles" / "pair.toml").write_text(text)
    with pytest.raises(RuleError, match="'pair' beats 'nobody'"):
        load_rules(tmp_path)


def test_rules_that_beat_each_other_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    for name, other in (("one", "two"), ("two", "one")):
        text = rule_text().replace('id = "pair"', f'id = "{name}"\nbeats = ["{other}"]')
        (tmp_path / "roles" / f"{name}.toml").write_text(text)
    with pytest.raises(RuleError, match="in a cycle: "):
        load_rules(tmp_path)


# ------------------------------------------------------------------------------------------------------- matching


def test_the_order_of_rules_never_decides() -> None:
    flow = draw(LLAMA_MLP)
    forwards, backwards = (match_rules(flow, order) for order in (RULES.values(), list(RULES.values())[::-1]))
    assert {(f.rule.id, f.boxes) for f in forwards.found} == {(f.rule.id, f.boxes) for f in backwards.found}
    assert {f.rule.id for f in forwards.found} == {"gated-mlp"}


def test_a_beaten_match_is_dropped_whole() -> None:
    assert claims(["plain-mlp"], LLAMA_MLP) == {"gate": "plain-mlp", "up": "plain-mlp", "down": "plain-mlp"}
    assert claims(["plain-mlp", "gated-mlp"], LLAMA_MLP) == dict.fromkeys(("gate", "up", "down"), "gated-mlp")


def test_a_dropped_match_beats_nothing() -> None:
    """Layers that share keys look like cross-attention; once that is dropped, their owner is plain attention."""
    graph = """
x:norm[64] -> q:linear[64, 4!*16] -> a:attend.q -> o:linear[4!*16, 64]
x -> k:linear[64, 4!*16] -> a.k
x -> v:linear[64, 4!*16] -> a.v
y:norm[64] -> q2:linear[64, 4!*16] -> a2:attend.q -> o2:linear[4!*16, 64]
k -> a2.k
v -> a2.v
"""
    own, borrowed = dict.fromkeys("qkvo", "attention"), dict.fromkeys(("q2", "o2"), "cross-layer-attention")
    assert claims(list(RULES), graph) == own | borrowed


def test_of_two_rules_that_claim_one_box_the_one_that_says_more_has_it() -> None:
    rival = parse_rule(rule_text(), "pair")
    guarded = replace(rival, match=replace(rival.match, where=(), conditions=()), id="a-pair-without-guards")
    flow = draw("a:linear[4, 8!] -> b:linear[8!, 4]")
    for rules in ([rival, guarded], [guarded, rival]):
        matching = match_rules(flow, rules)
        assert {found.rule.id for found in matching.found} == {"pair"}
        assert {(c.winner, c.loser) for c in matching.contests} == {("pair", "a-pair-without-guards")}


def test_without_refusals_the_same_is_found() -> None:
    for rule in RULES.values():
        for example in rule.examples:
            flow = draw(example.graph)
            every, found = (match_rules(flow, RULES.values(), example.tp, refused=refused) for refused in (True, False))
            assert (found.found, found.contests) == (every.found, every.contests), (rule.id, example.name)


def test_guards_are_checked_before_the_flow_is_followed_on(monkeypatch) -> None:
    """A recurrent layer is a long row of products, each reached by every linear layer before it."""
    lines = [f"in{i}:linear[4, 8] -> p{i}:mul.activated" for i in range(12)]
    lines += [f"p{i} -> p{i + 1}" for i in range(11)] + [f"p{i} -> out{i}:linear[8, 4]" for i in range(12)]
    flow, checked = draw("\n".join(lines)), []
    check = Condition.check
    monkeypatch.setattr(Condition, "check", lambda self, *rest: checked.append(self) or check(self, *rest))
    counts = []
    for refused in (True, False):
        checked.clear()
        assert match_rules(flow, [RULES["gated-mlp"]], refused=refused).found == ()
        counts.append(len(checked))
    assert counts[1] * 5 < counts[0], counts


def test_a_search_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows with the boxes that a rule's names may be: a scan of a thousand steps has millions of bindings."""
    flow = draw("\n".join(f"i{n}:linear[4, 8!] -> m{n}:mul -> o{n}:linear[8!, 4]" for n in range(60)))
    whole = match_rules(flow, [RULES["plain-mlp"]], refused=False)
    assert len(whole.found) == 60 and not whole.given_up
    monkeypatch.setattr("autoplan.decide.match.MOST_STEPS", 200)
    matching = match_rules(flow, [RULES["plain-mlp"]], refused=False)
    assert matching.given_up == ("plain-mlp",) and 0 < len(matching.found) < 60


def test_a_weight_that_runs_often_is_bound_in_its_first_and_last_runs() -> None:
    """A recurrence, step by step: the search grows with its weights, not with its steps."""
    steps, rule = 40, parse_rule(rule_text(), "pair")
    rows = [f"a{i}:linear[4, 8!] -> b{i}:linear[8!, 4]" for i in range(steps)]
    flow = draw("\n".join(rows + [f"b{i} -> a{i + 1}" for i in range(steps - 1)]))
    assert len(match_rules(flow, [rule]).found) == steps  # as many weights
    boxes = sorted(flow)
    for box in boxes:
        node = node_of(flow, box)
        flow.nodes[box]["node"] = replace(node, module=node.module[0], parameters=(f"{node.module[0]}.weight",))
    found = match_rules(flow, [rule]).found
    bound = {box for match in found for _, box in match.claims}
    assert len(found) == 2 * ENDS and {min(bound), max(bound)} == {boxes[0], boxes[-1]}


def test_shipped_rules_contest_no_box_of_any_example() -> None:
    for rule in RULES.values():
        for example in rule.examples:
            matching = match_rules(draw(example.graph), RULES.values(), example.tp)
            assert matching.contests == (), (rule.id, example.name)


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        # the value goes on directly, or through a scale
        ("a:linear[4, 8!] -> b:linear[8!, 4]", {"a", "b"}),
        ("a:linear[4, 8!] -> s:scale[8!] -> b:linear[8!, 4]", {"a", "b"}),
        # a norm between them: reached by ~>, not by ->
        ("a:linear[4, 8!] -> n:norm[8!] -> b:linear[8!, 4]", set()),
        # `down` is read from outside, `up` is fed: the flow does not say where it comes from, so its readers may be any
        ("a:linear[4, 8!] -> b:linear[8!, 4]\na -> c:cat", {"a", "b"}),
    ],
)
def test_direct_arrows(graph: str, expected: set[str]) -> None:
    flow = draw(graph)
    matching = match_rules(flow, [parse_rule(rule_text(), "pair")])
    assert {node_of(flow, box).module for found in matching.found for _, box in found.claims} == expected


def test_interior_boxes_are_not_read_from_outside() -> None:
    fed = parse_rule(rule_text(flow="x -> up:linear -> down:linear"), "pair")
    inside = draw("n:norm[4] -> a:linear[4, 8!] -> b:linear[8!, 4]")
    leaking = draw("n:norm[4] -> a:linear[4, 8!] -> b:linear[8!, 4]\na -> c:cat")
    assert len(match_rules(inside, [fed]).found) == 1
    assert match_rules(leaking, [fed]).found == ()


def test_a_refusal_keeps_its_sentence() -> None:
    flow = draw(LLAMA_MLP)
    matching = match_rules(flow, [RULES["gated-mlp"]], tp=5)
    assert matching.found == ()
    assert [refusal.because for refusal in matching.refusals] == ["gate.out = 96 is not divisible by tp = 5"]


@pytest.mark.parametrize("text", ["a:linear[64", "a:linear[1,2,3] -> b:linear", "a -> b", "a:linear|conv[1, 2]"])
def test_pictures_that_cannot_be_drawn(text: str) -> None:
    with pytest.raises(AutoplanError):
        draw(text)


def test_a_name_without_a_kind_may_be_any_box() -> None:
    pattern = parse_pattern("x -> y:linear ~> z:mul.activated")
    assert pattern.kinds_of("x") == frozenset({"any"})
    assert [(a.source, a.reader, a.port, a.direct) for a in pattern.arrows] == [
        ("x", "y", "", True),
        ("y", "z", "activated", False),
    ]


# ------------------------------------------------------------------------------------------------- the whole folder


def test_every_style_is_explained_and_every_rule_is_a_document() -> None:
    assert all(STYLES.values())
    for rule in RULES.values():
        assert rule.summary and rule.why and rule.limits
        assert rule.match is not None or rule.id == GENERIC


def test_readme_is_up_to_date() -> None:
    written = (rules_folder() / "README.md").read_text("utf-8")
    assert written == rules_readme(), "run: python tests/helpers/rules_readme.py > rules/README.md"


def test_no_pattern_speaks_of_names() -> None:
    """Kinds and guards are the whole vocabulary: nothing in a rule's match can mention a module or a model."""
    for rule in RULES.values():
        if rule.match is not None:
            for model in rule.seen_in:
                assert model not in rule.match.flow and not any(model in guard for guard in rule.match.where), rule.id


def test_deciding_needs_no_torch() -> None:
    files = [path for path in Path("autoplan/decide").rglob("*.py") if path.stem != "__init__"]
    modules = [".".join(path.with_suffix("").parts) for path in files]
    assert len(modules) > 10
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
