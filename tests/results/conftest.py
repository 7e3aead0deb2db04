"""Fixtures of the tests of results."""

import tarfile
from pathlib import Path

import pytest

from tests.results.result_logs import archive


# The archive of public logs, unpacked.
@pytest.fixture(scope="session")
def public_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = archive()
    if path is None:
        pytest.skip("no archive of public logs: shared/mlperf/logs.tar.xz next to the project, or ENCORE_SHARED")
    folder = tmp_path_factory.mktemp("public")
    with tarfile.open(path) as packed:
        members = [member for member in packed if member.isfile() and ".." not in member.name]
        packed.extractall(folder, members=members)
    return folder
