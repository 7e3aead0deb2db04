"""Findings in the forms that other tools read: SARIF 2.1.0 for code scanning, JUnit's XML for CI servers.

text = sarif([(report.path, report.findings) for report in reports])
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from encore import __version__
from encore.results.findings import Finding, no_error

Found = Sequence[tuple[Path, Sequence[Finding]]]  # Logs, or folders of a set, with what was found in each

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "note": "note"}


def sarif(found: Found) -> str:
    """Return findings as SARIF 2.1.0 (OASIS standard of 27 March 2020); paths are relative to the working directory.

    What a small data set alone is to blame for is a note: it is no error of the run.
    """
    rules: dict[str, Finding] = {}
    results = []
    for path, findings in found:
        for finding in findings:
            rules.setdefault(_rule_of(finding), finding)
            results.append(_result(path, finding))
    described = [
        {"id": name, "shortDescription": {"text": first.rule}, "help": {"text": first.hint}}
        for name, first in rules.items()
    ]
    driver = {"name": "encore", "version": __version__, "rules": described}
    run = {"tool": {"driver": driver}, "columnKind": "utf16CodeUnits", "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def junit(found: Found) -> str:
    """Return findings as JUnit's XML: a test case per log, or per set, which an error fails."""
    suites = ElementTree.Element("testsuites", name="encore")
    suite = ElementTree.SubElement(suites, "testsuite", name="encore", tests=str(len(found)))
    suite.set("failures", str(sum(not no_error(findings) for _, findings in found)))
    for path, findings in found:
        case = ElementTree.SubElement(suite, "testcase", classname=path.parent.as_posix(), name=path.name)
        errors = [each for each in findings if each.severity == "error"]
        if errors:
            failure = ElementTree.SubElement(case, "failure", message=_printable(_text(errors[0])), type="error")
            failure.text = "\n".join(_lines(errors))
        others = [each for each in findings if each.severity != "error"]
        if others:
            ElementTree.SubElement(case, "system-out").text = "\n".join(_lines(others))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)


FORMATS = {"sarif": sarif, "junit": junit}


# Short name that is the same for all findings of a rule: that of our own, or mlperf-logging's key.
def _rule_of(finding: Finding) -> str:
    return finding.code or finding.rule.partition(":")[0].rpartition(", ")[2]


def _result(path: Path, finding: Finding) -> dict[str, Any]:
    file = finding.path or path
    location: dict[str, Any] = {"artifactLocation": {"uri": quote(_relative(file))}}
    if finding.line is not None:
        location["region"] = {"startLine": max(finding.line, 1)}
    level = "note" if finding.kind == "small_data" else _LEVELS[finding.severity]
    return {
        "ruleId": _rule_of(finding),
        "level": level,
        "message": {"text": _text(finding)},
        "locations": [{"physicalLocation": location}],
    }


def _relative(path: Path) -> str:
    try:
        return path.absolute().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_posix()


def _text(finding: Finding) -> str:
    return f"{finding.found}; expected: {finding.expected}; hint: {finding.hint}"


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        place = f"{finding.place}: " if finding.place else ""
        yield _printable(f"{finding.severity}: {place}{_text(finding)}")


# Text without the control characters that XML cannot hold, which a log may have.
def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "�" for character in text)
