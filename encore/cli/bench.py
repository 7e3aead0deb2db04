"""``encore bench``: how fast the step is, compared with a bare loop in the framework or with the machine's ceilings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typing_extensions import NotRequired, TypedDict

from encore import catalogue, launchers
from encore.cli import data, extensions, layout, options
from encore.errors import EncoreError, ExitCode
from encore.machine import node
from encore.results import peaks
from encore.results.audit import kernels
from encore.run import planning, programs

# Options that an option does not support
_UNUSED = {
    "profile": {"roofline", "output", "steps", "repeats"},
    "project": {"roofline", "output", "profile"},
    "roofline": {"repeats"},
}


class Speed(TypedDict):
    """Speed of a loop; the bare loop is measured in the same repetition."""

    title: str
    median: float  # Units per second
    least: float
    most: float
    ratio: float | None  # To the bare loop
    flops_per_sample: NotRequired[float]  # Model FLOPs per unit
    flops_per_second: NotRequired[float]


class Benched(TypedDict):
    """How fast a step is, as benchmarks/common/checks/bench.py measures it."""

    title: str
    # True if only some layers, or the share of one of several ranks, are measured: not a speed of the benchmark
    is_part: bool
    unit: str  # Unit of the counts, such as samples or tokens
    measured: dict[str, Speed]  # By loop: bare, synthetic, real, input, evaluation
    input_share: float | None  # Data stall: fraction of the time in which the device waits for the next batch
    device: str
    precision: str
    peak_flops_per_second: float | None  # Measured with a GEMM on this machine
    sheet_flops_per_second: NotRequired[float]  # By the data sheet of the GPU
    sheet_source: NotRequired[str]


def bench(
    context: typer.Context,
    benchmark: options.Benchmark,
    system: options.System = None,
    round_name: options.Round = None,
    data_folder: options.Data = None,
    steps: Annotated[int, typer.Option(help="Number of steps per measurement.")] = 20,
    repeats: Annotated[int, typer.Option(help="Number of measurements of every kind; the median is reported.")] = 5,
    settings: options.Settings = None,
    python: options.Python = None,
    roofline: Annotated[
        bool,
        typer.Option(
            "--roofline", help="Compare the step with this machine's measured ceilings, and list its kernels."
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="With --roofline: folder to write to.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Profile a step into FILE; print the precisions in it."),
    ] = None,
    project: Annotated[
        bool,
        typer.Option("--project", help="Project the time to the target on all GPUs of the submitted --system."),
    ] = False,
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="SPEED",
            help="With --project: seconds per step, or N/s for samples/s of one GPU, instead of a measurement.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure samples/s on one GPU or all cores, and the MFU: bare loop, synthetic data, real data, input only.

    With --roofline: compare the step with the measured compute and memory ceilings, and list where the time is
    spent. Benchmarks measured into the same folder share a page, which encore study report DIR prints.

    With --project: measure one GPU's batch of a submitted system, and compare the projected time of all its GPUs
    with the published result.

    Examples:

      encore bench resnet                                   default system of this machine

      encore bench resnet --set image_size=224 --set eval_resize=256 --set depth=50 --set batch_size=16

      encore bench resnet-pytorch --roofline -o roofline

      encore bench resnet-pytorch --system h200 --project --measured 7493/s

      encore bench resnet-pytorch --profile profile.json    compared with declared precisions by encore audit
    """
    given = options.given(context)
    for option, unused in _UNUSED.items():
        names = ", ".join(f"--{name}" for name in sorted(given & unused))
        if option in given and names:
            raise EncoreError(
                f"{names} with --{option}", expected=f"--{option} without {names}", hint="omit one of the options"
            )
    if measured is not None and not project:
        raise EncoreError("--measured without --project", expected="both options")
    if roofline != (output is not None):
        raise EncoreError(
            "--roofline and -o DIR require each other", expected="both: --roofline writes its page to DIR"
        )
    request = planning.Request(
        name=benchmark,
        gpus=1,
        system=system,
        round=round_name,
        data=data_folder,
        settings=tuple(settings or ()),
        python=python,
    )
    counts = ("--steps", str(steps), "--repeats", str(repeats))
    if profile is not None:
        _profile(request, profile, as_json)
    elif output is not None:
        arguments = (*counts[:2], "--peaks", "gpu" if node.this_node().gpus else "cpu")
        extensions.load("bench --roofline")(request.name, _counted(request, arguments, as_json), output, as_json)
    elif project:
        _project(request, measured, counts, as_json)
    else:
        _bench(request, counts, as_json)


