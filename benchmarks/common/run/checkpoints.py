"""Checkpoint folders that are either whole or not there, for any framework.

``checkpoint/step_00000123/`` holds ``state.json`` and whatever files the framework writes, each with its SHA-256 in
a file ``NAME.sha256`` next to it (``sha256sum --check`` reads it). A folder is filled under a temporary name and
renamed when it is complete, so that a crash never leaves half of one. The last two are kept: where the newest is
damaged, the one before it is used and the damaged one is set aside as ``damaged_00000123``.

``save_async`` overlaps with training: it copies the content, and a thread of each rank writes it. The save ends when
the thread of rank 0 has seen the checksums of all ranks' files; no collective is needed. A rank that cannot write
leaves a file ``rank_0.failed``.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common.data.files import in_one_step
from benchmarks.common.data.problem import Problem
from benchmarks.common.run.ranks import Ranks

STATE_FILE = "state.json"
SHARED_FILE = "shared"
DIGEST, FAILURE = ".sha256", ".failed"
LOOK_SECONDS = 0.05  # between two looks for the files of the other ranks
KEPT = 2  # checkpoints that stay: the newest, and the one to go back to where that is damaged
CHUNK = 1 << 24
Content = Callable[[], Mapping[str, Any]]


class Checkpoints:
    """The checkpoints of a run: what rank 0 gives for all, what each rank gives for itself, and the logs' lengths.

    ``framework``: a module of benchmarks/common/frameworks. ``find``, ``save`` and ``save_async`` are collective calls.
    """

    def __init__(
        self, folder: Path, logs: Sequence[Path], framework: Any, ranks: Ranks, reshards: bool = False
    ) -> None:
        """Keep checkpoints in ``folder``; with ``reshards`` another number of ranks may read them."""
        self._folder, self._logs, self._framework, self._ranks = folder, logs, framework, ranks
        self._reshards = reshards
        self._lengths: List[int] = []
        self._copies: Dict[str, Any] = {}  # what the last ``save_async`` copied, whose memory the next one takes again
        self._writing: Optional["Future[float]"] = None  # the save in flight
        self.found: Optional[Path] = None
        self.damaged: Dict[str, str] = {}  # damage of the newer ones that ``find`` passed over, by their names

    def find(self) -> Dict[str, Any]:
        """Look for a checkpoint and return its state, empty if there is none; cut the logs back to that moment.

        Raises:
            SystemExit: another number of ranks wrote it, or all that are there are damaged; says what to do.
        """
        candidates = sorted(self._folder.glob("step_*"), reverse=True)
        # No rank may look later than rank 0 starts to write a new one.
        self._framework.barrier()
        for path in candidates:
            damage = self._damage(path)
            flags = [float(bool(damage) and rank == self._ranks.rank) for rank in range(self._ranks.size)]
            ranks = [rank for rank, is_damaged in enumerate(self._framework.total(flags)) if is_damaged]
            if not ranks:
                return self._select(path)
            self.damaged[path.name] = damage or f"rank {ranks[0]} found its own part damaged"
        if candidates:
            # All stay: what is refused once is refused again, and not begun anew.
            damages = "; ".join(f"{name}: {damage}" for name, damage in self.damaged.items())
            raise SystemExit(
                f"no checkpoint in {self._folder} is whole: this experiment cannot be resumed\n"
                f"  found: {damages}\n  hint: start a new run; or restore the folder from a copy of your own"
            )
        return {}

    # Say what is wrong with the files that this rank reads; empty: nothing.
    def _damage(self, path: Path) -> str:
        # A checkpoint of another number of ranks may have no file of this one: that is refused, and no damage.
        problem = _file_damage(path / STATE_FILE)
        wrote = 0 if problem else _read_state(path)["ranks"]
        if problem or not (self._reshards or wrote == self._ranks.size):
            return problem
        local_ranks = range(self._ranks.rank, wrote, self._ranks.size)
        problems = [_file_damage(path / name) for name in (SHARED_FILE, *(f"rank_{rank}" for rank in local_ranks))]
        if self._ranks.rank == 0:
            state = _read_state(path)
            for log, length, digest in zip(self._logs, state["log_lengths"], state["log_digests"]):
                if not log.exists() or log.stat().st_size < length:
                    problems.append(f"{log.name} is shorter than it was then")
                elif _digest(log, length) != digest:
                    problems.append(f"{log.name} differs from what it was then")
        return "; ".join(filter(None, problems))

    # Set newer checkpoints aside, which are damaged, and cut the logs back; return the state.
    def _select(self, path: Path) -> Dict[str, Any]:
        state = _read_state(path)
        if self._ranks.rank == 0:
            self._set_damaged_aside()
        if state["ranks"] != self._ranks.size and not self._reshards:
            raise SystemExit(
                f"checkpoint {path} was written by {state['ranks']} ranks and this run has "
                f"{self._ranks.size}: resume with the same number, or remove the checkpoint"
            )
        if self._ranks.rank == 0:
            self._cut_logs(state["log_lengths"])
        self.found = path
        return state

    def _set_damaged_aside(self) -> None:
        for name, damage in self.damaged.items():
            print(f"checkpoint {name} is damaged: {damage}", file=sys.stderr)
            aside = self._folder / name.replace("step", "damaged")
            if aside.exists():
                shutil.rmtree(aside)
            (self._folder / name).rename(aside)

    def _cut_logs(self, lengths: Sequence[int]) -> None:
        # What was written after the checkpoint stays in a file next to each log.
        for log, length in zip(self._logs, lengths):
            data = log.read_bytes()
            if len(data) > length:
                with open(f"{log}.discarded", "ab") as discarded:
                    discarded.write(data[length:])
                os.truncate(log, length)

    def load(self) -> Dict[str, Any]:
        """Return the shared content and this rank's own together; empty without a checkpoint.

        Where it reshards, "every_rank" yields the own content of one rank after the other instead.
        """
        if self.found is None:
            return {}
        shared = self._framework.load(self.found / SHARED_FILE)
        if self._reshards:
            parts = [self.found / f"rank_{rank}" for rank in range(_read_state(self.found)["ranks"])]
            return {**shared, "every_rank": map(partial(self._framework.load, in_parts=True), parts)}
        # Last, since each file sets the random generators to those of the rank that wrote it.
        return {**shared, **self._framework.load(self.found / f"rank_{self._ranks.rank}")}

    def mark_logs(self) -> None:
        """Remember the logs' lengths now: what comes later is logged again after a resume."""
        if self._ranks.rank == 0:
            self._lengths = [path.stat().st_size for path in self._logs]

    def save(self, step: int, state: Mapping[str, Any], shared: Content, local: Content, kind: str = "step") -> None:
        """Write a checkpoint; return when it is whole. ``local`` is called on all ranks, then ``shared`` on rank 0.

        One of kind ``trained`` is what a run ended with: nothing resumes from it.
        """
        contents = self._contents(shared, local)
        temporary = self._open(step)
        for name, content in contents.items():
            self._framework.save(temporary / name, content)
            _write_digest(temporary / name)
        self._framework.barrier()
        if self._ranks.rank == 0:
            self._publish(temporary, f"{kind}_{step:08d}", state, self._lengths)
        self._framework.barrier()

    def save_async(self, step: int, state: Mapping[str, Any], shared: Content, local: Content) -> None:
        """Begin to write a checkpoint, of which ``poll_save`` reports the end; returns when its content is copied.

        The one before must have ended.
        """
        contents = self._contents(shared, local)
        self._copies = {
            name: self._framework.snapshot(content, self._copies.get(name)) for name, content in contents.items()
        }
        arguments = self._open(step), f"step_{step:08d}", state, list(self._lengths)
        threads = ThreadPoolExecutor(1, "checkpoint")
        self._writing = threads.submit(self._write, *arguments)
        threads.shutdown(wait=False)

    def poll_save(self, waits: bool) -> Optional[float]:
        """Return the seconds of writing of the save in flight if it has ended, once; None if not, or without one.

        Where it ``waits``, it has ended. Raises what kept this rank, or on rank 0 any rank, from writing.
        """
        if self._writing is None or not (waits or self._writing.done()):
            return None
        future, self._writing = self._writing, None
        return future.result()

    # Contents by the names of the files that this rank writes; ``own`` is called first.
    def _contents(self, shared: Content, local: Content) -> Dict[str, Mapping[str, Any]]:
        contents = {f"rank_{self._ranks.rank}": local()}
        return {SHARED_FILE: shared(), **contents} if self._ranks.rank == 0 else contents

    def _open(self, step: int) -> Path:
        temporary = self._folder / f"writing_{step:08d}"
        if self._ranks.rank == 0:
            for leftover in self._folder.glob("writing_*"):  # by a run that was killed meanwhile
                shutil.rmtree(leftover)
            temporary.mkdir(parents=True)
        self._framework.barrier()
        return temporary

    # Write the copies; on rank 0 until the checkpoint is whole. Return the seconds.
    def _write(self, temporary: Path, name: str, state: Mapping[str, Any], lengths: Sequence[int]) -> float:
        began = time.time()
        try:
            for file_name, copy in self._copies.items():
                self._framework.write(temporary / file_name, copy)
                _write_digest(temporary / file_name)
        except BaseException as error:
            with suppress(OSError):  # a full disk has room for its name, if not for the text
                (temporary / f"rank_{self._ranks.rank}{FAILURE}").write_text(str(error), encoding="utf-8")
            raise
        if self._ranks.rank == 0:
            self._wait_for_ranks(temporary)
            self._publish(temporary, name, state, lengths)
        return time.time() - began

    def _wait_for_ranks(self, temporary: Path) -> None:
        missing = set(range(self._ranks.size))
        while missing:
            for failure in temporary.glob(f"rank_*{FAILURE}"):
                reason = failure.read_text(encoding="utf-8") or "see its output"
                raise RuntimeError(f"{failure.stem} could not write its part of {temporary}: {reason}")
            missing = {rank for rank in missing if not (temporary / f"rank_{rank}{DIGEST}").exists()}
            if missing:
                time.sleep(LOOK_SECONDS)

    def _publish(self, temporary: Path, name: str, state: Mapping[str, Any], lengths: Sequence[int]) -> None:
        logs = {"log_lengths": lengths, "log_digests": list(map(_digest, self._logs, lengths))}
        publish(temporary, self._folder / name, {**state, "ranks": self._ranks.size, **logs})


