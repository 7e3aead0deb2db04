"""Atomic checkpoint folders for any framework.

``checkpoint/step_00000123/`` holds ``state.json`` and the files of the framework, each with its SHA-256 in
``NAME.sha256`` (readable by ``sha256sum --check``). A folder is filled under a temporary name and renamed when it is
complete, so that a crash cannot leave a partial checkpoint. The last two are retained: if the newest is damaged, it
is renamed to ``damaged_00000123`` and the previous one is used.

``save_async`` overlaps with training: it copies the content, and a thread on each rank writes it. The save is
complete when the thread of rank 0 has seen the checksums of all ranks' files; no collective is needed. A rank that
cannot write leaves a file ``rank_0.failed``.
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
KEPT = 2  # retained checkpoints: the newest, and a fallback if it is damaged
CHUNK = 1 << 24
Content = Callable[[], Mapping[str, Any]]


class Checkpoints:
    """A run's checkpoints: shared content from rank 0, local content from every rank, and the log lengths.

    ``framework``: a module of benchmarks/common/frameworks. ``find``, ``save`` and ``save_async`` are collective
    calls.
    """

    def __init__(
        self, folder: Path, logs: Sequence[Path], framework: Any, ranks: Ranks, reshards: bool = False
    ) -> None:
        """Store checkpoints in ``folder``; ``reshards``: a different number of ranks can read them."""
        self._folder, self._logs, self._framework, self._ranks = folder, logs, framework, ranks
        self._reshards = reshards
        self._lengths: List[int] = []
        self._copies: Dict[str, Any] = {}  # buffers of the last ``save_async``, reused by the next
        self._writing: Optional["Future[float]"] = None  # the save in flight
        self.found: Optional[Path] = None
        self.damaged: Dict[str, str] = {}  # problems of newer checkpoints that ``find`` skipped, by name

    def find(self) -> Dict[str, Any]:
        """Find the newest valid checkpoint and return its state, or {}; truncate the logs to that step.

        Raises:
            SystemExit: the checkpoint has a different number of ranks, or all checkpoints are damaged.
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
            self.damaged[path.name] = damage or f"rank {ranks[0]} found its part damaged"
        if candidates:
            # Keep all checkpoints: resuming must fail again instead of starting from step 0.
            damages = "; ".join(f"{name}: {damage}" for name, damage in self.damaged.items())
            raise SystemExit(
                f"all checkpoints in {self._folder} are damaged: this experiment cannot be resumed\n"
                f"  found: {damages}\n  hint: start a new run; or restore the folder from a backup"
            )
        return {}

    # Return the problems of the files that this rank reads, or an empty string.
    def _damage(self, path: Path) -> str:
        # With a different rank count this rank's file may be missing. It is rejected later, not reported as damage.
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
                    problems.append(f"{log.name} is shorter than when it was written")
                elif _digest(log, length) != digest:
                    problems.append(f"{log.name} has changed since it was written")
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
        # Keep what was logged after the checkpoint in a .discarded file.
        for log, length in zip(self._logs, lengths):
            data = log.read_bytes()
            if len(data) > length:
                with open(f"{log}.discarded", "ab") as discarded:
                    discarded.write(data[length:])
                os.truncate(log, length)

    def load(self) -> Dict[str, Any]:
        """Return shared and local content, or {} without a checkpoint.

        With ``reshards``, "every_rank" iterates over the local content of all ranks instead.
        """
        if self.found is None:
            return {}
        shared = self._framework.load(self.found / SHARED_FILE)
        if self._reshards:
            parts = [self.found / f"rank_{rank}" for rank in range(_read_state(self.found)["ranks"])]
            return {**shared, "every_rank": map(partial(self._framework.load, in_parts=True), parts)}
        # Load the local file last: loading restores the random generators of the rank that wrote the file.
        return {**shared, **self._framework.load(self.found / f"rank_{self._ranks.rank}")}

    def mark_logs(self) -> None:
        """Store the current log lengths; a resumed run logs all later lines again."""
        if self._ranks.rank == 0:
            self._lengths = [path.stat().st_size for path in self._logs]

    def save(self, step: int, state: Mapping[str, Any], shared: Content, local: Content, kind: str = "step") -> None:
        """Write a checkpoint and wait. ``local`` is called on all ranks, then ``shared`` on rank 0.

        ``kind``: "trained" is the final model, which is never resumed from.
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
        """Start writing a checkpoint and return once its content is copied; see ``poll_save``.

        The previous save must be complete.
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
        """Return a completed asynchronous save's write time in seconds, once; else None.

        ``waits``: block until the save is complete. Raises the error that stopped this rank, or on rank 0 any rank.
        """
        if self._writing is None or not (waits or self._writing.done()):
            return None
        future, self._writing = self._writing, None
        return future.result()

    # Contents by the names of the files that this rank writes; ``local`` is called first.
    def _contents(self, shared: Content, local: Content) -> Dict[str, Mapping[str, Any]]:
        contents = {f"rank_{self._ranks.rank}": local()}
        return {SHARED_FILE: shared(), **contents} if self._ranks.rank == 0 else contents

    def _open(self, step: int) -> Path:
        temporary = self._folder / f"writing_{step:08d}"
        if self._ranks.rank == 0:
            for leftover in self._folder.glob("writing_*"):  # left by a killed run
                shutil.rmtree(leftover)
            temporary.mkdir(parents=True)
        self._framework.barrier()
        return temporary

    # Write the copies, on rank 0 also the complete checkpoint. Return the duration in seconds.
    def _write(self, temporary: Path, name: str, state: Mapping[str, Any], lengths: Sequence[int]) -> float:
        began = time.time()
        try:
            for file_name, copy in self._copies.items():
                self._framework.write(temporary / file_name, copy)
                _write_digest(temporary / file_name)
        except BaseException as error:
            with suppress(OSError):  # a full disk may have room for the file name only
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
    """Write ``state``, rename the folder to ``final``, and remove all older checkpoints except KEPT."""
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


