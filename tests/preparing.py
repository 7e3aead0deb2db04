"""The command line of a benchmark's prepare.py, run as a process, and what it reports."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def notes(lines: Lines) -> str:
    return "\n".join(line.get("note", "") for line in lines)


def passport(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "dataset.json").read_text())
    return content
