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
    found = [caches.private_folder(path) for path in (folder, folder / "triton", folder / "triton")]
    assert (found, stat.S_IMODE(folder.stat().st_mode)) == ([folder, folder / "triton", folder / "triton"], 0o700)


@pytest.mark.parametrize(
    ("plant", "user"),
    [
        (lambda folder: folder.symlink_to(folder.parent), 0),
        (lambda folder: folder.symlink_to(folder.parent / "missing"), 0),
        (lambda folder: folder.write_text(""), 0),
        (lambda folder: (folder.mkdir(), folder.chmod(0o777)), 0),
        (caches.private_folder, 1),
    ],
    ids=["symlink", "dangling symlink", "file", "open to all", "of another user"],
)
def test_planted_cache_is_rejected(
    shared: Path,
    capsys: pytest.CaptureFixture[str],
    plant: Callable[[Path], object],
    user: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(shared / "cache")
    monkeypatch.setattr(os, "getuid", lambda: shared.stat().st_uid + user)
    with pytest.raises(SystemExit, match="2"):
        caches.private_folder(shared / "cache")
    assert "is a symbolic link, or other users can change it" in capsys.readouterr().err


def test_cuda_cache_is_in_a_private_folder_below_a_shared_home(shared: Path) -> None:
    default, own = {"HOME": str(shared)}, {"HOME": str(shared), "CUDA_CACHE_PATH": "/own"}
    private = {"HOME": str(caches.private_folder(shared / "home"))}
    for environment in (default, own, private):
        caches.set_cuda_cache(environment)
    cache = Path(default["CUDA_CACHE_PATH"])
    assert (cache.parent, stat.S_IMODE(cache.stat().st_mode)) == (shared, 0o700)
    assert own["CUDA_CACHE_PATH"] == "/own" and "CUDA_CACHE_PATH" not in private
