"""Checkpoint folders that are either whole or not there, for any framework.

``checkpoint/step_00000123/`` holds ``state.json`` and whatever files the framework writes. A folder is
filled under a temporary name and renamed when it is complete, so that a crash never leaves half of one.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import numpy as np

from benchmarks.common.ranks import Ranks

STATE_FILE = "state.json"
Content = Callable[[], Mapping[str, Any]]


class Checkpoints:
    """The checkpoints of a run: what rank 0 gives for all, what each rank gives for itself, and the logs' lengths.

    ``framework`` is a module of benchmarks/common/frameworks. All ranks call ``find`` and ``save`` together.
    """

    def __init__(self, folder: Path, logs: Sequence[Path], framework: Any, ranks: Ranks) -> None:
        self._folder, self._logs, self._framework, self._ranks = folder, logs, framework, ranks
        self._lengths: List[int] = []
        self.found: Optional[Path] = None

    def find(self) -> Dict[str, Any]:
        """Look for a checkpoint and return its state, empty if there is none; cut the logs back to that moment."""
        self.found = latest(self._folder)
        # No rank may look later than rank 0 starts to write a new one.
        self._framework.barrier()
        if self.found is None:
            return {}
        state = read_state(self.found)
        if state["ranks"] != self._ranks.size:
            raise SystemExit(
                f"checkpoint {self.found} was written by {state['ranks']} ranks and this run has "
                f"{self._ranks.size}: resume with the same number, or remove the checkpoint"
            )
        if self._ranks.rank == 0:
            for path, length in zip(self._logs, state["log_lengths"]):
                cut_log(path, length)
        return state

    def load(self) -> Dict[str, Any]:
        """Return the shared content and this rank's own together; empty without a checkpoint."""
        if self.found is None:
            return {}
        own = self._framework.load(self.found / f"rank_{self._ranks.rank}")
        return {**self._framework.load(self.found / "shared"), **own}

    def mark_logs(self) -> None:
        """Remember the logs' lengths now: what comes later is logged again after a resume."""
        if self._ranks.rank == 0:
            self._lengths = [path.stat().st_size for path in self._logs]

    def save(self, step: int, state: Mapping[str, Any], shared: Content, own: Content) -> None:
        """Write a checkpoint; returns when it is whole. ``own`` is called on all ranks, then ``shared`` on rank 0."""
        mine = own()
        if self._ranks.rank == 0:
            self._framework.save(begin(self._folder, step) / "shared", shared())
        self._framework.barrier()
        self._framework.save(temporary_folder(self._folder, step) / f"rank_{self._ranks.rank}", mine)
        self._framework.barrier()
        if self._ranks.rank == 0:
            finish(self._folder, step, {**state, "ranks": self._ranks.size, "log_lengths": self._lengths})
        self._framework.barrier()


def begin(folder: Path, step: int) -> Path:
    """Make the empty temporary folder of the checkpoint at ``step``; call on rank 0 only."""
    temporary = temporary_folder(folder, step)
    if temporary.exists():
        shutil.rmtree(str(temporary))
    temporary.mkdir(parents=True)
    return temporary


def temporary_folder(folder: Path, step: int) -> Path:
    """Return the folder that ``begin`` made, for the other ranks to put their own files into."""
    return folder / f"writing_{step:08d}"


def finish(folder: Path, step: int, state: Dict[str, Any]) -> Path:
    """Write ``state``, make the checkpoint visible, remove the older ones; call on rank 0 only."""
    temporary = temporary_folder(folder, step)
    with open(temporary / STATE_FILE, "w", encoding="utf-8") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    final = folder / f"step_{step:08d}"
    if final.exists():
        shutil.rmtree(str(final))
    temporary.rename(final)
    for other in sorted(folder.glob("step_*")):
        if other != final:
            shutil.rmtree(str(other))
    return final


def latest(folder: Path) -> Optional[Path]:
    """Return the newest complete checkpoint below ``folder``, or None."""
    found = sorted(folder.glob("step_*")) if folder.is_dir() else []
    return found[-1] if found else None


def read_state(checkpoint: Path) -> Dict[str, Any]:
    """Return the ``state`` that was given to ``finish``."""
    state: Dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    return state


def cut_log(path: Path, length: int) -> None:
    """Move what follows the first ``length`` bytes of ``path`` to ``path.discarded``."""
    data = path.read_bytes()
    if len(data) > length:
        with open(f"{path}.discarded", "ab") as discarded:
            discarded.write(data[length:])
        with open(path, "r+b") as file:
            file.truncate(length)


def save_arrays(path: Path, content: Mapping[str, Any]) -> None:
    """Write float arrays and bytes by name, for frameworks whose tensors become NumPy arrays."""
    arrays: Dict[str, Any] = {
        name: np.frombuffer(v, np.uint8) if isinstance(v, bytes) else v for name, v in content.items()
    }
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def load_arrays(path: Path) -> Dict[str, Any]:
    """Return what ``save_arrays`` was given."""
    with np.load(str(path)) as arrays:
        return {name: arrays[name].tobytes() if arrays[name].dtype == np.uint8 else arrays[name] for name in arrays}
