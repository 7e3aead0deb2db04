"""``encore bench``: how fast the step is, compared with a bare loop in the framework or with the machine's ceilings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typing_extensions import NotRequired, TypedDict

from encore import catalogue, launchers, peaks
from encore.cli import data, layout, options
from encore.errors import EncoreError, ExitCode
from encore.machine import node
from encore.results.audit import kernels
from encore.run import planning, programs

_ONCE = frozenset({"roofline", "output", "steps", "repeats"})  # What a profile of one step has no use for


class Speed(TypedDict):
    """The speed of a loop; of the bare loop by the same turn."""

    title: str
    median: float  # Units per second
    least: float
    most: float
    ratio: float | None  # To the bare loop
    flops_per_sample: NotRequired[float]  # Model FLOPs of one unit
    flops_per_second: NotRequired[float]


class Benched(TypedDict):
    """How fast a step is, as benchmarks/common/checks/bench.py measures it."""

    title: str
    is_part: bool  # Whether it is of some layers alone, or of what several ranks share: no speed of the benchmark
    unit: str  # What is counted: samples or tokens, for example
    measured: dict[str, Speed]  # By loop: bare, synthetic, real, input, evaluation
    input_share: float | None  # Share of the time in which the device waits for its next batch
    device: str
    precision: str
    peak_flops_per_second: float | None  # Of a GEMM here
    sheet_flops_per_second: NotRequired[float]  # By the data sheet of the GPU
    sheet_source: NotRequired[str]


def bench(
    context: typer.Context,
    benchmark: options.Benchmark,
    system: options.System = None,
    round_name: options.Round = None,
    data_folder: options.Data = None,
    steps: Annotated[int, typer.Option(help="Steps of each measurement.")] = 20,
    repeats: Annotated[int, typer.Option(help="Measurements of each kind; the median counts.")] = 5,
    settings: options.Settings = None,
    python: options.Python = None,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="The step below this machine's measured ceilings, and its kernels.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="With --roofline: folder to write to.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Profile a step into FILE; print the precisions in it."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure samples/s on one GPU or on all cores: bare loop, synthetic data, real data, input alone; and the MFU.

    With --roofline: how far the step is below the measured ceilings of compute and memory, and where its time goes.
    Benchmarks measured into one folder are on one page; encore study report DIR shows it again.

    Examples:

      encore bench resnet                                   what this machine's default system does

      encore bench resnet --set image_size=224 --set eval_resize=256 --set depth=50 --set batch_size=16

      encore bench resnet-pytorch --roofline -o roofline

      encore bench resnet-pytorch --profile profile.json    what encore audit compares declarations with
    """
    screen = layout.console(stderr=as_json)
    if profile is not None:
        _refuse(context, "--profile", _ONCE)
        _refuse_file(profile)
    if roofline != (output is not None):
        raise EncoreError("one of --roofline and -o DIR", expected="both: the page of a roofline is written to DIR")
    if roofline:
        _refuse(context, "--roofline", frozenset({"repeats"}))
    request = planning.Request(
        name=benchmark,
        gpus=1,
        system=system,
        round=round_name,
        data=data_folder,
        settings=tuple(settings or ()),
        python=python,
    )
    if profile is not None:
        _profile(request, profile, as_json)
        return
    if output is not None:
        _measure_roofline(request, steps, output, as_json)
        return
    counts = ("--steps", str(steps), "--repeats", str(repeats))
    with data.shown_progress(screen) as on_update:
        result = cast(Benched, programs.measure(request, "{module}.bench", counts, screen.print, on_update))
    if sheet := _of_sheet(result):
        result["sheet_flops_per_second"], result["sheet_source"] = sheet
    if as_json:
        layout.write_json("bench", result)
        return
    speed = f"{result.get('unit', 'samples')}/s"
    bare = result["measured"]["bare"]["median"]
    rows = (
        (
            entry["title"],
            *(f"{entry[key]:.1f}" for key in ("median", "least", "most")),
            None if name in ("bare", "input") else f"{entry['ratio']:.3f}",
        )
        for name, entry in result["measured"].items()
    )
    layout.show(screen, result["title"], ("measured", f"{speed}, median", "least", "most", "of the bare loop"), rows)
    screen.print(f"data stall: {result['input_share']:.1%} of the time; bare loop {bare:.1f} {speed}")
    for line in _utilization(result):
        screen.print(line)