def _bench(request: planning.Request, counts: tuple[str, ...], as_json: bool) -> None:
    result = cast(Benched, _measure(request, "{module}.bench", counts, as_json))
    gpus = node.gpus() if result["device"] == "gpu" else ()
    if gpus and (sheet := peaks.peak_of(gpus[0].name, result["precision"])):
        result["sheet_flops_per_second"], result["sheet_source"] = sheet
    if as_json:
        layout.write_json("bench", result)
        return
    screen, speed = layout.console(), f"{result.get('unit', 'samples')}/s"
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


# Without a GPU, the toy configuration is measured: its speed is shown, and not projected.
def _project(request: planning.Request, speed_text: str | None, counts: tuple[str, ...], as_json: bool) -> None:
    submitted, gpus = extensions.load("bench --project")(request), node.gpus()
    if speed_text is not None:
        speed = submitted.parse_speed(speed_text)
    else:
        settings = submitted.settings_for(gpus, request.settings) if gpus else request.settings
        on_one = replace(request, settings=settings, system=request.system if gpus else None)
        speed = submitted.read_bench(_measure(on_one, "{module}.bench", counts, as_json), gpus)
    projected = submitted.project(speed)
    if as_json:
        layout.write_json("projection", projected)
        return
    screen, title = layout.console(), f"{projected['published']} from one GPU"
    layout.show(screen, title, ("quantity", "value", "90 % interval"), _projection_rows(projected))
    if projected["note"]:
        screen.print(projected["note"])
    screen.print(
        f"{projected['calibration_pairs']} published pairs on different numbers of GPUs; "
        "the interval does not contain differences between implementations"
    )


def _projection_rows(projected: Mapping[str, Any]) -> Sequence[tuple[str, str | None, str | None]]:
    def number(key: str, form: str, factor: float = 1.0) -> str | None:
        return None if projected[key] is None else form.format(projected[key] * factor)

    def interval(key: str, form: str, factor: float = 1.0) -> str | None:
        return projected[key] and form.format(*(bound * factor for bound in projected[key]))

    split = "".join(f", {key.removesuffix('_parallelism')} {ranks}" for key, ranks in projected["parallelism"].items())
    hidden = f"{projected['overlap']:.0%} of {number('allreduce_s', '{:,.1f} ms', 1e3)} all-reduce hidden"
    return (
        (
            "samples of a GPU per step",
            f"{projected['samples_per_gpu']:g} of {projected['global_batch']} on {projected['gpus']} GPUs{split}",
            None,
        ),
        ("samples/s of one GPU", number("samples_per_second", "{:,.4g}"), None),
        ("needed for the published time", number("needed_samples_per_second", "{:,.4g}"), None),
        ("compute", number("compute_s", "{:,.1f} ms", 1e3), None),
        ("communication", f"{number('exposed_s', '{:,.1f} ms', 1e3)}, {hidden}", None),
        (
            "step",
            number("step_s", "{:,.1f} ms", 1e3),
            interval("step_interval_s", "{:,.4g} to {:,.4g} ms", 1e3),
        ),
        (
            f"to the target, {projected['public_sets']} public sets",
            f"{projected['samples_to_target']:,.0f} samples, {projected['steps']:,.0f} steps",
            None,
        ),
        ("start", number("start_s", "{:,.1f} s"), None),
        (f"{projected['evaluations']:.3g} evaluations", number("evaluate_s", "{:,.1f} s"), None),
        (
            "projected",
            projected["minutes"] and f"{projected['minutes']:,.4g} min ({projected['ratio']:.2f}x)",
            interval("interval_minutes", "{:,.4g} to {:,.4g} min"),
        ),
        ("published", number("published_minutes", "{:,.4g} min"), None),
    )


