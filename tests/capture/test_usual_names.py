"""Words in the names of arguments stand in rules/arguments.toml, and nothing of them in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoplan.capture.feeding.names import read_names, usual_names
from autoplan.capture.feeding.wants import Want
from autoplan.common.errors import AutoplanError
from autoplan.common.files.rule_files import rules_folder

HEAD = """
states = '^h0$'
offsets = '^start$'
loss_switches = '^with_loss$'
[[argument]]
words = 'mask'
"""


def test_the_file_is_read_in_its_order() -> None:
    names = usual_names()
    assert names.usual("Padding_Mask")[0] == Want("nowhere", ("batch", "length"))
    assert names.usual("some_mask")[0] == Want("bool", ("batch", "length"))
    assert names.usual("edge_index") == (Want("ids", (2, "edges"), "nodes"),)
    assert names.usual("max_seqlen") == (Want("size", value="length"),)
    assert names.usual("quux") == ()
    assert names.has_edges(["x", "senders"]) and not names.has_edges(["x", 1])
    assert names.loss_switches.search("return_loss") and not names.loss_switches.search("loss_kind")
    assert names.states.search("h_0") and not names.states.search("hat")


def test_a_word_is_added_there_alone(tmp_path: Path) -> None:
    text = (rules_folder() / "arguments.toml").read_text("utf-8")
    place = text.index("\n[[argument]]") + 1
    more = "[[argument]]\nwords = 'quux'\nusually = ['float batch 7', 'none']\n\n"
    (tmp_path / "a.toml").write_text(text[:place] + more + text[place:])
    assert read_names(tmp_path / "a.toml").usual("a_quux") == (Want("float", ("batch", 7)), Want("none"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "usually = ['floats batch']", "'floats batch' is no kind"),
        (HEAD + "usually = ['float breadth']", "'breadth' is neither a number nor one of"),
        (HEAD + "usually = ['ids batch < 2 3']", "is no kind, sizes, and what ids are below"),
        (HEAD + "usually = 'none'", "usually must be a list"),
        (HEAD.replace("mask", "(mask") + "usually = ['none']", "missing \\), unterminated subpattern"),
        ("states = 'h'", "missing key"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(AutoplanError, match=said):
        read_names(tmp_path / "a.toml")