# What the data sheet of this machine's GPU says, in the words of the result.
def _of_sheet(result: Benched) -> tuple[float, str] | None:
    gpus = node.gpus() if result["device"] == "gpu" else ()
    return peaks.peak_of(gpus[0].name, result["precision"]) if gpus else None


# Model FLOPs of the step on synthetic data, or on what there is, and their share of the measured peak.
def _utilization(result: Benched) -> Iterator[str]:
    known = {name: each for name, each in result["measured"].items() if "flops_per_second" in each}
    found = known.get("synthetic") or known.get("real")
    if found is None:
        return
    peak, unit = result["peak_flops_per_second"], result.get("unit", "samples").removesuffix("s")
    each, speed = peaks.written(found["flops_per_sample"]), peaks.written(found["flops_per_second"])
    used = f", MFU {found['flops_per_second'] / peak:.1%} of the {peaks.written(peak)}/s of a GEMM here" if peak else ""
    if sheet := result.get("sheet_flops_per_second"):
        used += f", {found['flops_per_second'] / sheet:.1%} of the {peaks.written(sheet)}/s of {result['sheet_source']}"
    data = "synthetic" if found is known.get("synthetic") else "real"
    yield f"model FLOPs: {each} a {unit} trained on; {speed}/s on {data} data{used}"


def _refuse(context: typer.Context, option: str, unused: frozenset[str]) -> None:
    names = ", ".join(f"--{name}" for name in sorted(options.given(context) & unused))
    if names:
        raise EncoreError(f"{names} with {option}", expected=f"{option} without {names}", hint="leave one of them out")


# A measurement takes minutes: what cannot be written or read afterwards is refused before.
def _refuse_file(path: Path) -> None:
    if not path.name.endswith((".json", ".json.gz")) or path.is_dir():
        found = f"{path} is a folder" if path.is_dir() else f"--profile {path}: no such kind of file"
        raise EncoreError(found, expected="a file .json or .json.gz", hint="--profile profile.json")
    if not path.absolute().parent.is_dir():
        raise EncoreError(
            f"--profile {path}: no folder {path.parent}",
            expected="a file in a folder that is there",
            hint=f"mkdir -p {path.parent}",
        )


def _measure_roofline(request: planning.Request, steps: int, folder: Path, as_json: bool) -> None:
    # Measure a step and the machine's ceilings into a folder, and show everything that is in it.
    # The lab's plots take half a second to load.
    from encore.cli.study import keep, show_report
    from encore.lab.studies import roofline, server_comparison

    words = ("--steps", str(steps), "--peaks", "gpu" if node.this_node().gpus else "cpu")
    result = _counted(request, words, as_json)
    keep(folder, roofline.PEAKS, {"peaks": roofline.fastest(result.pop("peaks"), folder / roofline.PEAKS)})
    keep(folder, f"{request.name}.json", result)
    show_report(server_comparison.roofline_report(roofline.load(folder)), folder, as_json)


def _profile(request: planning.Request, path: Path, as_json: bool) -> None:
    _counted(request, ("--steps", "1", "--trace", str(path.absolute())), as_json)
    try:
        found = kernels.read_profile(path)
    except ValueError as error:
        raise EncoreError(
            str(error),
            expected="a trace of torch.profiler",
            hint="check the free space, and profile again",
            exit_code=ExitCode.FAILED,
        ) from error
    if as_json:
        layout.write_json("precisions", {part: sorted(seen.lowest) for part, seen in found.items()})
        return
    rows = (
        (part, " or ".join(sorted(seen.lowest)) or None, seen.example or seen.unknown) for part, seen in found.items()
    )
    layout.show(layout.console(), f"precisions in {path.name}", ("part", "lowest precision", "for example"), rows)


# What the program that counts and profiles a step measured.
def _counted(request: planning.Request, words: tuple[str, ...], as_json: bool) -> dict[str, Any]:
    counted = launchers.own_framework()
    if (framework := catalogue.choose(request.name).implementation.framework) != counted:
        every = [each for each, choice in catalogue.choices().items() if choice.implementation.framework == counted]
        raise EncoreError(
            f"{request.name}: steps of {framework} are not counted",
            expected=f"a benchmark in {counted}: {', '.join(every)}",
            hint="compare its kernels by Nsight Systems: encore study report --help",
        )
    screen = layout.console(stderr=as_json)
    with data.shown_progress(screen) as on_update:
        program = "benchmarks.common.checks.roofline {module}"
        return programs.measure(request, program, words, screen.print, on_update)
