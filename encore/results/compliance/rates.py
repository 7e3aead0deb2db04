"""How often our own rules fire on the public sets, which were genuine when they were published, and what follows."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from encore.results.findings import Finding, Severity

MOST_OF_AN_ERROR = 0.005
"""A rule that fires on more of the public sets than this is at most a warning."""
FILE = Path(__file__).parents[1] / "data" / "check_rates.json"


@functools.cache
def measured() -> dict[str, Any]:
    """Return data/check_rates.json; PROVENANCE.md describes it."""
    loaded: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return loaded


def severity_at(rate: float | None, wanted: Severity) -> Severity:
    """Return what a finding is: an error only where its rule is known to fire rarely."""
    if wanted == "error" and (rate is None or rate > MOST_OF_AN_ERROR):
        return "warning"
    return wanted


def rated(finding: Finding) -> Finding:
    """Give a finding of `encore check` the rate of its rule and the severity that this allows."""
    if finding.code not in measured()["rules"]:
        return finding
    rate = measured()["rules"][finding.code]["sets"] / measured()["sets"]
    return replace(finding, rate=rate, severity=severity_at(rate, finding.severity))
