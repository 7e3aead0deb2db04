"""A benchmark's prepare.py, run in this process, and the lines that it prints."""

import contextlib
import importlib
import io
import json
import resource
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common.data.workers import Workers
from encore import paths
from tests.json_schemas import validate

Outcome = tuple[int, list[dict[str, Any]]]  # Exit code and output of --progress json
# New contents of files by name: None removes a file or folder, a function changes its content
Files = Mapping[str, Callable[[bytes], bytes] | Sequence[str] | bytes | None]


def run(benchmark: str, *words: object, limit: int = resource.RLIM_INFINITY, workers: int = 1) -> Outcome:
    # ``limit`` is the maximum size of a file; without ``workers`` this process runs all tasks
    module, printed = importlib.import_module(f"benchmarks.{benchmark}.prepare"), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    in_process = contextlib.nullcontext() if workers else mock.patch.object(Workers, "run", one_by_one)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with contextlib.redirect_stdout(printed), in_process:
            code = module.main([*map(str, words), "--workers", str(max(workers, 1)), "--progress", "json"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code, [json.loads(line) for line in printed.getvalue().splitlines()]


def one_by_one(
    self: Workers, phase: str, unit: str, function: Callable[..., Any], tasks: Sequence[Any], *options: Any
) -> None:
    for task in tasks:
        function(task, lambda *progress: None)


def ran(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    # An ended process of this checkout
    words = [*map(str, command)]
    return subprocess.run(words, **{"capture_output": True, "text": True, "cwd": paths.ROOT, "check": False, **options})


def notes(outcome: Outcome) -> str:
    # Printed notes; the command must succeed
    assert outcome[0] == 0, outcome
    return "\n".join(line["note"] for line in outcome[1] if "note" in line)


def prepared(benchmark: str, source: Path, to: Path, *words: object, **options: int) -> Path:
    # Folder of the data set; the command must succeed
    notes(run(benchmark, source, "-o", to, *words, **options))
    return to


def refused(outcome: Outcome, code: int = 2) -> str:
    # Error message; the command must exit with this code
    assert outcome[0] == code, outcome
    return " | ".join(map(str, outcome[1][-1]["error"].values()))


def write_files(folder: Path, files: Files) -> Path:
    for name, change in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = change(path.read_bytes()) if callable(change) else change
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else "".join(content).encode())
    return folder


def pack(files: Mapping[str, bytes], mode: str = "w", links: Sequence[str] = ()) -> bytes:
    # A tar of files, and of links to a file outside
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:
        for name in (*links, *files):
            entry, content = tarfile.TarInfo(name), files.get(name, b"")
            entry.size = len(content)
            if name in links:
                entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def check_refusal(benchmark: str, raw: Path, files: Files, parts: Sequence[str], *words: object) -> None:
    # Change files of the raw data, prepare it and check parts of the error message
    to = raw.with_name("to")
    options = [str(word).format(raw=raw) for word in words]
    message = refused(run(benchmark, write_files(raw, files), "-o", to, *options, workers=0))
    assert [part for part in parts if part.format(raw=raw) not in message] == [], message
    assert not (to / "dataset.json").exists()


def manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "dataset.json").read_text())
    validate("dataset", content)
    return content
