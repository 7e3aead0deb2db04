"""``encore compare``: a run against a submission or another run: the verdict, and what differs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from encore.cli import options
from encore.cli.audit import summary
from encore.cli.layout import console, say, show, text, write_json
from encore.errors import EncoreError
from encore.results.compare.compare import Comparison, Factor, certainty, compare_with
from encore.results.compare.compare import compare as compare_named
from encore.results.compare.explain import Explanation, explain
from encore.results.compare.nearest import AS_GIVEN
from encore.results.compare.sides import load_side

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
_SHOWN = 10  # Differences, without --all


def compare(
    run: options.Run,
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="OTHER",
            help="Another run, or a submission as `encore published` names it; default: the nearest submission.",
        ),
    ] = None,
    logs: options.Logs = None,
    tolerance: Annotated[
        float, typer.Option(min=0.1, max=100.0, help="Per cent that still count as the same result.")
    ] = 5.0,
    everything: Annotated[bool, typer.Option("--all", help="Also the differences of little weight.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compare a run with a submission or another run: was it reproduced, how sure is that, and what differs?

    Examples:

      encore compare results/20260101T120000Z-resnet-mxnet-dgxa100

      encore compare my_logs v0.7/NVIDIA/dgxa100_ngc20.06_mxnet --json

      encore compare results/20260101T120000Z-resnet-mxnet-cpu results/20260102T090000Z-resnet-mxnet-cpu

      encore compare my_logs training_results_v4.0/NVIDIA/results/dgxh100_ngc24.04_pytorch/unet3d
    """
    if logs is not None and not logs.is_dir():
        raise EncoreError(f"there is no folder {logs}", expected="a folder of submitted logs")
    ours = load_side(run)
    if other is not None and Path(other).exists():
        found = compare_with(ours, load_side(Path(other)), AS_GIVEN, tolerance / 100)
    else:
        found = compare_named(ours, other, logs, tolerance / 100)
    why = explain(found.ours, found.theirs) if found.theirs is not None else None
    if as_json:
        differences = {"differences": [vars(each) for each in why.differences], "unknown": why.unknown} if why else {}
        write_json({**found.as_json(), **differences})
        return
    _print_comparison(console(), found)
    if why is not None:
        _print_differences(console(), why, None if everything else _SHOWN)


def _print_comparison(screen: Console, found: Comparison) -> None:
    against = f"{found.theirs.label} ({found.match.text})" if found.theirs else "no submission"
    say(screen, text(f"{found.ours.label}: {found.ours.benchmark or '?'} against {against}"))
    say(screen, text(found.verdict.value, _STYLES[found.verdict.value]))
    for reason in found.reasons:
        say(screen, text(f"  {reason}"))
    if found.factors:
        columns = ("", "yours", "theirs", "ratio", "90 % interval", "z")
        show(screen, "", columns, map(_row, found.factors), numbers=columns[1:], least=("z",))
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


def _print_differences(screen: Console, found: Explanation, most: int | None) -> None:
    say(screen, text("what differs, by its weight:" if found.differences else "no difference found", "bold"))
    for number, each in enumerate(found.differences[:most], 1):
        say(screen, text(f"{number:3}. {each.area:<15} {each.sentence}"))
    left = len(found.differences) - len(found.differences[:most])
    if left:
        say(screen, text(f"     and {left} of less weight: --all lists them", "dim"))
    for line in found.unknown:
        say(screen, text(line, "yellow"))
