"""Fixtures of the tests of results."""

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.results.result_logs import archive

GOLDEN = Path(__file__).parents[1] / "golden" / "results"


@pytest.fixture(scope="session")
def public_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of public logs, unpacked."""
    path = archive()
    if path is None:
        pytest.skip("no archive of public logs: shared/mlperf/logs.tar.xz next to the project, or ENCORE_SHARED")
    folder = tmp_path_factory.mktemp("public")
    with tarfile.open(path) as packed:
        members = [member for member in packed if member.isfile() and ".." not in member.name]
        packed.extractall(folder, members=members)
    return folder


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[str, Any], None]:
    """Compare an output, whose paths are shown without ``tmp_path``, with its file, which ENCORE_RECORD=1 rewrites."""

    def check(name: str, found: Any) -> None:
        text = found if isinstance(found, str) else _lines(_rounded(found))
        text = text.replace(str(tmp_path), "").rstrip() + "\n"
        path = GOLDEN / name
        if "ENCORE_RECORD" in os.environ:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        assert text == path.read_text("utf-8")

    return check


def _lines(value: Any) -> str:
    """Return JSON with a line for each key, and for each element of a list below it."""
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(each)}" for key, each in value.items()) + "\n}"
    if isinstance(value, list) and any(isinstance(each, list | dict) for each in value):
        return "[\n" + ",\n".join(json.dumps(each, ensure_ascii=False) for each in value) + "\n]"
    return json.dumps(value, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    """Return plain data with nine digits of each number: the rest may differ from library to library."""
    if isinstance(value, dict):
        return {str(key): _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value
