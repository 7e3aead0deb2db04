"""Create the Python environments of all frameworks and of the kernel tests, or the named ones, in parallel.

    $ python -m tools.environments
    $ python -m tools.environments mxnet

Package installation uses one core, the compilation of Horovod all cores, so that parallel processes are faster.
"""

import signal
import subprocess
import sys
from typing import Annotated

import typer

from encore import catalogue, environment
from encore.errors import EncoreError
from tools import run


def frameworks() -> list[str]:
    # Every framework that a benchmark is implemented in
    return sorted({choice.implementation.framework for choice in catalogue.choices().values()})


def make(framework: str) -> int:
    # Make one environment; returns the exit code
    try:
        print(environment.ensure_environment(framework, lambda text: print(text, flush=True)), flush=True)
    except EncoreError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0


def main(names: Annotated[list[str], typer.Argument()] = ()) -> None:
    if len(names) == 1:
        raise typer.Exit(make(names[0]))
    command = [sys.executable, "-m", "tools.environments"]
    children = [subprocess.Popen([*command, name]) for name in names or [*frameworks(), "kernels"]]
    # SIGTERM comes from a gate that has failed elsewhere; an interrupted environment is continued the next time.
    signal.signal(signal.SIGTERM, lambda number, frame: [child.send_signal(signal.SIGINT) for child in children])
    raise typer.Exit(max([abs(child.wait()) for child in children]))


if __name__ == "__main__":
    run(main, __doc__)