def publish(temporary: Path, final: Path, state: Mapping[str, Any]) -> None:
    """Write ``state``, make the checkpoint visible under its ``final`` name, remove the older ones but KEPT."""
    with open(temporary / STATE_FILE, "w", encoding="utf-8") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _write_digest(temporary / STATE_FILE)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    for old in sorted(final.parent.glob("step_*"))[:-KEPT] + sorted(final.parent.glob("damaged_*")):
        shutil.rmtree(old)


def _read_state(path: Path) -> Dict[str, Any]:
    return json.loads((path / STATE_FILE).read_text(encoding="utf-8"))


# Return the SHA-256 of a file, or of its beginning.
def _digest(path: Path, length: int = sys.maxsize) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(min(CHUNK, length - file.tell())), b""):
            digest.update(chunk)
    return digest.hexdigest()


def _write_digest(path: Path) -> None:
    with in_one_step(Path(f"{path}{DIGEST}")) as file:
        file.write(f"{_digest(path)}  {path.name}\n".encode("ascii"))


# Say how a file differs from what was written; empty: not at all.
def _file_damage(path: Path) -> str:
    try:
        expected = Path(f"{path}{DIGEST}").read_text(encoding="ascii").split()
        if expected == [_digest(path), path.name]:
            return ""
    except OSError as error:
        return f"{Path(error.filename).name}: {error.strerror}"
    except UnicodeDecodeError:
        return f"{path.name}{DIGEST} is no checksum"
    return f"{path.name} differs from its checksum"


