"""``encore report --detections``: images of a run's last evaluation, drawn."""

from pathlib import Path
from typing import Any

from encore.cli.layout import console, say, show, text, write_json
from encore.errors import EncoreError, ExitCode
from encore.results.report.shown import DETECTIONS, KEY, Detected, drawing, images_of
from encore.results.scores.score import existing


def show_detections(run: Path, output: Path | None, as_json: bool) -> None:
    """Print the images with the best and the worst results of a run's last evaluation; draw them into ``output``."""
    images = images_of(existing(run))
    if not images:
        raise EncoreError(
            f"{run} has no detections",
            expected=f"a run of ssd or maskrcnn whose first evaluation has ended: experiment_N/{DETECTIONS}",
            hint="wait for its first evaluation, or name another run",
        )
    files = _write(images, output) if output is not None else [None] * len(images)
    if as_json:
        write_json([_as_json(image, file) for image, file in zip(images, files, strict=True)])
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


def _write(images: list[Detected], folder: Path) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for image in images:
            files.append(folder / f"{image.name}.svg")
            files[-1].write_text(drawing(image), encoding="utf-8", errors="replace")
    except OSError as error:
        raise EncoreError(
            f"the pictures cannot be written to {folder}: {error.strerror or error}",
            hint="give a folder that you may write to: -o DIR",
            exit_code=ExitCode.FAILED,
        ) from error
    return files


def _as_json(image: Detected, file: Path | None) -> dict[str, Any]:
    shapes = {
        name: [
            {"label": each.label, "box": each.box, "has_mask": bool(each.runs)}
            | ({"crowd": each.crowd} if each.score is None else {"score": each.score, "matched": each.matched})
            for each in listed
        ]
        for name, listed in (("detections", image.found), ("objects", image.objects))
    }
    return {
        "which": image.which, "image": image.image, "file": image.file, "epoch": image.epoch,
        "precision": image.precision, "width": image.width, "height": image.height, **shapes,
        "picture": str(file) if file is not None else None,
    }  # fmt: skip
