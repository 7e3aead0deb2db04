"""``encore report`` and ``encore archive``: runs shown, tabulated and packed for MLPerf."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typing_extensions import TypedDict

from encore.cli import options
from encore.cli.layout import console, print_result, put, reading, say, show, text, write_json
from encore.errors import EncoreError, ExitCode
from encore.lab.scaling.printed_tables import MICROWAY, findings
from encore.lab.scaling.printed_tables import tables as study_tables
from encore.lab.submissions.archive import check_package, check_trees, write_archive
from encore.lab.submissions.bundle import verify as verify_bundle
from encore.lab.submissions.bundle import write_bundle
from encore.lab.submissions.merge import merge_trees
from encore.results.compare.run_set import load_run_sets
from encore.results.format import count_of
from encore.results.report.measurements import all_tables
from encore.results.report.report import build_report, measurements, write, write_files
from encore.results.report.samples_view import DETECTIONS, KEY, Detected, Shape, image_svg, images_of
from encore.results.scores.score import existing
from encore.results.table import Table


def show_detections(run: Path, output: Path | None, as_json: bool) -> None:
    """Print the images with the best and the worst results of a run's last evaluation; draw them into ``output``."""
    images = images_of(existing(run))
    if not images:
        raise EncoreError(
            f"{run} has no detections",
            expected=f"a run of ssd or maskrcnn whose first evaluation has ended: experiment_N/{DETECTIONS}",
            hint="wait for its first evaluation, or name another run",
        )
    if output is not None:
        write({f"{image.name}.svg": image_svg(image) for image in images}, output, "pictures")
    files = [output / f"{image.name}.svg" if output is not None else None for image in images]
    if as_json:
        write_json("detections", [_as_json(image, file) for image, file in zip(images, files, strict=True)])
        return
    screen = console()
    columns = ("which", "image", "AP50", "detections", "matched", "objects")
    rows = (
        (
            image.which,
            image.file,
            f"{image.precision:.2f}",
            len(image.found),
            sum(each.matched for each in image.found),
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


class ShapeJson(TypedDict):
    """A shape in an image."""

    label: str
    box: Sequence[float]  # x, y, width and height
    has_mask: bool


class ObjectJson(ShapeJson):
    """An object of the data set."""

    crowd: bool


class DetectionJson(ShapeJson):
    """What was found."""

    score: float
    matched: bool  # Whether there is such an object


class ShownImage(TypedDict):
    """An image of a run's last evaluation."""

    which: str  # best or worst
    image: int
    file: str
    epoch: int
    precision: float  # Average precision within the image at IoU 0.5
    width: int
    height: int
    detections: list[ObjectJson | DetectionJson]
    objects: list[ObjectJson | DetectionJson]
    picture: str | None  # The file that was written


def _shape_as_json(each: Shape) -> ObjectJson | DetectionJson:
    shape: ShapeJson = {"label": each.label, "box": each.box, "has_mask": bool(each.runs)}
    if each.score is None:
        return {**shape, "crowd": each.crowd}
    return {**shape, "score": each.score, "matched": each.matched}


def _as_json(image: Detected, file: Path | None) -> ShownImage:
    return {
        "which": image.which, "image": image.image, "file": image.file, "epoch": image.epoch,
        "precision": image.precision, "width": image.width, "height": image.height,
        "detections": list(map(_shape_as_json, image.found)), "objects": list(map(_shape_as_json, image.objects)),
        "picture": str(file) if file is not None else None,
    }  # fmt: skip


def report(
    runs: options.Runs = None,
    output: options.OptionalOutput = None,
    with_: Annotated[
        str | None,
        typer.Option("--with", metavar="NAME", help="Submission to compare with; default: the nearest to each run."),
    ] = None,
    logs: options.Logs = None,
    baseline: options.Baseline = None,
    study: Annotated[
        str | None, typer.Option("--study", metavar="KEY", help="Also a study, such as microway-dgx1-scaling.")
    ] = None,
    published: Annotated[
        str | None,
        typer.Option("--published", metavar="NAME", help="Also published results with NAME in their name."),
    ] = None,
    package: Annotated[
        bool, typer.Option("--package", help="Also check each submitter's tree as a package; takes as long again.")
    ] = False,
    detections: Annotated[
        bool, typer.Option("--detections", help="Only what the detector of a run found: boxes, masks, scores.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Report runs, up to a whole round: scored, checked, audited and compared; one HTML page, Markdown, tables.

    Without -o only the tables are printed, as the studies of MLPerf have them: synopsis, speed-up, scaling, releases,
    precisions. With --detections, images of the last evaluation with the best and the worst results are listed, and
    drawn as SVG with -o.

    Examples:

      encore report results/20260101T120000Z-resnet-mxnet-dgxa100 -o report

      encore report training_results_v5.1 --package -o round

      encore report results                                    the tables alone

      encore report --published v0.7/NVIDIA/dgx --baseline v0.7/NVIDIA/dgx1_ngc20.06_mxnet --json

      encore report --study microway-dgx1-scaling -o study

      encore report results/20260101T120000Z-maskrcnn-pytorch-cpu --detections -o pictures
    """
    named = runs or []
    if detections:
        if len(named) != 1:
            raise EncoreError(f"--detections with {count_of(len(named), 'run')}", expected="one run")
        show_detections(named[0], output, as_json)
        return
    if not (runs or study or published):
        raise EncoreError("no run was named", expected="RUN..., --study KEY or --published NAME", hint="see --help")
    if output is None:
        put(_tables(named, baseline, study, published), as_json)
        return
    with reading() as on_read:
        made = build_report(
            named,
            name=with_,
            logs=logs,
            baseline=baseline,
            study=study,
            published=published,
            studied=[*study_tables(), findings()] if study == MICROWAY else [],
            packages=[each for path in named for each in check_trees(path)] if package else [],
            on_read=on_read,
        )
    files = write_files(made, output)
    if as_json:
        write_json("report", made.as_json())
        return
    if made.sections:
        print_result(made.summary)
    for each in made.packages:
        errors = sum(finding.severity == "error" for finding in each.findings)
        verdict = f"{count_of(errors, 'error')} as a package" if errors else "accepted as a package"
        style = "red" if errors else "green"
        say(console(), text(f"{each.path}: {verdict} of {each.ruleset or 'no known round'}", style))
    say(console(), text(f"{files[0]} and {len(files) - 1} more files"))


def _tables(runs: list[Path], baseline: str | None, study: str | None, published: str | None) -> list[Table]:
    sides = [side for path in runs for side in load_run_sets(path)]
    found = all_tables(measurements(sides, study, published), baseline)
    if study == MICROWAY and not runs:
        found = [*study_tables(), *(table for table in found if "Synopsis" not in table.title), findings()]
    return found


class Bundled(TypedDict):
    """A bundle that was written."""

    bundle: str
    files: int
    signed: bool


def archive(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of logs.")],
    output: options.Output,
    submitter: Annotated[str | None, typer.Option(help="Submitter; default: as the logs say.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge submission trees, unless something in them collides.")
    ] = False,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="One file of one run that encore verify checks, not a tree.")
    ] = False,
    key: Annotated[
        Path | None, typer.Option(help="With --bundle: private SSH key that signs it, or the public one of an agent.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Pack runs as MLPerf's submission tree and let mlperf-logging's package checker judge it.

    Exits with 1 where the checker finds errors, or where trees to merge collide. With --bundle one run, or one folder
    of logs, becomes a file with its hashes, its score and a signature, which `encore verify` checks.

    Examples:

      encore archive results/20260101T120000Z-resnet-mxnet-dgxa100 -o submission --submitter MyLab

      encore archive submissions/ours submissions/theirs -o round --merge

      encore archive results/20260101T120000Z-resnet-mxnet-dgxa100 -o run.tar.gz --bundle --key ~/.ssh/id_ed25519
    """
    if key is not None and not bundle:
        raise EncoreError("--key without --bundle", hint="a submission tree is not signed")
    if bundle:
        if len(runs) != 1 or merge or submitter is not None:
            raise EncoreError("--bundle with several runs, --merge or --submitter", expected="one run")
        packed_files = write_bundle(runs[0], output, key)
        if as_json:
            content: Bundled = {"bundle": str(output), "files": packed_files, "signed": key is not None}
            write_json("bundled", content)
        else:
            signed = "signed" if key is not None else "not signed: give --key"
            say(console(), text(f"{output}: {count_of(packed_files, 'file')}, {signed}"))
        return
    if merge:
        _merge(runs, output, submitter, as_json)
        return
    packed = write_archive(runs, output, submitter)
    verdicts = [check_package(package) for package in packed]
    if as_json:
        write_json("archive", [verdict.as_json() for verdict in verdicts])
    for verdict in verdicts if not as_json else ():
        screen = console()
        style = "green" if verdict.accepted else "yellow" if verdict.accepted is None else "red"
        say(screen, text(f"{verdict.package.folder}: {verdict.summary}", style))
        for line in verdict.errors:
            say(screen, text(f"  {line}"))
    if any(verdict.accepted is False for verdict in verdicts):
        raise typer.Exit(ExitCode.FAILED)


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="File that encore archive --bundle made.")],
    signers: Annotated[Path | None, typer.Option(help="Who may sign: an allowed_signers file of ssh-keygen.")] = None,
    identity: Annotated[str | None, typer.Option(help="Who has to have signed, by a name in --signers.")] = None,
    as_json: options.Json = False,
) -> None:
    """Check a bundle without a network: signature, hashes, scores computed again, and whether its files agree.

    What `encore audit` finds in its logs is listed, and is no error of the bundle. Exits with 1 where something is
    wrong with it.

    Examples:

      encore verify run.tar.gz --signers allowed_signers

      encore verify run.tar.gz --json
    """
    if identity is not None and signers is None:
        raise EncoreError("--identity without --signers", hint="name the file that has the key of that name")
    if signers is not None and not signers.is_file():
        raise EncoreError(f"there is no file {signers}", expected="an allowed_signers file of ssh-keygen")
    with reading():
        found = verify_bundle(bundle, signers, identity)
    if as_json:
        write_json("verification", found.as_json())
    else:
        screen = console()
        for each in found.findings:
            style = "red" if each.severity == "error" else "yellow"
            say(screen, text(f"{each.severity}: {each.found}; expected {each.expected}; {each.hint}", style))
        for each in found.audit:
            say(screen, text(f"audit, {each.severity}: {each.found}"))
        for score in found.scores:
            say(screen, text(f"{score['round']} {score['benchmark']}: {_time_of(score)}"))
        verdict = "as it was packed, and its files agree" if found.accepted else "not accepted"
        style = "green" if found.accepted else "red"
        say(screen, text(f"{found.name}: {count_of(found.files, 'file')}, {verdict}. {found.signer}".rstrip(), style))
    if not found.accepted:
        raise typer.Exit(ExitCode.FAILED)


def _time_of(score: Mapping[str, Any]) -> str:
    runs = count_of(len(score["runs"]), "run")
    raw, official, factor = (score.get(name) for name in ("score_minutes", "official_minutes", "scaling_factor"))
    if raw is None:
        return f"no score of {runs}: {score.get('missing')}"
    scaled = f" (raw {raw:.3f} minutes, scaling factor {factor:g})" if factor is not None else ""
    return f"official score {official if official is not None else raw:.3f} minutes of {runs}{scaled}"


def _merge(trees: list[Path], output: Path, submitter: str | None, as_json: bool) -> None:
    if submitter is not None:
        raise EncoreError("--submitter with --merge", hint="a tree has its submitter's name")
    merged = merge_trees(trees, output)
    if as_json:
        write_json("merge", merged)
    screen = console()
    for each in merged.collisions if not as_json else ():
        say(screen, text(f"{each.place}: {each.why}", "red"))
        say(screen, text(f"    in {', '.join(each.trees)}"))
        say(screen, text(f"    {each.hint}"))
    if not as_json:
        trees_of = f"{count_of(merged.files, 'file')} of {count_of(merged.trees, 'tree')}"
        collided = f"{trees_of}: {count_of(len(merged.collisions), 'collision')}, nothing was written"
        say(screen, text(collided if merged.collisions else f"{output}: {trees_of}"))
    if merged.collisions:
        raise typer.Exit(ExitCode.FAILED)
