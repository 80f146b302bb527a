"""Write rules/README.md from the rules and from the docstrings of the code that reads them.

    python tests/helpers/rules_readme.py > rules/README.md

A test compares the page, so regenerate it after a change of a rule, a style or a guard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplan.analyse.picture import flow
from autoplan.decide import match
from autoplan.decide.rulebook import conditions, pattern
from autoplan.decide.rulebook.read import EXPORTS, STYLES, Rule, load_rules
from autoplan.decide.written_plans.read import load_plans

_INTRODUCTION = """# Rules

<!-- Written by `python tests/helpers/rules_readme.py > rules/README.md`. Do not edit by hand. -->

Axes prove, rules decide. Analysis proves whether an axis of a model can be sharded, and nothing in this folder can
shard one that is not proven. A rule names a split, says why its style is right, states its limits, and chooses between
forms of it. Everything here is data. Nothing names a module; a model type appears only as evidence (`seen_in`), as the
subject of a hand-written plan, or to build and feed a model.

- `roles/`: what a weight is for, recognised in the dataflow.
- `plans/`: hand-written plans for one model class each.
- `inputs/`: how to build a small copy of a model type, and its inputs, where they cannot be inferred.
- `quantised/`: how quantised weights are stored, and the terms by which code selects a scheme
  ([more](quantised/README.md)).
- `kernels/`: what fused kernels save for backward ([more](kernels/README.md)).
- `devices/`: GPU data for estimates.
- `arguments.toml`: what an argument of a forward usually is, by words in its name.
- `defaults.toml`: fields that the default config of a model type lacks, for models given by type alone.

`autoplan rules list`, `autoplan rules show RULE` and `autoplan rules test [--strict]` read the same files.
"""

_ROLE_FILES = """## How to write a role rule

One TOML file, named like the rule's id. Keys:

| key | contents |
|---|---|
| `id` | the file's name |
| `summary` | one line: what it is and how it is split |
| `why` | why that is right |
| `limits` | where it ends, and which rule applies beyond |
| `seen_in` | model types whose inferred plans cite the rule (a test checks them) |
| `unseen` | instead: why no model type of transformers has the structure |
| `unit`, `[units]` | what is sharded over ranks ("head", "feature"), per box if they differ; "": that of its axis |
| a box `by_head` | its parameters have one number for each head: a unit that holds several of them is called a group |
| `beats` | rules that lose if both claim a box |
| `exported_as` | what other systems call its modules, if they have a word for it (below) |
| `holds_experts` | true if its weights are experts, which expert parallelism can place |
| `[match] flow` | boxes and arrows |
| `[match] where` | guards: facts that must hold |
| `[roles]` | the role of each box; by default the box's name |
| `[yields]` | the style of each claimed box, or a list if several are right |
| `[yields.sequence_parallel]` | the style of a box under sequence parallelism |
| `[[example]]` | `name`, `graph`, `tp` (2), `expect`: styles by box; or `because` instead: part of the refusal |

A rule needs an example that matches and one that is refused. `autoplan rules test --strict` removes each guard, flow
line and yield in turn, and an example must fail each time: otherwise the guard is not needed, or a refusal is missing.
"""

_PLAN_FILES = """## How to write a plan by hand

One TOML file in `plans/`, for one model class. Its entries choose styles; units, integers, reductions and constants
come from analysis, and a contradiction between the two is an error.

| key | contents |
|---|---|
| `qualname` | the class it is for: `package.module.Class` |
| `why` | why the inferred plan is not enough |
| `gains` | its advantage over the inferred plan |
| `entries` | `{ "pattern" = "style" }`; `*` stands for one path segment |
| `sequence_parallel` | the same for sequence parallelism, or the reason why there is none |
"""


_WHY_PINNED = """A plan is found by its class, by its id (`--source ID`), or as `source="handwritten"`. Write one only
if it differs from the inferred plan; plans with the same cuts belong in tests (tests/decide/pinned).
"""


def rules_readme(rules: Sequence[Rule] | None = None) -> str:
    """Return the whole page."""
    known = load_rules() if rules is None else rules
    rows = [
        f"| [`{rule.id}`](roles/{rule.id}.toml) | {rule.summary} | {', '.join(rule.seen_in) or rule.unseen} |"
        for rule in known
    ]
    parts = [
        _INTRODUCTION,
        "\n".join(["## Roles", "", "| rule | what it recognises | seen in |", "|---|---|---|", *rows, ""]),
        _ROLE_FILES,
        _section("Boxes", flow.__doc__),
        _section("Arrows", pattern.__doc__),
        _section("Guards", conditions.__doc__),
        _section("Matching", match.__doc__),
        _words("Styles", "style", STYLES),
        _words("Exports", "exported_as", EXPORTS),
        _PLAN_FILES,
        _table_of_plans(),
    ]
    return "\n".join(parts)


def _table_of_plans() -> str:
    rows = [f"| [`{plan.id}`](plans/{plan.id}.toml) | `{plan.qualnames[0]}` | {plan.gains} |" for plan in load_plans()]
    return "\n".join([_WHY_PINNED, "| plan | class | difference from the inferred plan |", "|---|---|---|", *rows, ""])


def _words(heading: str, key: str, words: Mapping[str, str]) -> str:
    rows = [f"| `{word}` | {meaning} |" for word, meaning in words.items()]
    return "\n".join([f"## {heading}", "", f"| {key} | meaning |", "|---|---|", *rows, ""])


def _section(heading: str, docstring: str | None) -> str:
    """Return a docstring without its first line, as a section; its indented blocks are code blocks in Markdown."""
    _, _, body = (docstring or "").partition("\n\n")
    return f"## {heading}\n\n{body.strip(chr(10))}\n"


if __name__ == "__main__":
    print(rules_readme(), end="")
