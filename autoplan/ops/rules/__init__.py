"""One rule per family of aten ops. Importing this package fills the table in `site.RULES`."""

from autoplan.ops.rules import (
    creation,
    elementwise,
    experts,
    indexing,
    linalg,
    pieces,
    products,
    reductions,
    spatial,
    views,
)
from autoplan.ops.rules.site import RULES, Rule, Site, State, refs, rule, rule_for

__all__ = [
    "RULES",
    "Rule",
    "Site",
    "State",
    "creation",
    "elementwise",
    "experts",
    "indexing",
    "linalg",
    "pieces",
    "products",
    "reductions",
    "refs",
    "rule",
    "rule_for",
    "spatial",
    "views",
]
