"""Fixtures of the tests that run in a framework's environment, on any number of ranks."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

# Ranks and tests end at the same time: with one folder, each would clean up the links of another's pytest.
if "TOGETHER" in os.environ:
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(dir=os.environ["TOGETHER"])


@pytest.fixture(scope="session")
def together():
    return Path(os.environ["TOGETHER"])


@pytest.fixture(scope="module")
def ranks(request):
    # The ranks of a file that uses PyTorch, as its CONFIG wants them
    from benchmarks.common.frameworks import pytorch

    yield pytorch.start(getattr(request.module, "CONFIG", SimpleNamespace(device="cpu", precision="fp32")))
    pytorch.finish()


@pytest.fixture(scope="session")
def digits(together):
    folder = together / "digits"
    subprocess.run([sys.executable, "-m", "benchmarks.resnet.prepare", "-o", str(folder)], check=True)
    return folder
