"""Compiled kernels are kept for the next run with the same key."""

from pathlib import Path

import pytest

from encore import catalogue, configuration
from encore.configuration import Configuration
from encore.run import compiled

IMAGE = {"name": "encore-resnet-pytorch:25.12", "id": "sha256:1"}


def on_gpus(*settings: str) -> Configuration:
    choice = catalogue.choose("resnet-pytorch")
    small = catalogue.find_system(choice, "cpu", None)
    return configuration.resolve(choice, small, 1, 1, ["device=gpu", *settings])


KEY = (on_gpus("compile=default"), IMAGE, None, ["NVIDIA H200, 580"])


def test_compiled_kernels_are_given_to_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = (tmp_path / name for name in ("first", "second"))
    first.mkdir()
    second.mkdir()
    key = compiled.key_of(*KEY)
    compiled.keep(key, first)  # nothing was compiled
    assert not compiled.give(key, first)
    (first / compiled.FILE).write_bytes(b"kernels")
    compiled.keep(key, first)
    assert compiled.give(key, second) and (second / compiled.FILE).read_bytes() == b"kernels"
    assert not (first / compiled.FILE).exists() and not compiled.give("", second)


def test_key_depends_on_all_that_changes_the_kernels() -> None:
    config, image, python, gpus = KEY
    key = compiled.key_of(*KEY)
    assert compiled.key_of(config, image, python, gpus * 8) == key
    assert "seed" in config.plain()  # differs between the experiments of a run
    keys = {
        key,
        compiled.key_of(on_gpus("compile=default", "batch_size=7"), image, python, gpus),
        compiled.key_of(config, {**IMAGE, "id": "sha256:2"}, python, gpus),
        compiled.key_of(config, None, Path("/opt/python"), gpus),
        compiled.key_of(config, image, python, ["NVIDIA H100, 580"]),
    }
    assert len(keys) == 5 and compiled.key_of(on_gpus("compile=none"), image, python, gpus) == ""
