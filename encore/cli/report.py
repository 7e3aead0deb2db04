"""``encore report``: tables and pages of runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from encore.cli import extensions, options
from encore.cli.layout import console, print_result, put, reading, say, show, text, write_json
from encore.errors import EncoreError
from encore.results.compare.run_set import load_run_sets
from encore.results.format import count_of
from encore.results.report.measurements import all_tables, measurement_of
from encore.results.report.report import build_report, measurements, write, write_files
from encore.results.report.samples_view import DETECTIONS, KEY, Shape, image_svg, images_of
from encore.results.scores.score import existing
from encore.results.table import Table


def show_detections(run: Path, output: Path | None, as_json: bool) -> None:
    """Print the images with the best and worst detections of the last evaluation, and draw them to ``output``."""
    images = images_of(existing(run))
    if not images:
        raise EncoreError(
            f"{run} does not contain detections",
            expected=f"a run of ssd or maskrcnn with a finished evaluation: experiment_N/{DETECTIONS}",
            hint="wait for the first evaluation, or use a different run",
        )
    if output is not None:
        write({f"{image.name}.svg": image_svg(image) for image in images}, output, "pictures")
    files = [output / f"{image.name}.svg" if output is not None else None for image in images]
    if as_json:
        content = [
            {
                **image.model_dump(exclude={"jpeg", "found", "objects"}),
                "detections": list(map(_shape_as_json, image.found)),
                "objects": list(map(_shape_as_json, image.objects)),
                "picture": file,
            }
            for image, file in zip(images, files, strict=True)
        ]
        write_json("detections", content)
        return
    screen = console()
    columns = ("which", "image", "AP50", "detections", "matched", "objects")
    rows = (
        (
            image.which,
            image.file,
            f"{image.precision:.2f}",
            len(image.found),
            sum(match.matched for match in image.found),
            len(image.objects),
        )
        for image in images
    )
    show(screen, f"detections after epoch {images[0].epoch}", columns, rows)
    say(screen, text("AP50: average precision within the image at IoU 0.5, no quality of the run", "dim"))
    if output is not None:
        say(screen, text(f"{len(images)} pictures in {output}. {KEY}"))
    else:
        say(screen, text("-o DIR writes the pictures"))


def _shape_as_json(shape: Shape) -> dict[str, Any]:
    left_out = {"runs", "crowd"} if shape.score is not None else {"runs", "score", "matched"}
    return {**shape.model_dump(exclude=left_out), "has_mask": bool(shape.runs)}


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN...", help="Run folders, log folders, or folders that contain them."),
    ] = None,
    output: options.OptionalOutput = None,
    with_: Annotated[
        str | None,
        typer.Option(
            "--with", metavar="NAME", help="Submission to compare with. Default: the nearest submission of each run."
        ),
    ] = None,
    logs: options.Logs = None,
    baseline: options.Baseline = None,
    study: Annotated[
        str | None, typer.Option("--study", metavar="KEY", help="Also a study, such as microway-dgx1-scaling.")
    ] = None,
    published: Annotated[
        str | None,
        typer.Option("--published", metavar="NAME", help="Include published results with NAME in their name."),
    ] = None,
    package: Annotated[
        bool, typer.Option("--package", help="Check the tree of each submitter as a package (doubles the time).")
    ] = False,
    detections: Annotated[
        bool, typer.Option("--detections", help="Only list detections: boxes, masks, scores.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Report runs or a complete round as HTML, Markdown and tables: scores, checks, audit and comparison.

    Without -o, only print the tables: synopsis, speed-up, scaling, releases, precisions. With --detections, list the
    images with the best and worst results of the last evaluation; with -o, draw them as SVG.

    Examples:

      encore report results/20260101T120000Z-resnet-mxnet-dgxa100 -o report

      encore report training_results_v5.1 --package -o round

      encore report results                                    only the tables

      encore report --published v0.7/NVIDIA/dgx --baseline v0.7/NVIDIA/dgx1_ngc20.06_mxnet --json

      encore report --study microway-dgx1-scaling -o study

      encore report results/20260101T120000Z-maskrcnn-pytorch-cpu --detections -o pictures
    """
    run_paths = runs or []
    if detections:
        if len(run_paths) != 1:
            raise EncoreError(f"--detections with {count_of(len(run_paths), 'run')}", expected="one run")
        show_detections(run_paths[0], output, as_json)
        return
    if not (runs or study or published):
        raise EncoreError("no run was named", expected="RUN..., --study KEY or --published NAME", hint="see --help")
    if output is None:
        put(_tables(run_paths, baseline, study, published), as_json)
        return
    with reading() as on_read:
        report_files = build_report(
            run_paths,
            name=with_,
            logs=logs,
            baseline=baseline,
            study=study,
            published=published,
            studied=extensions.load("report --study")(study) if study else [],
            packages=[tree for path in run_paths for tree in extensions.load("report --package")(path)]
            if package
            else [],
            on_read=on_read,
        )
    files = write_files(report_files, output)
    if as_json:
        write_json("report", report_files.as_json())
        return
    if report_files.sections:
        print_result(report_files.summary, least=("benchmark",), name="run")  # Names of runs contain it
    for checked in report_files.packages:
        errors = sum(finding.severity == "error" for finding in checked.findings)
        verdict = f"{count_of(errors, 'error')} as a package" if errors else "accepted as a package"
        style = "red" if errors else "green"
        say(console(), text(f"{checked.path}: {verdict} of {checked.ruleset or 'no known round'}", style))
    say(console(), text(f"{files[0]} and {len(files) - 1} more files"))


def _tables(runs: list[Path], baseline: str | None, study: str | None, published: str | None) -> list[Table]:
    sides = [run_set for path in runs for run_set in load_run_sets(path)]
    tables = all_tables(measurements(sides, study, published), baseline)
    rows = tuple((side.label, measurement_of(side).system) for side in sides if side.passport)
    tables = [*([Table(title="Runs", columns=("run", "system"), rows=rows)] if rows else []), *tables]
    if study and not runs and (printed := extensions.load("report --study")(study)):
        tables = [*printed[:-1], *(table for table in tables if "Synopsis" not in table.title), printed[-1]]
    return tables
