"""Triton kernels: compiled for each generation of GPUs, without spills."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from encore import paths

KERNELS = sorted(paths.BENCHMARKS.glob("*/pytorch/kernels.py"))


@pytest.mark.long
@pytest.mark.usefixtures("kernels_python")
def test_every_kernel_compiles_for_every_target_without_spills() -> None:
    names = {
        f"{path.parts[-3]} {name}"
        for path in KERNELS
        for name in re.findall(r"^@triton\.jit\ndef ([a-z]\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    command = [sys.executable, "-m", "tools.compile_kernels", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=paths.ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels, targets = json.loads(done.stdout), defaultdict(set)
    for kernel in kernels:
        targets[kernel["kernel"]].add(kernel["target"])
    # A100 has no FP8.
    expected = {name: {"sm_90", "sm_100"} | (set() if name == "language cast_tile" else {"sm_80"}) for name in names}
    assert names and targets == expected
    # Shared memory of a block: 48 KiB on every GPU, up to 99 KiB on the smallest of these three families
    wrong = [
        kernel
        for kernel in kernels
        if kernel["problem"] or kernel["spills"] or not 0 < kernel["registers"] <= 255 or kernel["shared"] > 99 * 1024
    ]
    assert wrong == []


PROGRAM = """
import pathlib, sys, triton, triton.language as tl
from benchmarks.common.checks import compile_kernels
from benchmarks.common.torch.kernels import Specification
@triton.jit
def wrong(pointer, N: tl.constexpr):
    tl.store(pointer + tl.arange(0, N), unknown)
sys.modules['benchmarks.x.pytorch.kernels'] = module = type(sys)('benchmarks.x.pytorch.kernels')
module.wrong = module.unlisted = wrong
module.specifications = lambda: [Specification(wrong, 'fp32', {'pointer': '*fp32', 'N': 16}, 1)]
compile_kernels.ROOT = pathlib.Path.cwd()
sys.exit(compile_kernels.main([]))
"""


def test_kernel_that_does_not_compile_fails(kernels_python: Path, tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "x" / "pytorch").mkdir(parents=True)
    (tmp_path / "benchmarks" / "x" / "pytorch" / "kernels.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command, variables = [str(kernels_python), str(tmp_path / "program.py")], {"PYTHONPATH": str(paths.ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **variables}, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "CompilationError" in done.stdout and "not in specifications()" in done.stdout
