"""A Triton model repository with one export, and what a client of it needs next to it.

FOLDER/model_repository/NAME/config.pbtxt
FOLDER/model_repository/NAME/VERSION/MODEL      and model.py, for the Python backend
FOLDER/model_repository/NAME/warmup/INPUT       a sample to warm up with
FOLDER/client.py, export.json, example.npz      python client.py asks the server

A model in parts has a model of the repository, and a folder for its client, for each of them.
"""

import filecmp
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from encore import paths
from encore.errors import EncoreError
from encore.lab.serving.export import EXAMPLE, PASSPORT, Model, example_inputs
from encore.lab.serving.model_config import PYTHON_BACKEND, Backend, Settings, config_text, largest_batch, warm_up_file

SERVED = paths.BENCHMARKS / "common" / "serving"  # code that runs in the server and its clients


@dataclass(frozen=True)
class Repository:
    """What was written, or would be."""

    folder: Path
    name: str
    version: int

    @property
    def models(self) -> Path:
        """What ``--model-repository`` names."""
        return self.folder / "model_repository"

    @property
    def model(self) -> Path:
        """Folder of the model with all of its versions."""
        return self.models / self.name


def plan(model: Model, folder: Path) -> Repository:
    """Return the repository that `write` makes: a model that is not in it yet gets the next number."""
    if folder.exists() and not folder.is_dir():
        raise EncoreError(f"{folder} is no folder", hint="-o FOLDER, a new one or an earlier repository")
    name, file = model.export.name, model.export.model
    versions = folder / "model_repository" / name
    numbers = sorted(int(path.name) for path in versions.glob("*") if path.name.isdigit())
    if numbers and _is_same(model.folder / file, versions / str(numbers[-1]) / file):
        return Repository(folder, name, numbers[-1])
    return Repository(folder, name, (numbers[-1] if numbers else 0) + 1)


def client_folder(source: Path, model: Model, folder: Path) -> Path:
    """Return where a client of a model of the export ``source`` finds its passport and example."""
    return folder / model.folder.relative_to(source)


def write(
    source: Path, models: Sequence[Model], planned: Sequence[Repository], backend: Backend, settings: Settings
) -> None:
    """Write what `plan` returned for each model of ``source``; EncoreError if the disk does not take it."""
    folder = planned[0].folder
    try:
        for model, repository in zip(models, planned, strict=True):
            _write_model(model, repository, backend, settings)
            place = client_folder(source, model, folder)
            place.mkdir(exist_ok=True)
            for name in (PASSPORT, EXAMPLE):
                shutil.copyfile(model.folder / name, place / name)
        shutil.copyfile(source / PASSPORT, folder / PASSPORT)
        shutil.copyfile(SERVED / "client.py", folder / "client.py")
    except OSError as error:
        raise EncoreError(f"{folder} cannot be written: {error}", hint="-o FOLDER") from error


def _write_model(model: Model, repository: Repository, backend: Backend, settings: Settings) -> None:
    version = repository.model / str(repository.version)
    version.mkdir(parents=True, exist_ok=True)
    # A large model has its weights in files of their own, named after it.
    for path in sorted(model.folder.glob(f"{model.export.model}*")):
        _link(path, version / path.name)
    if backend.name == PYTHON_BACKEND:
        shutil.copyfile(SERVED / "model.py", version / "model.py")
    inputs = example_inputs(model.folder, model.export)
    warm_up = repository.model / "warmup"
    warm_up.mkdir(exist_ok=True)
    rows = slice(0, 1) if largest_batch(model.export, settings) else slice(None)
    for number, values in enumerate(inputs.values()):
        (warm_up / warm_up_file(number)).write_bytes(values[rows].tobytes())
    text = config_text(model.export, backend, settings, inputs)
    (repository.model / "config.pbtxt").write_text(text, encoding="ascii")


def _is_same(one: Path, other: Path) -> bool:
    if one.is_dir() and other.is_dir():
        compared = filecmp.dircmp(one, other)
        names = [path.relative_to(one) for path in one.rglob("*") if path.is_file()]
        return not (compared.left_only or compared.right_only) and not any(
            filecmp.cmpfiles(one, other, map(str, names), shallow=False)[1:]
        )
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _link(source: Path, target: Path) -> None:
    # Link a file or folder, or copy it from another disk; a container sees no symbolic link's target.
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link_file, dirs_exist_ok=True)
    else:
        _link_file(str(source), str(target))


def _link_file(source: str, target: str) -> None:
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
