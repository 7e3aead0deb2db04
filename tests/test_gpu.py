"""On a GPU alone: the selftest of every benchmark, in the images or in ENCORE_GPU_PYTHON (``make test-gpu``)."""

import json
import os

import pytest

from encore import catalogue
from tests.conftest import Encore

CHECKED: list[str] = []
SECONDS = 1200.0  # More than one GPU's ten minutes: here nothing is to be left out


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(catalogue.choices()))
def test_selftest(name: str, encore: Encore) -> None:
    python = os.environ.get("ENCORE_GPU_PYTHON")
    where = ("--python", python) if python else ("--runtime", "auto")
    done = encore("selftest", name, *where, "--time-limit", str(SECONDS), "--json", timeout=SECONDS + 300)
    if done.returncode == 2:
        pytest.skip(f"NOTHING CHECKED: {done.stderr.strip().splitlines()[-1]}")
    CHECKED.append(name)
    checks = json.loads(done.stdout)["checks"]
    assert not [check for check in checks if check["result"] == "FAIL"], done.stdout
    assert done.returncode == 0 and {check["check"]: check["result"] for check in checks}["device"] == "OK"


@pytest.mark.gpu
def test_something_was_checked() -> None:
    assert CHECKED, "no image and no Python with CUDA: make build-resnet, or set ENCORE_GPU_PYTHON=FILE"
