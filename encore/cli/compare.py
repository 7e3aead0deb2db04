"""``encore compare`` and ``encore explain``: a run against a submission or another run, and why they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from encore.cli import options
from encore.cli.audit import summary
from encore.cli.layout import console, plain_table, print_fitted, say, text, write_json
from encore.errors import EncoreError
from encore.results.compare.compare import Comparison, Factor, certainty, compare_path, compare_with
from encore.results.compare.digest import submission
from encore.results.compare.explain import Explanation
from encore.results.compare.explain import explain as explained
from encore.results.compare.nearest import AS_GIVEN, find_submission
from encore.results.compare.sides import Side, load_side
from encore.results.words import round_of

COMPARE_EPILOG = """
Examples:

  encore compare results/20260101T120000Z-resnet-mxnet-dgxa100

  encore compare my_logs --with v0.7/NVIDIA/dgxa100_ngc20.06_mxnet --json

  encore compare my_logs --other training_results_v4.0/NVIDIA/results/dgxh100_ngc24.04_pytorch/unet3d
"""
EXPLAIN_EPILOG = """
Examples:

  encore explain results/20260101T120000Z-resnet-mxnet-dgxa100

  encore explain results/20260101T120000Z-resnet-mxnet-cpu results/20260102T090000Z-resnet-mxnet-cpu
"""
_STYLES = {
    "reproduced": "bold green",
    "same runs": "bold",
    "undecided": "bold yellow",
    "faster": "bold green",
    "slower": "bold red",
    "converges differently": "bold red",
    "not converged": "bold red",
    "not comparable": "bold yellow",
}
_SHOWN = 15


def compare(
    run: options.Run,
    with_: options.With = None,
    other: options.Other = None,
    logs: options.Logs = None,
    within: Annotated[
        float, typer.Option(min=0.1, max=100.0, help="Per cent that still count as the same result.")
    ] = 5.0,
    as_json: options.Json = False,
) -> None:
    """Compare a run with a submitted result: was it reproduced, and how sure is that?"""
    _only_one(with_, other)
    if other is not None:
        found = compare_with(load_side(run), load_side(other), AS_GIVEN, within / 100)
    else:
        found = compare_path(run, with_, _folder(logs), within / 100)
    if as_json:
        write_json(found.as_json())
    else:
        _print_comparison(console(), found)


def explain(
    run: options.Run,
    second: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Another run, in place of a submission.")
    ] = None,
    with_: options.With = None,
    other: options.Other = None,
    logs: options.Logs = None,
    everything: Annotated[bool, typer.Option("--all", help="Also the differences of little weight.")] = False,
    as_json: options.Json = False,
) -> None:
    """Rank what differs between a run and a submission, or between two runs."""
    _only_one(second, with_, other)
    other = second or other
    ours = load_side(run)
    theirs = load_side(other) if other is not None else _submission(ours, with_, _folder(logs))
    found = explained(ours, theirs)
    if as_json:
        write_json(found.as_json())
    else:
        _print_explanation(console(), found, None if everything else _SHOWN)


def _only_one(*given: Path | str | None) -> None:
    if sum(each is not None for each in given) > 1:
        raise EncoreError("--with, --other and a second RUN name what to compare with", remedy="give one of them")


def _folder(logs: Path | None) -> Path | None:
    if logs is not None and not logs.is_dir():
        raise EncoreError(f"there is no folder {logs}", expected="a folder of submitted logs")
    return logs


def _submission(ours: Side, name: str | None, logs: Path | None) -> Side:
    cell, match = find_submission(ours, name)
    if cell is None:
        raise EncoreError(
            f"nothing to compare with: {match.text}", remedy="name a submission: --with, or a run: --other"
        )
    return submission(cell, logs)


def _print_comparison(screen: Console, found: Comparison) -> None:
    against = f"{found.theirs.label} ({found.match.text})" if found.theirs else "no submission"
    say(screen, text(f"{found.ours.label}: {found.ours.benchmark or '?'} against {against}"))
    say(screen, text(found.verdict.value, _STYLES[found.verdict.value]))
    for reason in found.reasons:
        say(screen, text(f"  {reason}"))
    if found.factors:
        table = plain_table("", "", "yours", "theirs", "ratio", "90 % interval", "z")
        for column in table.columns[1:]:
            column.justify = "right"
        for factor in found.factors:
            table.add_row(*_row(factor))
        print_fitted(screen, table, least=("z",))
        for note in dict.fromkeys(factor.note for factor in found.factors if factor.note):
            say(screen, text(note, "dim"))
    for line in certainty(found):
        say(screen, text(line))
    for caveat in found.caveats:
        say(screen, text(f"note: {caveat}", "yellow"))
    for line, style in summary(found.ours.findings):
        say(screen, text(line, style))


def _row(factor: Factor) -> list[str]:
    span = f"{factor.interval[0]:.3f} to {factor.interval[1]:.3f}" if factor.interval else "-"
    return [
        factor.name,
        f"{factor.ours:.4g}" if factor.ours is not None else "-",
        f"{factor.theirs:.4g}" if factor.theirs is not None else "-",
        f"{factor.ratio:.3f}" if factor.ratio is not None else "-",
        span,
        f"{factor.z:+.1f}" if factor.z is not None else "-",
    ]


def _print_explanation(screen: Console, found: Explanation, most: int | None) -> None:
    sides = (f"{each.label} ({round_of(each.round, each.round_is_guess)})" for each in (found.ours, found.theirs))
    say(screen, text(" against ".join(sides), "bold"))
    if not found.differences:
        say(screen, text("no difference found"))
    for number, each in enumerate(found.differences[:most], 1):
        say(screen, text(f"{number:3}. {each.area:<15} {each.sentence}"))
    left = len(found.differences) - len(found.differences[:most])
    if left:
        say(screen, text(f"     and {left} of less weight: --all lists them", "dim"))
    for line in found.unknown:
        say(screen, text(line, "yellow"))
