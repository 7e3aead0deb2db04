"""A new system file from a published configuration, in the form of those beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from encore.catalogue import System
from encore.errors import EncoreError
from encore.lab.submissions.reproduction import Reproduction

_HEAD = (
    "kind", "round", "system", "submitter", "submission", "framework", "source", "nodes", "gpus_per_node", "accelerator"
)  # fmt: skip


def _value(value: Any) -> str:
    """Return a value as TOML has it: lists, texts, numbers and truth values are as JSON's."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_toml(made: Reproduction, system: System) -> str:
    """Return the text of a system file."""
    title = made.implementation.title if made.implementation else made.benchmark
    ranks = f"{system.nodes} x {system.gpus_per_node} GPUs"
    lines = [f"# {title}, configuration {made.name} of {system.submitter or 'a folder'}: {ranks}.".replace("\n", " ")]
    lines += [f"{name} = {_value(getattr(system, name))}" for name in _HEAD]
    lines += ["keep_global_batch = true"] if system.keep_global_batch else []
    lines += ["", "[config]", *(f"{name} = {_value(value)}" for name, value in system.config.items())]
    for implementation, values in system.implementations.items():
        lines += ["", f"[implementations.{implementation}]"]
        lines += [f"{name} = {_value(value)}" for name, value in values.items()]
    for file, variables in system.environment.items():
        lines += ["", f"[environment.{_value(file)}]"]
        lines += [f"{name} = {_value(value)}" for name, value in variables.items()]
    return "\n".join(lines) + "\n"


def write(made: Reproduction, path: Path) -> None:
    """Write the system file; EncoreError where there is none to write, or a file is there already."""
    if made.system is None:
        raise EncoreError(f"there is no system to write: {made.refused}", expected="a configuration that maps")
    if path.exists():
        raise EncoreError(f"{path} is there already", remedy="name a new file with -o")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_toml(made, made.system), encoding="utf-8")
    except OSError as error:
        raise EncoreError(f"{path} cannot be written: {error}", remedy="name another file with -o") from error
