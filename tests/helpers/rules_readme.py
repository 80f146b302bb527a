"""rules/README.md, written from the rules and from the docstrings of the code that reads them.

    python tests/helpers/rules_readme.py > rules/README.md

One source: whoever changes a rule, a style or a guard changes the page, and a test compares it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplan.analyse.picture import flow
from autoplan.decide import match
from autoplan.decide.rulebook import conditions, pattern
from autoplan.decide.rulebook.read import EXPORTS, STYLES, Rule, load_rules
from autoplan.decide.written_plans.handwritten import load_plans

_INTRODUCTION = """# Rules

<!-- Written by `python tests/helpers/rules_readme.py > rules/README.md`. Do not edit by hand. -->

Axes prove, rules decide. Whether an axis of a model can be split is proven by analysis, and nothing in this folder can
make a split that was not. Rules say what was found: they name it, say why its style is right and where that stops, and
choose between forms of a proven split. Everything here is data; none of it names a module, and a model type appears
only as evidence (`seen_in`), as the subject of a plan written by hand, or to build and feed a model.

- `roles/`: what a weight is for, recognised in the dataflow.
- `plans/`: plans written by hand for one model class each.
- `inputs/`: how to build a small copy of a model type, and what to feed it, where that cannot be derived.
- `quantised/`: how schemes of quantised weights are stored, and by which words code asks for them
  ([more](quantised/README.md)).
- `kernels/`: what fused kernels keep for backward ([more](kernels/README.md)).
- `devices/`: what an estimate knows of a GPU.
- `arguments.toml`: what an argument of a forward usually is, by words in its name.
- `defaults.toml`: what the default config of a model type leaves open, for where a type alone is named.

`autoplan rules list`, `autoplan rules show RULE` and `autoplan rules test [--strict]` read the same files.
"""

_ROLE_FILES = """## How to write a role rule

One TOML file, its name the rule's id. Keys:

| key | what it holds |
|---|---|
| `id` | the file's name |
| `summary` | one line: what it is and how it is split |
| `why` | why that is right |
| `limits` | where it stops, and which rule goes on |
| `seen_in` | model types whose inferred plans cite the rule (a test holds you to it) |
| `unseen` | or why no model type of transformers shows it |
| `unit`, `[units]` | what is sharded over ranks ("head", "feature"), by box where they differ |
| `beats` | rules that give way where both claim a box |
| `exported_as` | what its modules are to other systems, if they have a word for it (below) |
| `holds_experts` | true where its weights are experts, which can be placed whole on different ranks |
| `[match] flow` | boxes and arrows |
| `[match] where` | guards: facts that must hold |
| `[roles]` | what boxes are called; the box's name unless given |
| `[yields]` | the style of each box that is claimed, or a list where several are right |
| `[yields.sequence_parallel]` | the form that a style takes under sequence parallel |
| `[[example]]` | `name`, `graph`, `tp` (2), `expect`: styles by box; or nothing, and `because`: part of the refusal |

A rule needs an example that matches and one that is refused. `autoplan rules test --strict` drops each guard, flow line
and yield in turn, and wants an example to notice: a survivor is a guard nobody needs, or a refusal nobody wrote.
"""

_PLAN_FILES = """## How to write a plan by hand

One TOML file in `plans/`, for one model class. Its entries choose styles; units, integers, reductions and constants
come from analysis, and a contradiction between the two is an error.

| key | what it holds |
|---|---|
| `qualname` | the class it is for: `package.module.Class` |
| `why` | why inference alone is not enough |
| `gains` | what it gains over the inferred plan |
| `entries` | `{ "pattern" = "style" }`; `*` stands for one path segment |
| `sequence_parallel` | the same for sequence parallel, or the reason why there is none |
"""


_WHY_PINNED = """A plan is found by its class, by its id (`--source ID`), or as `source="handwritten"`. It is worth
a file only where it differs from the inferred one: plans that make the same cuts are tests (tests/decide/pinned).
"""


def rules_readme(rules: Sequence[Rule] | None = None) -> str:
    """The whole page."""
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
    return "\n".join([_WHY_PINNED, "| plan | class | against inference |", "|---|---|---|", *rows, ""])


def _words(heading: str, key: str, words: Mapping[str, str]) -> str:
    rows = [f"| `{word}` | {meaning} |" for word, meaning in words.items()]
    return "\n".join([f"## {heading}", "", f"| {key} | meaning |", "|---|---|", *rows, ""])


def _section(heading: str, docstring: str | None) -> str:
    """A docstring without its first line, as a section; indented blocks become code blocks by themselves."""
    _, _, body = (docstring or "").partition("\n\n")
    return f"## {heading}\n\n{body.strip(chr(10))}\n"


if __name__ == "__main__":
    print(rules_readme(), end="")
