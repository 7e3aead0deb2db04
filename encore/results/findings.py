"""What a compliance check and an audit hand back: findings in plain words, and the report that holds them."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning", "note"]
Kind = Literal["rule", "small_data", "reading", "crash", "audit"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a log has and the rules do not want, or the other way round."""

    line: int | None  # Line of the file, from 1; None where the finding is about the whole log
    rule: str  # Where the rule is defined; of an audit its name, as in docs/audit.md
    # Name of one of Encore's own rules of `encore check`, as in docs/results.md; one of mlperf-logging's has none but
    # ``target_not_met``.
    code: str = ""
    expected: str
    found: str
    hint: str
    severity: Severity = "error"
    # ``small_data``: no run on this data set can satisfy the rule. ``reading``: the text itself is damaged. ``crash``:
    # mlperf-logging broke on this log, so its verdict is not known. ``audit``: what `encore audit` finds.
    kind: Kind = "rule"
    path: Path | None = None  # The file, in an audit; None where the finding is about the whole set
    # Part of the public sets on which this rule of our own fires; None where it was not measured.
    rate: float | None = None

    @property
    def place(self) -> str:
        """Return ``result_0.txt line 7``, as far as there is one."""
        line = f"line {self.line}" if self.line is not None else ""
        return f"{self.path.name if self.path else ''} {line}".strip()

    def as_json(self) -> dict[str, object]:
        """Return the finding as plain data; file and rate are those of an audit."""
        plain = asdict(self)
        path, rate = plain.pop("path"), plain.pop("rate")
        return {**plain, "file": path.name if path else None, "rate": rate} if self.kind == "audit" else plain


def no_error(findings: Iterable[Finding]) -> bool:
    """Return whether none of the findings is an error."""
    return not any(finding.severity == "error" for finding in findings)


@dataclass(frozen=True, kw_only=True)
class ComplianceReport:
    """All findings about one log."""

    path: Path
    ruleset: str | None  # Such as ``0.7.0``; None where it could not be found
    ruleset_found: str  # How the ruleset was found
    ruleset_is_guess: bool = False
    checker: str  # What checked: mlperf-logging with its version, or Encore's own rules
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """No error at all, as a submission needs it."""
        return no_error(self.findings)

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
            "ruleset_is_guess": self.ruleset_is_guess,
            "checker": self.checker,
            "passed": self.passed,
            "passed_but_for_data": self.passed_but_for_data,
            "findings": [finding.as_json() for finding in self.findings],
        }
