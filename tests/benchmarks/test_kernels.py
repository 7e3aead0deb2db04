"""The Triton kernels: compiled for each generation of GPUs, compared in Triton's interpreter, chosen by measuring."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from encore import paths
from tests.trainings import result

KERNELS = sorted(paths.BENCHMARKS.glob("*/pytorch/kernels.py"))
TARGETS = {"sm_80", "sm_90", "sm_100"}
ALONE = {"detection", "language", "maskrcnn", "translation"}
"""Compared operator by operator: a step of their networks takes minutes in the interpreter."""


@pytest.fixture(scope="module")
def compiled(kernels_python: Path) -> list[dict[str, Any]]:
    """What `make kernels` lists."""
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
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, triton, triton.language as tl\n"
        "from benchmarks.common.checks import compile_kernels\n"
        "from benchmarks.common.torch.kernels import Specification\n"
        "@triton.jit\n"
        "def wrong(pointer, N: tl.constexpr):\n"
        "    tl.store(pointer + tl.arange(0, N), unknown)\n"
        "sys.modules['benchmarks.x.pytorch.kernels'] = module = type(sys)('benchmarks.x.pytorch.kernels')\n"
        "module.wrong = module.unlisted = wrong\n"
        "module.specifications = lambda: [Specification(wrong, 'fp32', {'pointer': '*fp32', 'N': 16}, 1)]\n"
        "compile_kernels.modules = lambda: [module]\n"
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


@cache
def interpreted(python: Path, program: str = "kernels.py") -> Any:
    """What a program of tests/in_framework finds in Triton's interpreter."""
    variables = {**os.environ, "PYTHONPATH": str(paths.ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), f"tests/in_framework/{program}"],
        capture_output=True, text=True, cwd=paths.ROOT, env=variables, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return result(done.stdout)


def test_values_and_gradients_are_those_of_the_plain_path(kernels_python: Path) -> None:
    found = interpreted(kernels_python)["compared"]
    operators = {each["operator"].split()[0] for each in found}
    assert operators == {path.parts[-3] for path in KERNELS}
    assert {each["type"] for each in found} == {"float32", "float16", "bfloat16"}
    for each in found:
        assert each["error"] <= each["tolerance"], each
        assert each["tolerance"] <= 0.03


@pytest.mark.parametrize("benchmark", sorted({path.parts[-3] for path in KERNELS} - ALONE))
def test_networks_with_the_kernels_train_as_without(kernels_python: Path, benchmark: str) -> None:
    # DLRM: a step, with int32 indices. Several layers: the errors of single precision add up.
    found = interpreted(kernels_python)["whole networks"][benchmark]
    assert found["distance"] < 1e-4
    with_kernels, in_all = found["launches"]
    assert in_all == with_kernels > 0, "kernels ran where they were asked for, and nowhere else"


def test_kernels_are_chosen_by_comparing_and_measuring(kernels_python: Path) -> None:
    found = interpreted(kernels_python)
    faster = found["faster, wrong, broken"]
    assert faster["chosen"] == {"interaction": "triton", "gather": "plain", "update": "plain"}
    assert re.search(r"gather plain \(.*triton ArithmeticError: wrong by 0\.00\d", faster["reported"])
    assert "triton OverflowError: out of resource: shared memory" in faster["reported"]
    # Interpreted kernels are a thousand times slower.
    assert set(found["measured"]["chosen"].values()) == {"plain"}
    assert found["measured"]["reported"].count(" ms") == 6
    assert set(found["wanted"]["chosen"].values()) == {"triton"}
    assert found["saved"]["chosen"] == {"interaction": "triton", "gather": "plain", "update": "triton"}
    assert set(found["on a CPU"]["chosen"].values()) == {"plain"}
    assert found["on a CPU"]["reported"] == ""
    assert "Triton compiles for GPUs alone; use kernels=auto" in found["refused"]["chosen"]["refused"]


def test_berts_dropout_is_drawn_anew_and_its_gradient_has_the_same_mask(kernels_python: Path) -> None:
    found = interpreted(kernels_python, "bert_kernels.py")
    assert max(found["gelu"].values()) < 1e-6
    dropout = found["dropout"]
    assert dropout["distance"] < 1e-6, "next to float64 with the mask that the gradient shows"
    assert 0.72 < dropout["kept"] < 0.78
    assert dropout["by rows"][0] > 0.5 and dropout["by columns"][0] > 0.4, "no row and no column is left out"
    assert dropout["by columns"][1] < 1
    # Two masks that keep 3 of 4 agree in 1 - 2 * 3 / 16 of their places.
    assert dropout["same as the call before"] == pytest.approx(0.625, abs=0.03)
    assert dropout["same seed, same values"] is True


def test_berts_operators_are_those_of_a_compiler_where_they_are_right_and_fastest(kernels_python: Path) -> None:
    choices = interpreted(kernels_python, "bert_kernels.py")["choices"]
    assert choices["right"]["names"] == {"gelu": "compiled", "norm": "compiled"}
    assert choices["right"]["functions"] == [True, True]
    assert choices["wrong"]["names"] == {"gelu": "compiled", "norm": "plain"}
    assert "compiled ArithmeticError: wrong by 0.001" in choices["wrong"]["reported"]
    assert choices["saved"] == {"gelu": "compiled", "norm": "plain"}
    assert choices["layers compiled whole"] == {"gelu": "plain", "norm": "plain"}
