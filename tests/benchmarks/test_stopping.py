"""How a training's process ends: with its own exit code, whatever still runs in it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from encore import paths

PROGRAM = """
import atexit, os, sys
from pathlib import Path
from benchmarks.common.run.stopping import Heartbeat, end_process

class HeldByAThread:
    "Stands for what a framework's thread gives back: Python is gone when its turn comes."
    def __del__(self):
        os.abort()

held = HeldByAThread()
atexit.register(lambda: print("left the other ranks"))
heartbeat = Heartbeat(Path(sys.argv[1]), 0)

def main():
    {body}

{end}
"""


def ended(folder: Path, body: str, end: str = "end_process(main)") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(body=body, end=end)
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=paths.ROOT, check=False)


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        pytest.param("return 0", 0, "", id="done"),
        pytest.param("raise SystemExit(2)", 2, "", id="refused"),
        pytest.param("raise SystemExit", 0, "", id="left"),
        pytest.param("raise SystemExit('found that, do this')", 1, "found that, do this\n", id="said"),
        pytest.param("raise OSError('disk')", 1, "OSError: disk\n", id="broke"),
    ],
)
def test_the_exit_code_is_the_trainings(tmp_path: Path, body: str, code: int, told: str) -> None:
    done = ended(tmp_path, body)
    assert done.returncode == code
    assert done.stdout == "left the other ranks\n"
    assert done.stderr.endswith(told)
    assert ("Traceback" in done.stderr) == ("OSError" in told)


def test_an_interpreter_that_is_taken_apart_loses_the_exit_code(tmp_path: Path) -> None:
    assert ended(tmp_path, "return 2", "raise SystemExit(main())").returncode == -signal.SIGABRT
