"""Hold a plan that somebody wrote against the model (`auditor.py`). One check per file in `checks/`.

In: a source, and a plan that somebody wrote. Out: a Report of findings, and a verdict for each entry. May import: what
check may.
"""

from autoplan.check.audit.auditor import audit, audit_source

__all__ = ["audit", "audit_source"]
