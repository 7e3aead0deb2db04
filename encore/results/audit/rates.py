"""How often each rule fires on public sets, which were genuine when they were published, and what follows from that."""

from __future__ import annotations

import functools
import json
from typing import Any

from encore.results.audit.oddities import Rule
from encore.results.compliance.rates import severity_at
from encore.results.findings import Severity
from encore.results.published.published import DATA

FILE = DATA / "audit_rates.json"


@functools.cache
def measured() -> dict[str, Any]:
    """Return data/audit_rates.json; PROVENANCE.md describes it."""
    loaded: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return loaded


def rate_of(rule: Rule) -> float | None:
    """Return the part of the public sets on which a rule fires."""
    entry = measured()["rules"].get(rule.name)
    return entry["sets"] / measured()["sets"] if entry else None


def severity_of(rule: Rule) -> Severity:
    """Return what a finding of the rule is: an error only where the rule is known to fire rarely."""
    return severity_at(rate_of(rule), rule.severity)
