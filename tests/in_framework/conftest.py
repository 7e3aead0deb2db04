"""Fixtures of the tests that run in a framework's environment, on any number of ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def together():
    return Path(os.environ["TOGETHER"])


@pytest.fixture(scope="session")
def digits(together):
    folder = together / "digits"
    subprocess.run([sys.executable, "-m", "benchmarks.resnet.prepare", "-o", str(folder)], check=True)
    return folder
