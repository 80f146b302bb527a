"""A stranger's change: a check of the audit is a function and its name in a list, as docs/howto/add-a-check.md says.

The function is the one in that page, word for word; it is put into the list for a while, and an audit names it.
"""

from __future__ import annotations

import re
import textwrap
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from corpus.toys import GOOD, decoder

import autoplan
from autoplan.check.audit import auditor
from autoplan.check.audit.checks import CHECKS, AuditCheck

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "add-a-check.md"


@pytest.fixture
def check(tmp_path: Path) -> AuditCheck:
    """The function of the page, as it would be imported."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "long_lines.py"
    path.write_text(textwrap.dedent(code))
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return AuditCheck.of(module.long_lines)


def test_it_is_documented_as_all_checks_are(check: AuditCheck) -> None:
    assert check.about.startswith(f"{check.name}: ") and len(check.about) > 200


def test_an_audit_names_it(check: AuditCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor, "CHECKS", (*CHECKS, check))
    long = "|".join(["layers.*.attention.q"] * 4)
    report = autoplan.audit(decoder(), {**GOOD, long: "colwise"}, 2)
    assert [finding.where for finding in report.findings if finding.check == "long-lines"] == [long]
    assert not any(finding.check == "long-lines" for finding in autoplan.audit(decoder(), GOOD, 2).findings)
