"""The files in which weights are published, made with their layout and names, and read into the networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainings import result


@pytest.fixture(scope="module")
def found(in_pytorch: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return result(in_pytorch("weight_files.py", str(tmp_path_factory.mktemp("weights"))))


def test_torchvisions_tar_of_2017_is_read_and_loaded(found: Any) -> None:
    ssd = found["ssd"]
    assert ssd["names"] and ssd["as torch reads"] and ssd["loaded"]
    assert ssd["padding"] == [1, 0.0]
    assert ssd["stages"] == ["bn1", "conv1", "layer1", "layer2", "layer3"], (
        "the last stage and the classes are left out"
    )


def test_detectrons_pickle_of_python_2_is_read_and_loaded(found: Any) -> None:
    maskrcnn = found["maskrcnn"]
    assert maskrcnn["names"] == 214
    assert maskrcnn["loaded"] == [True, True, True]
    missing, shape, empty = maskrcnn["refused"]
    assert "R-50.pkl has no res2_0_branch2a_w" in missing
    assert "conv1_w has the shape (1000, 2048), this backbone needs (64, 3, 7, 7)" in shape
    assert "has no conv1.weight" in empty
    assert all("do this: set backbone=FILE" in words for words in maskrcnn["refused"])


def test_nothing_in_a_file_is_executed(found: Any) -> None:
    command, long, ran = found["hostile"]
    assert "it names posix.system" in command
    assert "cannot be read as weights" in long and "out of bounds" in long
    assert ran is False
