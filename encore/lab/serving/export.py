"""An exported model: the folder that `encore export` writes, read, checked, and evaluated through a server."""

import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from encore import catalogue, files
from encore.catalogue import Choice
from encore.errors import EncoreError, unknown_name
from encore.run import programs, run_folder

ENVIRONMENT = "serving"
PASSPORT = "export.json"
EXAMPLE = "example.npz"
# Triton data types and their NumPy types (docs/user_guide/model_configuration.md, Datatypes).
TYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
AGAIN = "rewrite the folder: encore export RUN -o DIR"


PART = re.compile(r"[a-z0-9][a-z0-9_-]*")


class _Read(BaseModel):
    # Other fields are for other commands.
    model_config = ConfigDict(extra="ignore", frozen=True)


R = TypeVar("R", bound=_Read)


class Tensor(_Read):
    name: str = Field(min_length=1)
    type: str
    shape: tuple[int, ...]  # -1 where a size varies


class _Run(_Read):
    name: str = ""
    id: str = ""
    experiment: int = 0


class ExportDocument(_Read):
    """Common fields of export.json for a single model and for models with parts."""

    schema_: Literal[1] = Field(1, alias="schema")
    # Folders of models that a client calls in sequence; empty: the model is in this folder.
    parts: tuple[str, ...] = ()
    run: _Run = _Run()  # the run that it was exported from


class Export(_Read):
    """Fields of a model's export.json that the server needs."""

    schema_: Literal[1] = Field(1, alias="schema")
    name: str = Field(pattern=r"^[A-Za-z0-9_][\w.-]*$")
    format: str
    model: str = Field(pattern=r"^[A-Za-z0-9_][\w.-]*$")
    framework: str
    inputs: tuple[Tensor, ...] = Field(min_length=1)
    outputs: tuple[Tensor, ...] = Field(min_length=1)
    batched: bool  # whether the first dimension of all inputs and outputs is the batch


@dataclass(frozen=True)
class Model:
    folder: Path
    export: Export


def read(folder: Path) -> tuple[Model, ...]:
    """Return the models in ``folder``; EncoreError if it is not an export or is damaged."""
    document = _validate(ExportDocument, folder)
    for part in document.parts:
        if not PART.fullmatch(part):
            raise EncoreError(f"{folder / PASSPORT} has a part {part!r}", expected="a folder name", hint=AGAIN)
    models = tuple(Model(folder / part, _validate(Export, folder / part)) for part in document.parts or ("",))
    for model in models:
        _check(model.folder, model.export)
    return models


def _validate(kind: type[R], folder: Path) -> R:
    passport = folder / PASSPORT
    if not passport.is_file():
        raise EncoreError(
            f"{folder} is not an export" if folder.is_dir() else f"{folder} does not exist",
            expected=f"a folder with {PASSPORT}",
            hint=f"encore export RUN -o {folder}",
        )
    try:
        return kind.model_validate(files.read_json(passport))
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"])
        raise EncoreError(f"{passport}: {location}: {first['msg']}", hint=AGAIN) from error


def _check(folder: Path, export: Export) -> None:
    for tensor in (*export.inputs, *export.outputs):
        if tensor.type not in TYPES:
            raise unknown_name(f"type of {tensor.name} in {folder / PASSPORT}:", tensor.type, TYPES)
        if export.batched and not tensor.shape:
            raise EncoreError(f"{folder / PASSPORT}: {tensor.name} lacks a batch dimension", hint=AGAIN)
    if not (folder / export.model).exists():
        raise EncoreError(f"no model {folder / export.model}", expected=f"the file named in {PASSPORT}", hint=AGAIN)
    _example(folder, export)


def _example(folder: Path, export: Export) -> dict[str, np.ndarray]:
    path = folder / EXAMPLE
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise EncoreError(f"{path} cannot be read: {error}", hint=AGAIN) from error
    for tensor in (*export.inputs, *export.outputs):
        if tensor.name not in arrays:
            raise EncoreError(f"{path} lacks {tensor.name}", expected="all inputs and outputs", hint=AGAIN)
        array = arrays[tensor.name]
        has_shape = len(array.shape) == len(tensor.shape) and all(
            expected in (-1, size) for expected, size in zip(tensor.shape, array.shape, strict=True)
        )
        if not has_shape or array.dtype != TYPES[tensor.type]:
            raise EncoreError(
                f"{path}: {tensor.name} is {array.dtype} {list(array.shape)}",
                expected=f"{TYPES[tensor.type]} {list(tensor.shape)}",
                hint=AGAIN,
            )
    return arrays


def example_inputs(folder: Path, export: Export) -> dict[str, np.ndarray]:
    arrays = _example(folder, export)
    return {tensor.name: arrays[tensor.name] for tensor in export.inputs}


@dataclass(frozen=True)
class Evaluation:
    """Evaluation through the server, and the origin of the model."""

    source: Path  # the export that is served
    choice: Choice
    experiment: Path
    data: Path


def plan(source: Path, run_path: Path, data: Path | None) -> Evaluation:
    """Return an export's evaluation from its run; EncoreError if the run does not match or data are missing."""
    run = run_folder.open_run(run_path)
    passport = run.metadata()
    document = _validate(ExportDocument, source)
    if document.run.id != passport["sha256"]:
        raise EncoreError(
            f"{source} is not from {run_path}",
            expected=f"the run {document.run.name or 'that it was exported from'}",
            hint="pass that run: --evaluate RUN",
        )
    choice = catalogue.choose(passport["name"])
    experiment = programs.chosen_experiment(run, document.run.experiment)
    folder = programs.data_set(data, passport["data"], choice)
    return Evaluation(source.absolute(), choice, experiment.folder.absolute(), folder)


def evaluate(evaluation: Evaluation, url: str, on_step: Callable[[str], None]) -> dict[str, Any]:
    """Pass the evaluation set through the server at ``url`` and through the training code.

    Returns samples, largest difference, tolerance and quality. Raises EncoreError if the difference is beyond it.
    """
    variables = programs.variables_of(evaluation.choice, None, [ENVIRONMENT], on_step)
    on_step(f"sending the evaluation set of {evaluation.data} through the server")
    arguments = ("--experiment", str(evaluation.experiment), "--data", str(evaluation.data))
    served = ("--through", url, "--exported", str(evaluation.source))
    return programs.call(evaluation.choice, (*arguments, *served), variables)
