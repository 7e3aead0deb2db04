"""The selftest of every benchmark on a GPU, in the images or in ENCORE_GPU_PYTHON (``make test-gpu``)."""

import json
import os

import pytest

from encore import catalogue
from tests.conftest import Encore

CHECKED: list[str] = []
SECONDS = 1200.0  # Time limit; all checks must complete


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(catalogue.choices()))
def test_selftest(name: str, encore: Encore) -> None:
    python = os.environ.get("ENCORE_GPU_PYTHON")
    options = ("--python", python) if python else ("--runtime", "auto")
    result = encore("selftest", name, *options, "--time-limit", str(SECONDS), "--json", timeout=SECONDS + 300)
    if result.returncode == 2:
        pytest.skip(f"NOTHING CHECKED: {result.stderr.strip().splitlines()[-1]}")
    CHECKED.append(name)
    results = {check["check"]: check["result"] for check in json.loads(result.stdout)["checks"]}
    assert (result.returncode, results["device"], "FAIL" in results.values()) == (0, "OK", False), result.stdout


@pytest.mark.gpu
def test_at_least_one_benchmark_was_checked() -> None:
    assert CHECKED, "no image and no Python with CUDA: make build-resnet, or set ENCORE_GPU_PYTHON=FILE"
