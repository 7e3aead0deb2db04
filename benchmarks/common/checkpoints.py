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
        self.found = max(self._folder.glob("step_*"), default=None)
        # No rank may look later than rank 0 starts to write a new one.
        self._framework.barrier()
        if self.found is None:
            return {}
        state: Dict[str, Any] = json.loads((self.found / STATE_FILE).read_text(encoding="utf-8"))
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
        """Write a checkpoint; return when it is whole. ``own`` is called on all ranks, then ``shared`` on rank 0."""
        mine, temporary = own(), self._folder / f"writing_{step:08d}"
        if self._ranks.rank == 0:
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)
            self._framework.save(temporary / "shared", shared())
        self._framework.barrier()
        self._framework.save(temporary / f"rank_{self._ranks.rank}", mine)
        self._framework.barrier()
        if self._ranks.rank == 0:
            state = {**state, "ranks": self._ranks.size, "log_lengths": self._lengths}
            publish(temporary, self._folder / f"step_{step:08d}", state)
        self._framework.barrier()


def publish(temporary: Path, final: Path, state: Mapping[str, Any]) -> None:
    """Write ``state``, make the checkpoint visible under its ``final`` name, remove the older ones."""
    with open(temporary / STATE_FILE, "w", encoding="utf-8") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    for other in final.parent.glob("step_*"):
        if other != final:
            shutil.rmtree(other)


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