# Return the SHA-256 of the first ``length`` bytes.
def _digest(path: Path, length: int = sys.maxsize) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(min(CHUNK, length - file.tell())), b""):
            digest.update(chunk)
    return digest.hexdigest()


def _write_digest(path: Path) -> None:
    with in_one_step(Path(f"{path}{DIGEST}")) as file:
        file.write(f"{_digest(path)}  {path.name}\n".encode("ascii"))


# Return how a file differs from its checksum, or an empty string.
def _file_damage(path: Path) -> str:
    try:
        expected = Path(f"{path}{DIGEST}").read_text(encoding="ascii").split()
        if expected == [_digest(path), path.name]:
            return ""
    except OSError as error:
        return f"{Path(error.filename).name}: {error.strerror}"
    except UnicodeDecodeError:
        return f"{path.name}{DIGEST} is not a checksum"
    return f"{path.name} differs from its checksum"


def save_arrays(path: Path, content: Mapping[str, Any]) -> None:
    """Write float arrays and bytes by name, for frameworks that convert tensors to NumPy."""
    arrays: Dict[str, Any] = {
        name: np.frombuffer(v, np.uint8) if isinstance(v, bytes) else v for name, v in content.items()
    }
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def load_arrays(path: Path) -> Dict[str, Any]:
    with np.load(str(path)) as arrays:
        return {name: arrays[name].tobytes() if arrays[name].dtype == np.uint8 else arrays[name] for name in arrays}


def read_for_inference(folder: Path, framework: Any) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Return state and content of the newest checkpoint in ``folder``, written by any number of ranks.

    The final model ("trained") is preferred to a checkpoint for resuming, unless training continued during the last
    asynchronous evaluation and the evaluated checkpoint still exists. The content is the shared content, with the
    local content under "rank_0", "rank_1" ...

    Raises:
        Problem: no checkpoint exists, or the newest one is damaged.
    """
    paths = sorted(folder.glob("trained_*")) or sorted(folder.glob("step_*"))
    if not paths:
        raise Problem(
            f"no checkpoint in {folder}",
            "a run that kept one",
            "train with --set checkpoint_interval=1: the final model is saved too",
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
        raise Problem(f"{path} is damaged: {problems[0]}", "an unmodified checkpoint", "export another run")
    content = {name: framework.load(path / name) for name in names[1:]}
    return state, {**content, **framework.load(path / SHARED_FILE)}
