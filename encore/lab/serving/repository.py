"""Triton model repository for an export, and files for its clients.

FOLDER/model_repository/NAME/config.pbtxt       Triton configuration (docs/user_guide/model_configuration.md)
FOLDER/model_repository/NAME/VERSION/MODEL      and model.py, for the Python backend
FOLDER/model_repository/NAME/warmup/INPUT       warm-up sample
FOLDER/client.py, export.json, example.npz      python client.py queries the server

For an export with parts, each part has a model in the repository and a client folder.
"""

import filecmp
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from encore import paths
from encore.errors import EncoreError
from encore.lab.serving.export import EXAMPLE, PASSPORT, Export, Model, example_inputs

SERVED = paths.BENCHMARKS / "common" / "serving"  # code for the server and its clients
PYTHON_BACKEND = "python"


def _quote(text: str) -> str:
    # Bytes are literal, escaped, or three octal digits (Text Format Language Specification, String).
    plain = {byte: chr(byte) for byte in range(32, 127)} | {ord(char): f"\\{char}" for char in '"\\'}
    return f'"{"".join(plain.get(byte, f"{chr(92)}{byte:03o}") for byte in text.encode())}"'


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    keep_trailing_newline=True,
)  # fmt: skip
_TEMPLATES.filters["quoted"] = _quote


@dataclass(frozen=True, kw_only=True)
class Settings:
    max_batch: int = 32  # maximum batch size
    delay_us: int = 100  # maximum queueing delay of a request in microseconds (dynamic batching)
    instances: int = 1  # model instances per GPU, or per machine without GPUs
    device: str = "cpu"


@dataclass(frozen=True)
class Backend:
    name: str
    platform: str = ""


def largest_batch(export: Export, settings: Settings) -> int:
    """Return ``max_batch_size``; 0 where requests cannot be put together: the export has a fixed batch or none."""
    varies = all(tensor.shape[:1] == (-1,) for tensor in (*export.inputs, *export.outputs))
    return settings.max_batch if export.batched and varies else 0


def config_text(
    export: Export, backend: Backend, settings: Settings, samples: Mapping[str, np.ndarray] | None = None
) -> str:
    """Return config.pbtxt; ``samples`` are inputs to warm up with."""
    return _TEMPLATES.get_template("config.pbtxt.j2").render(
        export=export, backend=backend, settings=settings, samples=samples, batch=largest_batch(export, settings),
        warm_up_file=warm_up_file,
    )  # fmt: skip


def warm_up_file(number: int) -> str:
    """Return the file name for a warm-up input; input names may not be valid file names."""
    return f"input_{number}"


# -- the folder ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repository:
    folder: Path
    name: str
    version: int

    @property
    def models(self) -> Path:
        return self.folder / "model_repository"

    @property
    def model(self) -> Path:
        return self.models / self.name


def plan(model: Model, folder: Path) -> Repository:
    """Return the repository that `write` makes: a model that is not in it yet gets the next number."""
    if folder.exists() and not folder.is_dir():
        raise EncoreError(f"{folder} is not a directory", hint="-o FOLDER, a new one or an earlier repository")
    name, file = model.export.name, model.export.model
    versions = folder / "model_repository" / name
    last = max((int(path.name) for path in versions.glob("*") if path.name.isdigit()), default=0)
    is_in_last = _is_same(model.folder / file, versions / str(last) / file)
    return Repository(folder, name, last if is_in_last else last + 1)


def client_folder(source: Path, model: Model, folder: Path) -> Path:
    """Return the folder where a model client finds export.json and the example of the export ``source``."""
    return folder / model.folder.relative_to(source)


def write(
    source: Path, models: Sequence[Model], planned: Sequence[Repository], backend: Backend, settings: Settings
) -> None:
    """Write the output of `plan` for all models of ``source``; EncoreError if writing fails."""
    folder = planned[0].folder
    try:
        for model, repository in zip(models, planned, strict=True):
            _write_model(model, repository, backend, settings)
            client_dir = client_folder(source, model, folder)
            client_dir.mkdir(exist_ok=True)
            for name in (PASSPORT, EXAMPLE):
                shutil.copyfile(model.folder / name, client_dir / name)
        shutil.copyfile(source / PASSPORT, folder / PASSPORT)
        shutil.copyfile(SERVED / "client.py", folder / "client.py")
    except OSError as error:
        raise EncoreError(f"{folder} cannot be written: {error}", hint="-o FOLDER") from error


def _write_model(model: Model, repository: Repository, backend: Backend, settings: Settings) -> None:
    version = repository.model / str(repository.version)
    version.mkdir(parents=True, exist_ok=True)
    # Large models have separate weight files, named after the model.
    for path in sorted(model.folder.glob(f"{model.export.model}*")):
        # A container sees no symbolic link's target.
        if path.is_dir():
            shutil.copytree(path, version / path.name, copy_function=_link, dirs_exist_ok=True)
        else:
            _link(path, version / path.name)
    if backend.name == PYTHON_BACKEND:
        shutil.copyfile(SERVED / "model.py", version / "model.py")
    inputs, warm_up = example_inputs(model.folder, model.export), repository.model / "warmup"
    warm_up.mkdir(exist_ok=True)
    rows = slice(0, 1) if largest_batch(model.export, settings) else slice(None)
    for number, values in enumerate(inputs.values()):
        (warm_up / warm_up_file(number)).write_bytes(values[rows].tobytes())
    config = config_text(model.export, backend, settings, inputs)
    (repository.model / "config.pbtxt").write_text(config, encoding="ascii")


def _is_same(first: Path, second: Path) -> bool:
    if first.is_dir() and second.is_dir():
        compared = filecmp.dircmp(first, second)
        names = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
        return not (compared.left_only or compared.right_only) and not any(
            filecmp.cmpfiles(first, second, map(str, names), shallow=False)[1:]
        )
    return first.is_file() and second.is_file() and filecmp.cmp(first, second, shallow=False)


def _link(source: str | Path, target: str | Path) -> None:
    # Hard link, or copy from a different disk.
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
