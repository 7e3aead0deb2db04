"""The command line of a benchmark's prepare.py, run as a process, and what it reports."""

import importlib
import io
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common.data.workers import Workers
from encore import paths

Lines = list[dict[str, Any]]  # What --progress json prints


def run(benchmark: str, *words: object, before: str = "", limit: int | None = None) -> tuple[int, Lines]:
    driver = f"import sys\nfrom benchmarks.{benchmark} import prepare\n{before}\n"
    driver += "if __name__ == '__main__':\n    sys.exit(prepare.main(sys.argv[1:]))\n"

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-c", driver, *map(str, (*words, "--workers", 1, "--progress", "json"))]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False, preexec_fn=restrict)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def one_by_one(
    self: Workers, phase: str, unit: str, function: Callable[..., Any], tasks: Sequence[Any], *more: Any
) -> None:
    for task in tasks:
        function(task, lambda *done: None)


def here(benchmark: str, *words: object, code: int = 0) -> str:
    """Run it in this process, and its workers' tasks one after the other; return what it reports."""
    program = importlib.import_module(f"benchmarks.{benchmark}.prepare")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    output = io.StringIO()
    try:
        with redirect_stdout(output), mock.patch.object(Workers, "run", one_by_one):
            found = program.main([*map(str, words), "--progress", "json"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert found == code, output.getvalue()
    return output.getvalue()


def notes(lines: Lines) -> str:
    return "\n".join(line.get("note", "") for line in lines)


def passport(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "dataset.json").read_text())
    return content
