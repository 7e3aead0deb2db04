"""How often the rules fire on the public sets, which were genuine when they were published, and what follows."""

import functools
import json
from pathlib import Path
from typing import Any, Literal

from encore.results.findings import Severity

MOST_OF_AN_ERROR = 0.005  # A rule that fires on more of the public sets than this is at most a warning
Rules = Literal["audit", "check"]


def file_of(rules: Rules) -> Path:
    """Return the file of the rates, which PROVENANCE.md describes."""
    return Path(__file__).parent / "data" / f"{rules}_rates.json"


@functools.cache
def measured(rules: Rules) -> dict[str, Any]:
    """Return what was measured of the rules of `encore audit`, or of our own ones of `encore check`."""
    loaded: dict[str, Any] = json.loads(file_of(rules).read_text("utf-8"))
    return loaded


def rate_of(rules: Rules, name: str) -> float | None:
    """Return the part of the public sets on which a rule fires; None where it was not measured."""
    entry = measured(rules)["rules"].get(name)
    return entry["sets"] / measured(rules)["sets"] if entry else None


def severity_at(rate: float | None, wanted: Severity) -> Severity:
    """Return what a finding is: an error only where its rule is known to fire rarely."""
    return "warning" if wanted == "error" and (rate is None or rate > MOST_OF_AN_ERROR) else wanted
