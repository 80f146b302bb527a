"""Text that nobody vouches for: read as plain values, or refused in one error that names file and place, at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from autoplan.common.errors import AutoplanError
from autoplan.common.files.decode import misshapen
from autoplan.common.files.plain import BYTES, NotPlain, parse_plain, read_plain, write_whole
from autoplan.common.patterns import matches

BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "aliases that explode": ("yaml", BOMB, "more than 100,000 values"),
    "self-reference": ("yaml", "a: &a [*a]", "contains itself"),
    "an alias of nothing": ("yaml", "a: *b", "is not defined"),
    "nesting": ("yaml", "[" * 10_000, "deeper than 64 levels"),
    "nested blocks": ("yaml", "- " * 10_000, "deeper than 64 levels"),
    "a tag": ("yaml", "a: !!python/object/apply:os.system [ls]", "line 1, column 4"),
    "a number as key": ("yaml", "a: 1\n2: b", "line 2"),
    "a list as key": ("yaml", "? [1]\n: 2", "must be text"),
    "a word that is true": ("yaml", "yes: 1", "quote it"),
    "a date": ("yaml", "a: 2020-01-01", "timestamp"),
    "a long number": ("yaml", f"a: {'9' * 5000}", "5,000 digits"),
    "a merge": ("yaml", "<<: {a: 1}", "not plain data"),
    "a key twice": ("yaml", "a: 1\na: 2", "duplicate key"),
    "two documents": ("yaml", "--- 1\n--- 2", "second document"),
    "nested lists": ("json", "[" * 10_000, "nested deeper"),
    "nested values": ("json", '{"a":' * 100 + "1" + "}" * 100, "deeper than 64"),
    "a JSON number": ("json", "9" * 5000, "5,000 digits"),
    "half a character": ("json", '{"a": ["\\ud800"]}', "a[0]"),
    "a JSON key twice": ("json", '{"a": 1, "a": 2}', "duplicate key"),
    "a million lists": ("json", f"[{'[],' * 1_000_000}1]", "more than 100,000"),
    "a TOML date": ("toml", "a = 2020-01-01", "quote it"),
    "a TOML number": ("toml", f"a = {'9' * 5000}", "digits"),
    "a TOML nest": ("toml", f"a = {'[' * 10_000}", "nested deeper"),
    "a dotted key": ("toml", f"a{'.a' * 20_000} = 1", "dotted key"),
    "an inline dotted key": ("toml", f"x = {{ a{'.a' * 20_000} = 1 }}", "dotted key"),
    "a long word": ("toml", "x" * 60_000, "as TOML"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_plain_is_one_error_at_once(case: str) -> None:
    notation, text, said = HOSTILE[case]
    start = time.process_time()
    with pytest.raises(AutoplanError, match=r"file x") as caught:
        parse_plain(text, notation, "file x", NotPlain())  # type: ignore[arg-type]
    assert said in str(caught.value) and len(str(caught.value)) < 1000
    assert time.process_time() - start < 1


def test_plain_values_are_read_as_yaml_reads_them() -> None:
    text = "a: 1\nb: 1.5\nc: true\nd: ~\ne: 'yes'\nf: |\n  12\ng: [1, {h: x}]\ni: &n [1]\nj: *n\n"
    assert parse_plain(text, "yaml", "x", NotPlain()) == {
        **{"a": 1, "b": 1.5, "c": True, "d": None, "e": "yes", "f": "12\n", "g": [1, {"h": "x"}], "i": [1], "j": [1]}
    }
    assert parse_plain('{"a": 1, "a": 2}', "json", "x", NotPlain(), repeated=True) == {"a": 2}


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    large, binary = tmp_path / "large.yaml", tmp_path / "binary.yaml"
    large.write_text("x" * (BYTES["yaml"] + 1))
    binary.write_bytes(b"\xff\xfe")
    for path, said in ((large, "larger than"), (binary, "is not text"), (tmp_path / "none", "No such file")):
        with pytest.raises(AutoplanError, match=said) as caught:
            read_plain(path)
        assert str(path) in str(caught.value)
    with pytest.raises(AutoplanError, match="not a file"):
        read_plain(tmp_path)


def test_shapes() -> None:
    shape = {"flow!": str, "where": [str], "tp": int, "yields": {"*": (str, [str])}}
    assert misshapen({"flow": "a", "where": ("b",), "tp": 2, "yields": {"x": ["y"]}, "more": 1}, shape) == ""
    assert misshapen([], shape) == "the top must be a mapping, not []"
    assert misshapen({"flow": "a", "tp": True}, shape) == "tp must be a whole number, not True"
    assert misshapen({"flow": "a", "yields": {"x": [1]}}, shape) == "yields.x[0] must be text, not 1"
    assert misshapen({"flow": "a", "yields": {"x": 1}}, shape) == "yields.x must be text or a list, not 1"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "plan.yaml"
    write_whole(place, "before")
    os.chmod(place, 0o640)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", interrupted)
        write_whole(place, "after")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"] and place.read_text() == "before"
    write_whole(place, "after")
    assert place.read_text() == "after" and place.stat().st_mode & 0o777 == 0o640
    with pytest.raises(AutoplanError, match="No space left"):
        write_whole(Path("/dev/full"), "x")


def test_a_pattern_of_many_stars_is_answered_at_once() -> None:
    start = time.process_time()
    assert not matches(f"{'*a' * 40}*b", "a" * 200)
    assert matches("a.*b*c.d", "a.xbxc.d") and not matches("a.*.d", "a.b.c.d") and matches("**", "ab")
    assert time.process_time() - start < 0.5


def test_no_other_file_parses_what_others_wrote() -> None:
    """Invariant: common/files reads the text that nobody vouches for; what else parses is listed here."""
    import re

    import autoplan

    package = Path(autoplan.__file__).parent
    parsing = re.compile(r"yaml\.(?:safe_)?load\(|json\.loads?\(|tomllib\.loads?\(")
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if parsing.search(path.read_text("utf-8"))
    }
    weights = {
        "execute/weights/files.py",
        "execute/quantised/modules.py",
        "hf/quantised/weights.py",
    }  # of what tensors hold
    ranks = {"execute/agreement.py"}  # what another rank of ours has written
    assert found == {"common/files/plain.py"} | weights | ranks
