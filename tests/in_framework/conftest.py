"""Fixtures of the tests that run in a framework's environment, on any number of ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def together():
    """A folder that is the same on all ranks."""
    return Path(os.environ["TOGETHER"])


@pytest.fixture(scope="session")
def digits(together):
    """The small data set of resnet; ranks wait for each other's preparation."""
    folder = together / "digits"
    subprocess.run([sys.executable, "-m", "benchmarks.resnet.prepare", "-o", str(folder)], check=True)
    return folder
