"""A benchmark's prepare.py, run in this process, and the lines that it prints."""

import contextlib
import importlib
import io
import json
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common.data.workers import Workers
from tests.json_schemas import validate

Lines = list[dict[str, Any]]  # Output of --progress json


def called(benchmark: str, *words: object) -> tuple[int, str]:
    module, printed = importlib.import_module(f"benchmarks.{benchmark}.prepare"), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.redirect_stdout(printed):
            code: int = module.main([*map(str, words), "--progress", "json"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code, printed.getvalue()


def run(benchmark: str, *words: object, limit: int = resource.RLIM_INFINITY, workers: int = 1) -> tuple[int, Lines]:
    # Returns the exit code and the lines; ``limit`` is the maximum size of a file
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        code, printed = called(benchmark, *words, "--workers", workers)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return code, [json.loads(line) for line in printed.splitlines()]


def refused(outcome: tuple[int, Lines]) -> str:
    assert outcome[0] == 2, outcome
    return " | ".join(outcome[1][-1]["error"].values())


def one_by_one(
    self: Workers, phase: str, unit: str, function: Callable[..., Any], tasks: Sequence[Any], *options: Any
) -> None:
    for task in tasks:
        function(task, lambda *progress: None)


def here(benchmark: str, *words: object, code: int = 0) -> str:
    # Runs the tasks of the workers in this process
    with mock.patch.object(Workers, "run", one_by_one):
        exit_code, printed = called(benchmark, *words)
    assert exit_code == code, printed
    return printed


def notes(lines: Lines) -> str:
    return "\n".join(line.get("note", "") for line in lines)


def manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "dataset.json").read_text())
    validate("dataset", content)
    return content
