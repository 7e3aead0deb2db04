"""Findings of compliance checks and audits, rates of the rules, and export formats."""

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote
from xml.etree import ElementTree

from typing_extensions import NotRequired, TypedDict

from encore import __version__
from encore.results.format import printable

Severity = Literal["error", "warning", "note"]
Kind = Literal["rule", "small_data", "reading", "crash", "audit"]


class FindingJson(TypedDict):
    """A violation of a rule, or an observation about a log or a set."""

    line: int | None  # From 1; null if the finding is about the complete log
    rule: str  # Definition of the rule; for an audit its name, as in docs/audit.md
    code: str  # Name of a rule in Encore; empty for rules of mlperf-logging
    expected: str
    found: str
    hint: str
    severity: Severity
    # `small_data`: no run on this data set can satisfy the rule. `reading`: damaged text. `crash`: mlperf-logging
    # crashed on this log.
    kind: Kind
    file: NotRequired[str | None]  # Audit only; null if the finding is about the set
    # Audit only: fraction of the public sets on which the rule fires; null if not measured
    rate: NotRequired[float | None]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A violation of a rule, or an observation about a log or a set."""

    line: int | None  # Line in the file, from 1; None if the finding is about the complete log
    rule: str  # Definition of the rule; for an audit its name, as in docs/audit.md
    # Name of a rule in Encore, as in docs/results.md. mlperf-logging's rules only have ``target_not_met`` and
    # ``sequence_length``.
    code: str = ""
    expected: str
    found: str
    hint: str
    severity: Severity = "error"
    # ``small_data``: no run on this data set can satisfy the rule. ``reading``: damaged text. ``crash``: mlperf-logging
    # crashed on this log, so its verdict is unknown. ``audit``: finding of `encore audit`.
    kind: Kind = "rule"
    path: Path | None = None  # File in an audit; None if the finding is about the set
    # Fraction of the public sets on which this rule fires; None if not measured
    rate: float | None = None

    @property
    def label(self) -> str:
        """Severity for display, or "small data" for rules that no run on a toy data set can satisfy"""
        return "small data" if self.kind == "small_data" else self.severity

    @property
    def location(self) -> str:
        """Location such as ``result_0.txt line 7``, as far as known"""
        line = f"line {self.line}" if self.line is not None else ""
        return f"{self.path.name if self.path else ''} {line}".strip()

    def as_json(self) -> FindingJson:
        entry: FindingJson = {
            "line": self.line, "rule": self.rule, "code": self.code, "expected": self.expected, "found": self.found,
            "hint": self.hint, "severity": self.severity, "kind": self.kind,
        }  # fmt: skip
        if self.kind == "audit":
            entry |= {"file": self.path.name if self.path else None, "rate": self.rate}
        return entry


def no_error(findings: Iterable[Finding]) -> bool:
    return not any(finding.severity == "error" for finding in findings)


class ReportJson(TypedDict):
    """All findings about one log."""

    path: str
    ruleset: str | None  # Such as `0.7.0`; null where it could not be found
    ruleset_found: str  # How it was found
    ruleset_is_guess: bool
    checker: str  # mlperf-logging with version, or the rules in Encore
    passed: bool
    passed_but_for_data: bool  # All errors are unavoidable with a toy data set
    findings: list[FindingJson]


@dataclass(frozen=True, kw_only=True)
class ComplianceReport:
    """All findings about one log."""

    path: Path
    ruleset: str | None  # Such as ``0.7.0``; None where it could not be found
    ruleset_found: str  # How the ruleset was found
    ruleset_is_guess: bool = False
    checker: str  # mlperf-logging with version, or the rules in Encore
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return no_error(self.findings)

    @property
    def passed_but_for_data(self) -> bool:
        """All errors are unavoidable with a toy data set."""
        return not any(finding.severity == "error" and finding.kind != "small_data" for finding in self.findings)

    def as_json(self) -> ReportJson:
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


MAX_ERROR_RATE = 0.005  # Rules that fire on a larger fraction of the public sets are warnings
Rules = Literal["audit", "check"]


def file_of(rules: Rules) -> Path:
    return Path(__file__).parent / "data" / f"{rules}_rates.json"


@functools.cache
def measured(rules: Rules) -> dict[str, Any]:
    """Load the measured rates of the rules of `encore audit` or `encore check`."""
    loaded: dict[str, Any] = json.loads(file_of(rules).read_text("utf-8"))
    return loaded


def rate_of(rules: Rules, name: str) -> float | None:
    """Return the part of the public sets on which a rule fires; None where it was not measured."""
    entry = measured(rules)["rules"].get(name)
    return entry["sets"] / measured(rules)["sets"] if entry else None


def severity_at(rate: float | None, max_severity: Severity) -> Severity:
    """Limit a rule's severity: errors only if the rule is known to fire rarely."""
    return "warning" if max_severity == "error" and (rate is None or rate > MAX_ERROR_RATE) else max_severity