def save_arrays(path: Path, content: Mapping[str, Any]) -> None:
    """Write float arrays and bytes by name, for frameworks whose tensors become NumPy arrays."""
    arrays: Dict[str, Any] = {
        name: np.frombuffer(v, np.uint8) if isinstance(v, bytes) else v for name, v in content.items()
    }
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def load_arrays(path: Path) -> Dict[str, Any]:
    with np.load(str(path)) as arrays:
        return {name: arrays[name].tobytes() if arrays[name].dtype == np.uint8 else arrays[name] for name in arrays}


def read_for_inference(folder: Path, framework: Any) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Return the state and the content of the newest checkpoint in ``folder``, of any number of ranks.

    What the run ended with comes before what it could resume from, unless training continued while an evaluator worked,
    and the checkpoint that it evaluated last is there. The content has what rank 0 kept for all ranks,
    and below "rank_0", "rank_1" ... what each kept for itself.

    Raises:
        Problem: there is none, or the newest one is damaged.
    """
    paths = sorted(folder.glob("trained_*")) or sorted(folder.glob("step_*"))
    if not paths:
        raise Problem(
            f"no checkpoint in {folder}",
            "a run that kept one",
            "train with --set checkpoint_interval=1: the model that a run ends with is kept too",
        )
    path = paths[-1]
    trained, state = path.name.startswith("trained"), _read_state(path)
    last = folder / f"step_{state['evaluated']:08d}"
    if trained and state["evaluated"] != state["step"] and last.exists():
        path, state = last, _read_state(last)
    state["trained"] = trained
    names = [SHARED_FILE, *(f"rank_{rank}" for rank in range(state["ranks"]))]
    problems = list(filter(None, (_file_damage(path / name) for name in (STATE_FILE, *names))))
    if problems:
        raise Problem(f"{path} is damaged: {problems[0]}", "the checkpoint as it was written", "export another run")
    content = {name: framework.load(path / name) for name in names[1:]}
    return state, {**content, **framework.load(path / SHARED_FILE)}
