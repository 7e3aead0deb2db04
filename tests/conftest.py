"""Fixtures that several tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mxnet_python() -> Path:
    """Python of the MXNet environment."""
    named = os.environ.get("ENCORE_TEST_PYTHON")
    if not named:
        pytest.skip("ENCORE_TEST_PYTHON names no Python with MXNet")
    return Path(named)
