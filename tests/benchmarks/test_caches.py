"""Folders of compiled code in a directory that all users share."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.common.run import caches


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    tmp_path.chmod(0o1777)
    return tmp_path


@pytest.mark.parametrize("mode", [None, 0o700, 0o755])
def test_cache_is_private(shared: Path, mode: int | None) -> None:
    folder = shared / "cache"
    if mode is not None:
        folder.mkdir(mode)
    assert caches.private_folder(folder) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    inside = caches.private_folder(folder / "triton")
    assert inside.is_dir() and caches.private_folder(inside) == inside


@pytest.mark.parametrize(
    "plant",
    [
        lambda folder: folder.symlink_to(folder.parent),
        lambda folder: folder.symlink_to(folder.parent / "missing"),
        lambda folder: folder.write_text(""),
        lambda folder: (folder.mkdir(), folder.chmod(0o777)),
    ],
)
def test_planted_cache_is_rejected(
    shared: Path, capsys: pytest.CaptureFixture[str], plant: Callable[[Path], object]
) -> None:
    plant(shared / "cache")
    with pytest.raises(SystemExit) as exit_:
        caches.private_folder(shared / "cache")
    assert exit_.value.code == 2 and "is a symbolic link, or other users can change it" in capsys.readouterr().err


def test_cache_of_another_user_is_rejected(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches.private_folder(shared / "cache")
    monkeypatch.setattr(os, "getuid", lambda: shared.stat().st_uid + 1)
    with pytest.raises(SystemExit):
        caches.private_folder(shared / "cache")


def test_cuda_cache_is_in_a_private_folder_below_a_shared_home(shared: Path) -> None:
    default, own = {"HOME": str(shared)}, {"HOME": str(shared), "CUDA_CACHE_PATH": "/own"}
    private = {"HOME": str(caches.private_folder(shared / "home"))}
    for environment in (default, own, private):
        caches.set_cuda_cache(environment)
    cache = Path(default["CUDA_CACHE_PATH"])
    assert cache.parent == shared and stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert own["CUDA_CACHE_PATH"] == "/own" and "CUDA_CACHE_PATH" not in private
