"""What a training compiled goes from one run to the next of the same kind; what is in it is in tests/in_framework."""

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


def test_a_run_takes_what_one_of_its_kind_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = (tmp_path / name / "experiment_0" for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir(parents=True)
    key = compiled.key_of(on_gpus("compile=default"), IMAGE, None, ["NVIDIA H200, 580"])
    assert not compiled.give(key, first)
    compiled.keep(key, first)
    assert not compiled.give(key, second), "a training that compiled nothing leaves nothing"
    (first / compiled.FILE).write_bytes(b"kernels")
    compiled.keep(key, first)
    assert compiled.give(key, second) and (second / compiled.FILE).read_bytes() == b"kernels"
    assert not (first / compiled.FILE).exists(), "a run folder is not archived with it"
    assert not compiled.give("", second)


def test_a_kind_is_all_that_changes_what_is_compiled() -> None:
    given = (on_gpus("compile=default"), IMAGE, None, ["NVIDIA H200, 580"])
    key = compiled.key_of(*given)
    assert compiled.key_of(*given[:3], ["NVIDIA H200, 580"] * 8) == key
    assert "seed" in given[0].plain(), "each experiment has another, and the same key"
    others = [
        (on_gpus("compile=default", "batch_size=7"), *given[1:]),
        (given[0], {**IMAGE, "id": "sha256:2"}, *given[2:]),
        (given[0], None, Path("/opt/python"), given[3]),
        (*given[:3], ["NVIDIA H100, 580"]),
    ]
    assert len({key, *(compiled.key_of(*each) for each in others)}) == 5
    assert compiled.key_of(on_gpus("compile=none"), *given[1:]) == ""