Found = Sequence[tuple[Path, Sequence[Finding]]]  # Findings per log or set folder

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(results_by_path: Found) -> str:
    """Convert findings to SARIF 2.1.0 (OASIS standard of 27 March 2020); paths are relative to the working directory.

    Findings caused only by a toy data set are notes, not errors.
    """
    rules: dict[str, Finding] = {}
    results = []
    for path, findings in results_by_path:
        for finding in findings:
            rules.setdefault(_rule_id(finding), finding)
            results.append(_result(path, finding))
    described = [
        {"id": name, "shortDescription": {"text": first.rule}, "help": {"text": first.hint}}
        for name, first in rules.items()
    ]
    driver = {"name": "encore", "version": __version__, "rules": described}
    run = {"tool": {"driver": driver}, "columnKind": "utf16CodeUnits", "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def junit(results_by_path: Found) -> str:
    """Return findings as JUnit's XML: a test case per log, or per set, which an error fails."""
    suites = ElementTree.Element("testsuites", name="encore")
    suite = ElementTree.SubElement(suites, "testsuite", name="encore", tests=str(len(results_by_path)))
    suite.set("failures", str(sum(not no_error(findings) for _, findings in results_by_path)))
    for path, findings in results_by_path:
        case = ElementTree.SubElement(suite, "testcase", classname=path.parent.as_posix(), name=path.name)
        errors = [finding for finding in findings if finding.severity == "error"]
        if errors:
            failure = ElementTree.SubElement(case, "failure", message=printable(_format_text(errors[0])), type="error")
            failure.text = "\n".join(_format_lines(errors))
        others = [finding for finding in findings if finding.severity != "error"]
        if others:
            ElementTree.SubElement(case, "system-out").text = "\n".join(_format_lines(others))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)


FORMATS = {"sarif": sarif, "junit": junit}


# Short rule name, identical for all findings from the same rule: the code, or mlperf-logging's key
def _rule_id(finding: Finding) -> str:
    return finding.code or finding.rule.partition(":")[0].rpartition(", ")[2]


def _result(path: Path, finding: Finding) -> dict[str, Any]:
    file = (finding.path or path).absolute()
    relative = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else finding.path or path
    location: dict[str, Any] = {"artifactLocation": {"uri": quote(relative.as_posix())}}
    if finding.line is not None:
        location["region"] = {"startLine": max(finding.line, 1)}
    return {
        "ruleId": _rule_id(finding),
        "level": "note" if finding.kind == "small_data" else finding.severity,
        "message": {"text": _format_text(finding)},
        "locations": [{"physicalLocation": location}],
    }


def _format_text(finding: Finding) -> str:
    return f"{finding.found}; expected: {finding.expected}; hint: {finding.hint}"


def _format_lines(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        location = f"{finding.location}: " if finding.location else ""
        yield printable(f"{finding.severity}: {location}{_format_text(finding)}")
