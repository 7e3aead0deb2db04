"""Atomic file writes, and the facts of finished preparation parts."""

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Iterator


@contextmanager
def in_one_step(path: Path, durable: bool = False) -> Iterator[BinaryIO]:
    """Write a file atomically; a killed process leaves a file with its process id as suffix.

    Args:
        path: readers see the old file or the complete new one.
        durable: sync to disk, so that the file survives a crash of the machine.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        yield file
        if durable:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)


def write_facts(path: Path, facts: Any) -> None:
    with in_one_step(path) as file:
        file.write(json.dumps(facts).encode())


def read_facts(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def allocate(path: Path, size: int) -> None:
    """Extend a file to ``size`` bytes of zeros that the disk has room for.

    Without room for all of it, a write through a memory map would kill the process.
    """
    with path.open("ab") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