# Model FLOPs and utilization, with synthetic data if measured, else with real data.
def _utilization(result: Benched) -> Iterator[str]:
    loops = {name: speed for name, speed in result["measured"].items() if "flops_per_second" in speed}
    speed_entry = loops.get("synthetic") or loops.get("real")
    if speed_entry is None:
        return
    peak, unit = result["peak_flops_per_second"], result.get("unit", "samples").removesuffix("s")
    flops, speed = peaks.written(speed_entry["flops_per_sample"]), peaks.written(speed_entry["flops_per_second"])
    utilization = (
        f", MFU {speed_entry['flops_per_second'] / peak:.1%} of the {peaks.written(peak)}/s of a GEMM here"
        if peak
        else ""
    )
    if sheet := result.get("sheet_flops_per_second"):
        fraction = speed_entry["flops_per_second"] / sheet
        utilization += f", {fraction:.1%} of the {peaks.written(sheet)}/s of {result['sheet_source']}"
    data = "synthetic" if speed_entry is loops.get("synthetic") else "real"
    yield f"model FLOPs: {flops} a {unit} trained on; {speed}/s on {data} data{utilization}"


# A measurement takes minutes, so unusable output paths are rejected at the start.
def _profile(request: planning.Request, path: Path, as_json: bool) -> None:
    if not path.name.endswith((".json", ".json.gz")) or path.is_dir():
        problem = f"{path} is a folder" if path.is_dir() else f"--profile {path}: unsupported file type"
        raise EncoreError(problem, expected="a .json or .json.gz file", hint="--profile profile.json")
    if not path.absolute().parent.is_dir():
        raise EncoreError(
            f"--profile {path}: no folder {path.parent}",
            expected="a file in an existing folder",
            hint=f"mkdir -p {path.parent}",
        )
    _counted(request, ("--steps", "1", "--trace", str(path.absolute())), as_json)
    try:
        precisions = kernels.read_profile(path)
    except ValueError as error:
        raise EncoreError(
            str(error),
            expected="a trace of torch.profiler",
            hint="check the free space, then repeat the profile",
            exit_code=ExitCode.FAILED,
        ) from error
    if as_json:
        layout.write_json("precisions", {part: sorted(precision.lowest) for part, precision in precisions.items()})
        return
    rows = (
        (part, " or ".join(sorted(precision.lowest)) or None, precision.example or precision.unknown)
        for part, precision in precisions.items()
    )
    layout.show(layout.console(), f"precisions in {path.name}", ("part", "lowest precision", "for example"), rows)


# Run the program that counts FLOPs and profiles a step.
def _counted(request: planning.Request, arguments: tuple[str, ...], as_json: bool) -> dict[str, Any]:
    framework_name = launchers.own_framework()
    if (framework := catalogue.choose(request.name).implementation.framework) != framework_name:
        supported = [
            name for name, choice in catalogue.choices().items() if choice.implementation.framework == framework_name
        ]
        raise EncoreError(
            f"{request.name}: steps of {framework} are not counted",
            expected=f"a benchmark in {framework_name}: {', '.join(supported)}",
            hint="compare the kernels with Nsight Systems: encore study report --help",
        )
    return _measure(request, "benchmarks.common.checks.roofline {module}", arguments, as_json)


def _measure(request: planning.Request, program: str, arguments: tuple[str, ...], as_json: bool) -> dict[str, Any]:
    screen = layout.console(stderr=as_json)
    with data.shown_progress(screen) as on_update:
        return programs.measure(request, program, arguments, screen.print, on_update)
