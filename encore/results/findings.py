"""What a compliance check hands back: findings in plain words, and the report that holds them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning"]
Kind = Literal["rule", "small_data", "reading", "crash"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a log has and the rules do not want, or the other way round."""

    line: int | None
    """Line of the file, from 1; None where the finding is about the whole log."""
    rule: str
    """Where the rule is defined."""
    expected: str
    found: str
    remedy: str
    severity: Severity = "error"
    kind: Kind = "rule"
    """``small_data``: no run on this data set can satisfy the rule. ``reading``: the text itself is damaged.
    ``crash``: mlperf-logging broke on this log, so its verdict is not known."""


@dataclass(frozen=True, kw_only=True)
class ComplianceReport:
    """All findings about one log."""

    path: Path
    ruleset: str | None
    """Such as ``0.7.0``; None where it could not be found."""
    ruleset_found: str
    """How the ruleset was found."""
    checker: str
    """What checked: mlperf-logging with its version, or Encore's own rules."""
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """No error at all, as a submission needs it."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def passed_but_for_data(self) -> bool:
        """No error but those that a small data set cannot avoid."""
        return not any(each.severity == "error" and each.kind != "small_data" for each in self.findings)

    def as_json(self) -> dict[str, object]:
        """Return the report as plain data."""
        return {
            "path": str(self.path),
            "ruleset": self.ruleset,
            "ruleset_found": self.ruleset_found,
            "checker": self.checker,
            "passed": self.passed,
            "passed_but_for_data": self.passed_but_for_data,
            "findings": [asdict(finding) for finding in self.findings],
        }
