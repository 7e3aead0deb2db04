"""Files of trained weights: found, checked, mounted, and named in the passport."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from encore import catalogue, configuration
from encore.configuration import Configuration
from encore.errors import EncoreError
from encore.job import Mount
from encore.machine import preflight, weights
from tests.conftest import Encore


def with_backbone(name: str, file: str) -> Configuration:
    choice = catalogue.choose(name)
    system = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
    return configuration.resolve(choice, system, 1, 1, [f"backbone={file}"])


@pytest.mark.parametrize("name", ["ssd", "maskrcnn"])
def test_a_file_is_in_the_data_folder_or_anywhere(name: str, tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere.pth"
    inside = weights.weight_files(with_backbone(name, "weights.pth"), data)
    outside = weights.weight_files(with_backbone(name, str(elsewhere)), data)
    assert (inside, outside) == ({"backbone": data / "weights.pth"}, {"backbone": elsewhere})
    assert weights.weight_files(with_backbone(name, ""), data) == {}
    assert weights.mounts(inside, data) == ()
    assert weights.mounts(outside, data) == (Mount(elsewhere, str(elsewhere), True),)
    elsewhere.write_bytes(b"weights")
    (found,) = weights.as_json(outside).values()
    assert found == {"file": str(elsewhere), "bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    weights.refuse_others(outside, {"backbone": found})
    weights.refuse_others(inside, {"backbone": found})  # not there: a checkpoint has it
    elsewhere.write_bytes(b"others!")
    with pytest.raises(EncoreError, match="is not the file of backbone that the run began with"):
        weights.refuse_others(outside, {"backbone": found})
    assert [each.level for each in preflight.check_weights(with_backbone(name, str(elsewhere)), data)] == ["OK"]


def test_a_file_that_is_not_there_is_named_before_the_run(encore: Encore, tmp_path: Path) -> None:
    file = tmp_path / "none.pth"
    done = encore("run", "ssd", "1", "--system", "cpu", "--set", f"backbone={file}", "--dry-run")
    assert f"{file} is no file" in done.stdout + done.stderr


def test_keys_of_weights_are_keys_of_the_configuration() -> None:
    for name, choice in catalogue.choices().items():
        assert set(choice.benchmark.weights) <= set(configuration.field_types(choice.folder)), name
        assert set(choice.benchmark.rates) <= set(configuration.field_types(choice.folder)), name
