"""``encore audit``: what a genuine set of result logs does not have."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding

from encore.cli import options
from encore.cli.layout import console, say, text, write_json
from encore.errors import ExitCode
from encore.results.audit.judge import Audit, audit_path
from encore.results.findings import FORMATS, Finding
from encore.results.table import grouped
from encore.results.words import count_of, round_of

SEVERITY_STYLE = {"error": "red", "warning": "yellow", "note": "dim"}
_PLACES = 3


def audit(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A log, a folder of logs, or a tree.")],
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", metavar="DIR", help="Also look for these logs in this folder of others."),
    ] = None,
    as_json: options.Json = False,
    format_: options.Format = "text",
) -> None:
    """Look for late starts, copies, impossible clocks and edited outliers in result logs.

    Exits with 1 where there is an error. One set gives one JSON object, a tree a list of them.

    Examples:

      encore audit results/20260101T120000Z-resnet-mxnet-cpu

      encore audit my_logs --against training_results_v0.7 --json

      encore audit training_results_v5.1/NVIDIA --format sarif > audit.sarif
    """
    form = options.one_form(format_, as_json)
    audits = audit_path(path, against or ())
    if form in FORMATS:
        sys.stdout.write(FORMATS[form]([(each.score.folder, each.findings) for each in audits]) + "\n")
    elif form == "json":
        found = [each.as_json() for each in audits]
        write_json(found[0] if len(found) == 1 else found)
    else:
        _print_audits(console(), audits)
    if not all(each.passed for each in audits):
        raise typer.Exit(ExitCode.FAILED)


def summary(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yield a line for each rule with errors or warnings, and its style, as other commands print them."""
    for rule, found in grouped(findings, lambda finding: finding.rule).items():
        first = found[0]
        if first.severity != "note":
            place = f", {first.place}" if first.place else ""
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            yield f"audit, {first.severity}, {rule}{place}: {first.found}{more}", SEVERITY_STYLE[first.severity]


# Print the sets with findings, each rule once, and at the end what was found in all.
def _print_audits(screen: Console, audits: Sequence[Audit]) -> None:
    for each in audits:
        if each.findings or len(audits) == 1:
            _print_audit(screen, each)
    counts = [each.counts() for each in audits]
    total = ", ".join(count_of(sum(each[severity] for each in counts), severity) for severity in counts[0])
    logs = count_of(sum(len(each.score.runs) for each in audits), "log")
    sets = count_of(len(audits), "set")
    say(screen, text(f"{sets}, {logs}: {total}", "" if all(each.passed for each in audits) else "red"))


def _print_audit(screen: Console, audit: Audit) -> None:
    score = audit.score
    round_ = round_of(score.round, score.round_is_guess)
    say(screen, text(f"{score.folder}", "bold"), text(f"({round_} {score.benchmark or '?'})"))
    for rule, findings in grouped(audit.findings, lambda finding: finding.rule).items():
        first = findings[0]
        say(screen, text(f"  {first.severity}: {rule}", SEVERITY_STYLE[first.severity]), text(_how_often(first), "dim"))
        places = [f"{each.place}: {each.found}" if each.place else each.found for each in findings[:_PLACES]]
        more = [f"and {len(findings) - _PLACES} more"] if len(findings) > _PLACES else []
        for line in (*places, *more, f"expected: {first.expected}", f"hint:     {first.hint}"):
            _say(screen, line)


# Print an indented line: wrapped at words on a terminal, whole in a pipe.
def _say(screen: Console, line: str) -> None:
    if screen.is_terminal:
        screen.print(Padding(text(line), (0, 0, 0, 4), expand=False))
    else:
        say(screen, text(f"    {line}"))


def _how_often(finding: Finding) -> str:
    if finding.rate is None:
        return "(how often on public sets is not known)"
    return f"({finding.rate:.2%} of the public sets have it)" if finding.rate else "(no measured public set has it)"
