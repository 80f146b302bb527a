"""Hold a plan that somebody wrote against the model (`auditor.py`). One check per file in `checks/`."""

from autoplan.check.audit.auditor import audit, audit_source

__all__ = ["audit", "audit_source"]
