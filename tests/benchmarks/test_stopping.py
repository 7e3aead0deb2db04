"""The process of a training ends with the exit code of the training, whatever threads still run."""

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

class ThreadState:
    "Like the state of a framework's thread, it cannot be freed while the interpreter shuts down"
    def __del__(self):
        os.abort()

state = ThreadState()
atexit.register(lambda: print("left the other ranks"))
heartbeat = Heartbeat(Path(sys.argv[1]), 0)

def main():
    {body}

{end}
"""


def run(folder: Path, body: str, end: str = "end_process(main)") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(body=body, end=end), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=paths.ROOT, check=False)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        pytest.param("return 0", 0, "", id="done"),
        pytest.param("raise SystemExit(2)", 2, "", id="refused"),
        pytest.param("raise SystemExit", 0, "", id="left"),
        pytest.param("raise SystemExit('found that, do this')", 1, "found that, do this\n", id="said"),
        pytest.param("raise OSError('disk')", 1, "OSError: disk\n", id="broke"),
    ],
)
def test_exit_code_is_that_of_the_training(tmp_path: Path, body: str, code: int, message: str) -> None:
    done = run(tmp_path, body)
    assert (done.returncode, done.stdout) == (code, "left the other ranks\n")
    assert done.stderr.endswith(message)
    assert ("Traceback" in done.stderr) == ("OSError" in message)


def test_shutdown_of_the_interpreter_loses_the_exit_code(tmp_path: Path) -> None:
    assert run(tmp_path, "return 2", "raise SystemExit(main())").returncode == -signal.SIGABRT
