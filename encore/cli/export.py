"""``encore export``: export a trained model for serving."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typing_extensions import NotRequired, TypedDict

from encore.cli import options
from encore.cli.layout import console, say, show, text, write_json
from encore.run import programs


class ExportedValue(TypedDict):
    """An input or output."""

    name: str
    type: str
    shape: list[int]  # -1 where a size varies
    about: str


class ExportCheck(TypedDict):
    """Comparison of the exported model with the training code on the evaluation set."""

    samples: int
    largest_difference: float
    tolerance: float
    turned: NotRequired[int]
    quality: NotRequired[dict[str, float]]  # Of the exported model


class ExportedFrom(TypedDict):
    name: str  # Of the run folder
    id: str  # `sha256` of run.json
    experiment: int


class ExportedData(TypedDict):
    name: str
    id: str


class ExportedPart(TypedDict):
    """An exported model, or one of its parts."""

    model: str  # File name
    inputs: list[ExportedValue]
    outputs: list[ExportedValue]
    batched: bool  # Whether the first dimension of all inputs and outputs is the batch
    preprocessing: dict[str, Any]
    checked: ExportCheck


class Exported(TypedDict):
    """Fields of export.json for all parts."""

    schema: int  # Version of this format
    name: str
    benchmark: str
    implementation: str
    round: str
    framework: str
    run: ExportedFrom
    commit: str | None
    uncommitted_sha256: str | None
    format: str
    data: ExportedData
    step: int
    quality: dict[str, float]  # Of the run
    reached: bool  # Whether the target was reached


class ExportedModel(Exported, ExportedPart):
    """An exported model."""


class ExportedParts(Exported):
    """An exported model whose parts a client calls in sequence."""

    parts: dict[str, ExportedPart]
    checked: ExportCheck  # Check of the part closest to its tolerance


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with a checkpoint.")],
    output: options.Output,
    format_name: Annotated[
        str | None, typer.Option("--format", help="onnx, torch-export or saved-model; default: the framework's first.")
    ] = None,
    experiment: Annotated[
        int | None, typer.Option(help="Experiment to export. Default: the first that reached the target.")
    ] = None,
    below_target: Annotated[
        bool, typer.Option("--below-target", help="Export a model that did not reach the target.")
    ] = False,
    data_folder: Annotated[
        Path | None, typer.Option("--data", help="Data set of the run; default: where the run had it.")
    ] = None,
    python: options.Python = None,
    as_json: options.Json = False,
) -> None:
    """Write a trained model for a server, and check it against the training code on the evaluation set.

    Examples:

      encore export results/20260101T120000Z-ncf-pytorch-cpu -o models/ncf

      encore export results/20260101T120000Z-resnet-pytorch-cpu -o models/resnet --format torch-export

      encore export results/20260101T120000Z-resnet-pytorch-cpu -o models/resnet --below-target
    """
    screen = console(stderr=as_json)
    request = programs.Export(
        run=run,
        to=output,
        format=format_name,
        experiment=experiment,
        below_target=below_target,
        data=data_folder,
        python=python,
    )
    content = programs.export(request, lambda step: say(screen, text(step)))
    if as_json:
        write_json("export", content)
        return
    for part, model in content.get("parts", {"": content}).items():
        title = " ".join(filter(None, (content["name"], part, "as", content["format"])))
        rows = (
            (
                kind,
                value["name"],
                value["type"],
                " x ".join("any" if size < 0 else str(size) for size in value["shape"]) or "one number",
                value["about"],
            )
            for kind in ("input", "output")
            for value in model[f"{kind}s"]
        )
        show(screen, title, ("", "name", "type", "shape", "meaning"), rows)
    for line in _summary(content):
        say(screen, text(line))
    say(screen, text(f"in {output}"))


def _summary(content: dict[str, Any]) -> list[str]:
    checked = content["checked"]
    checks = {f"{name} ": part["checked"] for name, part in content.get("parts", {}).items()} or {"": checked}
    lines = [
        f"{name}checked on {check['samples']} evaluation samples: "
        f"largest difference {check['largest_difference']:.2g}, tolerance {check['tolerance']:.2g}"
        for name, check in checks.items()
    ]
    through = {name: f", of the exported model {value:.5g}" for name, value in checked.get("quality", {}).items()}
    qualities = (f"{name}: of the run {value:.5g}{through.get(name, '')}" for name, value in content["quality"].items())
    return [*lines, *qualities, *([] if content["reached"] else ["the model did not reach the target"])]
