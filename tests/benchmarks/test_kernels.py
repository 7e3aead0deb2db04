"""The Triton kernels: compiled for each generation of GPUs, compared in Triton's interpreter, chosen by measuring."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from encore import paths

KERNELS = sorted(paths.BENCHMARKS.glob("*/pytorch/kernels.py"))
TARGETS = {"sm_80", "sm_90", "sm_100"}


@pytest.fixture(scope="module")
def compiled(kernels_python: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tools.compile_kernels", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=paths.ROOT, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_every_kernel_compiles_for_every_target_without_spills(compiled: list[dict[str, Any]]) -> None:
    assert KERNELS
    written = {
        f"{path.parts[-3]} {name}"
        for path in KERNELS
        for name in re.findall(r"^@triton\.jit\ndef ([a-z]\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {usage["kernel"] for usage in compiled} == written
    for name in written:
        assert {usage["target"] for usage in compiled if usage["kernel"] == name} == TARGETS
    assert {usage["problem"] for usage in compiled} == {""}
    assert all(0 < usage["registers"] <= 255 and usage["spills"] == 0 for usage in compiled)
    # 48 KiB is what a block has on every GPU, 99 KiB the least of what these three families can give it.
    assert max(usage["shared"] for usage in compiled) <= 99 * 1024


def test_kernel_that_does_not_compile_fails(kernels_python: Path, tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "x" / "pytorch").mkdir(parents=True)
    (tmp_path / "benchmarks" / "x" / "pytorch" / "kernels.py").touch()
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys, triton, triton.language as tl\n"
        "from benchmarks.common.checks import compile_kernels\n"
        "from benchmarks.common.torch.kernels import Specification\n"
        "@triton.jit\n"
        "def wrong(pointer, N: tl.constexpr):\n"
        "    tl.store(pointer + tl.arange(0, N), unknown)\n"
        "sys.modules['benchmarks.x.pytorch.kernels'] = module = type(sys)('benchmarks.x.pytorch.kernels')\n"
        "module.wrong = module.unlisted = wrong\n"
        "module.specifications = lambda: [Specification(wrong, 'fp32', {'pointer': '*fp32', 'N': 16}, 1)]\n"
        "compile_kernels.ROOT = pathlib.Path.cwd()\n"
        "sys.exit(compile_kernels.main([]))\n",
        encoding="utf-8",
    )
    variables = {**os.environ, "PYTHONPATH": str(paths.ROOT)}
    done = subprocess.run(
        [str(kernels_python), str(program)], capture_output=True, text=True, cwd=tmp_path, env=variables, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "CompilationError" in done.stdout
    assert "not in specifications()" in done.stdout
