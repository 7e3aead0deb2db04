"""Checkpoint folders that are either whole or not there, for any framework.

``checkpoint/step_00000123/`` holds ``state.json`` and whatever files the framework writes. A folder is
filled under a temporary name and renamed when it is complete, so that a crash never leaves half of one.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional

STATE_FILE = "state.json"


@dataclass(frozen=True)
class Position:
    """The next thing to do: this step of this epoch, both counted from 0.

    ``step_in_epoch`` equal to the steps of an epoch means that only its evaluation is left.
    """

    epoch: int
    step_in_epoch: int

    def step(self, steps_per_epoch: int) -> int:
        """Steps done since the beginning of the run."""
        return self.epoch * steps_per_epoch + self.step_in_epoch


def begin(folder: Path, step: int) -> Path:
    """Make the empty temporary folder of the checkpoint at ``step``; call on rank 0 only."""
    temporary = folder / f"writing_{step:08d}"
    if temporary.exists():
        shutil.rmtree(str(temporary))
    temporary.mkdir(parents=True)
    return temporary


def temporary_folder(folder: Path, step: int) -> Path:
    """The folder that ``begin`` made, for the other ranks to put their own files into."""
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
    """The newest complete checkpoint below ``folder``, or None."""
    found = sorted(folder.glob("step_*")) if folder.is_dir() else []
    return found[-1] if found else None


def read_state(checkpoint: Path) -> Dict[str, Any]:
    """The ``state`` that was given to ``finish``."""
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
