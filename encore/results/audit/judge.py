"""Audit scored sets of runs.

from encore.results.audit.judge import audit_path
for audit in audit_path("results/20260101T120000Z-resnet-mxnet-dgxa100"):
    for finding in audit.findings:
        print(finding.severity, finding.rule, finding.place, finding.found)
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from encore.results.audit.copies import copies
from encore.results.audit.oddities import Oddity, Rule
from encore.results.audit.rules import RULES
from encore.results.findings import Finding, Severity, no_error
from encore.results.rates import rate_of, severity_at
from encore.results.scores.score import Score, score_folder
from encore.results.table import grouped

_COPY, _ALTERED_COPY = (rule for rule in RULES if rule.check is None)
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Audit:
    """A set of runs and what was found in it, errors first."""

    score: Score
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether there is no error."""
        return no_error(self.findings)

    def counts(self) -> dict[Severity, int]:
        """Return the number of findings by severity."""
        found = Counter(finding.severity for finding in self.findings)
        return {severity: found[severity] for severity in _ORDER}

    def as_json(self) -> dict[str, object]:
        """Return the audit as plain data; the fields are described in docs/audit.md."""
        return {
            "folder": str(self.score.folder),
            "round": self.score.round,
            "round_is_guess": self.score.round_is_guess,
            "benchmark": self.score.benchmark,
            "runs": len(self.score.runs),
            "passed": self.passed,
            "findings": [finding.as_json() for finding in self.findings],
        }


def audit_path(path: str | Path, against: Iterable[Path] = ()) -> list[Audit]:
    """Audit every set of logs at or below ``path``, and look for its logs in the sets below ``against``."""
    others = [score for folder in against for score in score_folder(folder)]
    return audit_scores(score_folder(path), others)


def audit_scores(scores: Sequence[Score], others: Sequence[Score] = ()) -> list[Audit]:
    """Audit sets that were scored, among them copies from one set to another, or from ``others``."""
    foreign = grouped(_copied(scores, others), lambda pair: pair[0])
    found = []
    for score in scores:
        own = [*audit_score(score, in_digests=True), *(finding for _, finding in foreign.get(score.folder, []))]
        found.append(Audit(score, tuple(sorted(own, key=lambda finding: _ORDER.index(finding.severity)))))
    return found


def audit_score(score: Score, *, in_digests: bool = False) -> tuple[Finding, ...]:
    """Return what the rules find in one set, errors first; ``in_digests``: among the public sets too."""
    checks = [(rule, rule.check) for rule in RULES if rule.check is not None and (in_digests or not rule.in_digests)]
    found = [_finding(rule, oddity) for rule, check in checks for oddity in check(score)]
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity)))


def _finding(rule: Rule, oddity: Oddity) -> Finding:
    rate = rate_of("audit", rule.name)
    return Finding(
        line=oddity.line,
        rule=rule.name,
        expected=rule.expected,
        found=oddity.found,
        hint=rule.hint,
        severity=severity_at(rate, rule.severity),
        kind="audit",
        path=oddity.path,
        rate=rate,
    )


# Yield each log that is in another set too, with the folder of its own one.
def _copied(scores: Sequence[Score], others: Sequence[Score]) -> Iterator[tuple[Path, Finding]]:
    mine = {score.folder.resolve() for score in scores}
    apart = [score for score in others if score.folder.resolve() not in mine]
    for copy, original, how in copies(run for score in (*apart, *scores) for run in score.runs):
        if copy.path.parent != original.path.parent:
            oddity = Oddity(f"the events of {original.path}{f', {how}' if how else ''}", copy.path)
            yield copy.path.parent, _finding(_ALTERED_COPY if how else _COPY, oddity)
