"""``encore selftest``: check the GPU functions of this machine."""

import itertools
import tempfile
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from typing_extensions import TypedDict

from encore.cli import options
from encore.cli.layout import console, say, show, text, write_json
from encore.errors import EncoreError, ExitCode
from encore.machine import node
from encore.run.selftest import Request, Row, Selftest

COLOURS = {"OK": "green", "FAIL": "red", "SKIPPED": "yellow"}


class Tested(TypedDict):
    """Results of the checks."""

    device: str
    passed: bool
    complete: bool  # False if checks were skipped due to the time limit
    checks: list[Row]


def selftest(
    benchmarks: Annotated[list[str] | None, typer.Argument(help="Benchmarks, such as resnet; default: all.")] = None,
    device: Annotated[Literal["gpu", "cpu"], typer.Option(help="What to check.")] = "gpu",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only checks with this name prefix. Repeatable."),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(help="Time limit in seconds. The remaining checks are skipped: exit code 3.")
    ] = 600.0,
    check_seconds: Annotated[float, typer.Option(help="Seconds after which a check has failed.")] = 150.0,
    runtime: options.Runtime = None,
    image: options.Image = None,
    python: options.Python = None,
    as_json: options.Json = False,
) -> None:
    """Check functions that need a GPU: precisions, graphs, compilers, kernels, resume, speed. Exits with 1 on failure.

    Exit code 3: no failures, but checks were skipped due to the time limit.

    Examples:

      encore selftest                                            all benchmarks with an image

      encore selftest ncf dlrm --python "$(command -v python)"   in a Python that has the framework with CUDA

      encore selftest ncf --device cpu --only resume             without a GPU
    """
    request = Request(
        benchmarks=tuple(benchmarks or ()),
        device=device,
        runtime=runtime,
        image=image,
        python=python,
        only=tuple(only or ()),
        time_limit=time_limit,
        check_seconds=check_seconds,
    )
    _refuse(request)
    screen, started = console(stderr=as_json), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="encore-selftest-") as work:
        rows = _run(request, Path(work), screen)
    failed, cut = any(row.result == "FAIL" for row in rows), any(row.cut for row in rows)
    if as_json:
        write_json("selftest", Tested(device=device, passed=not failed, complete=not cut, checks=rows))
    else:
        _print(screen, rows, time.monotonic() - started)
    if not any(row.result == "OK" for row in rows) and not failed and not cut:
        raise EncoreError("nothing was checked", expected="at least one check that can run", hint="see SKIPPED above")
    if failed:
        raise typer.Exit(ExitCode.FAILED)
    raise typer.Exit(ExitCode.NOT_REACHED if cut else ExitCode.REACHED)


def _refuse(request: Request) -> None:
    # Reject impossible requests before anything starts.
    if request.device == "gpu" and not node.gpus():
        hint = "encore selftest --device cpu runs the checks that do not need a GPU"
        raise EncoreError("no GPU found: no checks were run", hint=hint)
    if request.python is not None and (request.runtime or request.image):
        raise EncoreError("--python with --runtime or --image", expected="one of them", hint="leave one out")
    if request.python is not None and not request.python.expanduser().is_file():
        raise EncoreError(f"--python {request.python}: no such file", expected="a Python that has the framework")
    if request.time_limit <= 0 or request.check_seconds <= 0:
        raise EncoreError("a limit of 0 seconds", expected="--time-limit and --check-seconds above 0")


def _run(request: Request, work: Path, screen: Console) -> list[Row]:
    # Run the checks and print one line per result.
    with screen.status("listing the checks") as status:
        test = Selftest(request, work, node.this_node(), status.update)
        plan, numbers = test.plan(), itertools.count(1)

        def start(name: str, check: str) -> None:
            status.update(f"{next(numbers)}/{len(plan)} {name} {check}")

        rows = []
        for row in itertools.chain(test.skipped, test.run(plan, start)):
            rows.append(row)
            result = text(f"{row.result:<8}", COLOURS[row.result])
            label = text(f"{row.name} {row.check}".strip())
            say(screen, text(f"{time.strftime('%H:%M:%S')} ", "dim"), result, label)
    return rows


def _print(screen: Console, rows: list[Row], seconds: float) -> None:
    cells = (
        (row.name, row.check, text(row.result, COLOURS[row.result]), f"{row.seconds:.0f}", row.found) for row in rows
    )
    show(screen, "selftest", ("benchmark", "check", "result", "s", "found"), cells, numbers=("s",))
    for row in rows:
        if row.lines:
            say(screen, text(f"{row.name} {row.check}, last lines:"))
            for line in row.lines:
                say(screen, text(f"  | {line}"))
    counts = {name: sum(row.result == name for row in rows) for name in COLOURS}
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    screen.print(f"{summary} in {seconds:.0f} s")
