"""Which rows of a wrong plan are to blame, and what they must say: the fewest changes after which the audit passes.

In: an Audited whose plan is wrong. Out: a Repair (the changes, each tried, and the corrected plan), or None. May
import: what check may.
"""

from autoplan.check.audit.repair.causes import with_causes
from autoplan.check.audit.repair.search import Repair, needs_repair, repair

__all__ = ["Repair", "needs_repair", "repair", "with_causes"]
