"""Compile the Triton kernels for sm_80, sm_90 and sm_100 in an environment with Triton; no GPU needed.

    $ python -m tools.compile_kernels [--json]

Prints registers, shared memory and spills of each kernel; exit code 1: a kernel does not compile.
"""

import os
import subprocess
import sys

import typer

from encore import environment, paths
from tools import run


def main(json: bool = False) -> None:
    # Run benchmarks/common/checks/compile_kernels.py there, with Triton's cache in the environments folder
    python = environment.ensure_environment("kernels", lambda text: print(text, file=sys.stderr))
    command = [str(python), "-m", "benchmarks.common.checks.compile_kernels", *(["--json"] if json else [])]
    variables = {"TRITON_CACHE_DIR": str(paths.cache_folder() / "triton"), **os.environ}
    raise typer.Exit(subprocess.run(command, cwd=paths.ROOT, env=variables, check=False).returncode)


if __name__ == "__main__":
    run(main, __doc__)
