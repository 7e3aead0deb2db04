"""A run's MLPerf result log in its round's format, written by rank 0.

All formats implement the same methods, so that Run is independent of the round::

    :::MLPv0.5.0 gnmt 1541720386.718600000 (train.py:49) eval_accuracy: {"epoch": 0, "value": 18.87}     v0.5
    :::MLL 1560822683.386 eval_accuracy: {"value": 20.12, "metadata": {"epoch_num": 1, ...}}            v0.6
    :::MLLOG {"time_ms": 1592669288183, "key": "eval_accuracy", "value": 0.2012, ...}                   v0.7 and later
"""

import inspect
import json
import logging
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from mlperf_logging.mllog import constants
from mlperf_logging.mllog.mllog import MLLogger

from benchmarks.common.run.ranks import Lines


def value_of(qualities: Mapping[str, float]) -> Any:
    """Return a number for a single quality, else a dict by name, as in the submitted logs."""
    return next(iter(qualities.values())) if len(qualities) == 1 else dict(qualities)


def samples(train: int, evaluation: int) -> Dict[str, Any]:
    """Return the events for the data set sizes, logged after opening the input."""
    return {constants.TRAIN_SAMPLES: train, constants.EVAL_SAMPLES: evaluation}


class Noted(NamedTuple):
    """An event value with the metadata that some rounds require."""

    value: Any
    metadata: Dict[str, Any]


@dataclass(frozen=True)
class Wording:
    """A benchmark's log conventions, as in the submitted logs."""

    benchmark: str  # name in v0.5 lines
    accuracy_first: bool = False  # eval_accuracy comes before eval_stop
    evaluated_at: str = "epoch_num"  # key of the number with an evaluation, from v0.7 on
    factor: float = 1.0  # multiplies each quality from v0.7 on: BLEU 25.0 is logged as 0.25
    # Log names of the qualities, if several are logged under other names.
    names: Mapping[str, str] = field(default_factory=dict)
    # From v0.6 on the clock stops, in hindsight, where the first model was saved that reached the target.
    off_clock: bool = False
    # v0.5 keys that differ from V05_KEYS, by the key of later rounds; () omits the key.
    v05_keys: Mapping[str, Tuple[str, ...]] = field(default_factory=dict)


def log_of(wording: Wording, path: Path, rank: int, round_name: str) -> Any:
    if round_name == "v0.5":
        return V05Log(path, rank, wording)
    return MLLog(path, rank, wording, round_name)


class MLLog:
    """Log of v0.6 and later. Epochs count from 1 in the log, from 0 in the code.

    Every line is flushed, so that readers can follow the run.
    """

    def __init__(self, path: Path, rank: int, wording: Wording, round_name: str = "v0.7") -> None:
        self._wording, self._is_v06 = wording, round_name == "v0.6"
        self._wants_epoch_num = round_name < "v6.0"
        self._saves = path if wording.off_clock and rank == 0 else None
        self._log: Any = _V06Lines(path, rank) if self._is_v06 else _mlperf_logger(path, rank)

    def init_start(self, seed: int) -> None:
        self._log.start(constants.INIT_START)
        self.event(constants.SEED, seed)

    def init_stop(self, choices: Optional[Mapping[str, Any]] = None) -> None:
        """Log the end of the untimed initialization, with the resolved "auto" settings."""
        self._log.end(constants.INIT_STOP, metadata={"choices": dict(choices)} if choices else {})

    def run_start(self) -> None:
        self._log.start(constants.RUN_START)

    def event(self, key: str, value: Any = None) -> None:
        """Log POINT_IN_TIME of ``key``."""
        noted = value if isinstance(value, Noted) else Noted(value, {})
        self._log.event(key, noted.value, metadata=noted.metadata)

    def block_start(self, first_epoch: int, epochs: int) -> None:
        self._log.start(constants.BLOCK_START, metadata={"first_epoch_num": first_epoch + 1, "epoch_count": epochs})

    def block_stop(self, first_epoch: int) -> None:
        self._log.end(constants.BLOCK_STOP, metadata={"first_epoch_num": first_epoch + 1})

    def epoch_start(self, epoch: int) -> None:
        self._log.start(constants.EPOCH_START, metadata={"epoch_num": epoch + 1})

    def epoch_stop(self, epoch: int) -> None:
        """Log an epoch's end, and the saved model if models are evaluated after the run."""
        if self._wording.off_clock:
            self._log.event("save_model", {"iteration": epoch + 1})
        self._log.end(constants.EPOCH_STOP, metadata={"epoch_num": epoch + 1})

    def eval_start(self, epoch_num: float) -> None:
        """Log an evaluation's start; ``epoch_num`` in log units."""
        self._log.start(constants.EVAL_START, metadata={self._wording.evaluated_at: epoch_num})

    def eval_stop(self, epoch_num: float, qualities: Mapping[str, float], targets: Mapping[str, float]) -> None:
        metadata = {self._wording.evaluated_at: epoch_num}
        if not self._wording.accuracy_first:
            self._log.end(constants.EVAL_STOP, metadata=metadata)
        factor = 1.0 if self._is_v06 else self._wording.factor
        # 24.0 * 0.01 is not 0.24, which a checker compares with.
        values = {self._wording.names.get(name, name): round(value * factor, 12) for name, value in qualities.items()}
        # The open division requires epoch_num until v5.1 for every benchmark; AMD's v5.1 logs contain both keys with
        # the same number.
        noted = {"epoch_num": epoch_num, **metadata} if self._wants_epoch_num else metadata
        self._log.event(constants.EVAL_ACCURACY, value_of(values), metadata=noted)
        if self._wording.accuracy_first:
            self._log.end(constants.EVAL_STOP, metadata=metadata)

    def run_stop(self, reached: bool) -> None:
        status = {"status": "success" if reached else "aborted"}
        if self._saves is None:
            self._log.end(constants.RUN_STOP, metadata=status)
        else:
            self._stop_at_save(self._saves, status)

    # Log the last evaluated model and its save time in seconds since run_start; v0.6 lacks run_stop.
    #
    # The clock stops retroactively when the first model that reached the target was saved (MLPerf training rules,
    # "timing": time-stamped checkpoints). The times are read from the log, which also works for resumed runs.
    def _stop_at_save(self, path: Path, status: Mapping[str, str]) -> None:
        started, saves, evaluated = 0.0, {}, None
        last: Mapping[str, Any] = {}
        for key, seconds, value, metadata in _events(path):
            if key == constants.RUN_START:
                started = seconds
            elif key == "save_model":
                saves[value["iteration"]] = seconds
            elif key == constants.EVAL_ACCURACY:
                evaluated, last = value, metadata
        number = int(last.get("epoch_num", 0))
        counts = number in saves and status["status"] == "success"
        # The submitted logs have 0 where no model reached the target.
        timestamp = round(saves[number] - started, 6) if counts else 0
        if last and self._is_v06:
            self._log.event("eval_result", None, metadata={"iteration": number, "timestamp": timestamp})
        elif last:
            self._log.event("eval_result", evaluated, metadata={"epoch_num": number, "timestamp": timestamp})
        if not self._is_v06:
            time_ms = round((started + timestamp) * 1000) if counts else None
            self._log.end(constants.RUN_STOP, metadata=dict(status), time_ms=time_ms)


# Line format of v0.6 and later
LINE = re.compile(r":::MLL(?:OG)? (?:(\S+) (\w+): )?(\{.*\})$")


# Yield key, Unix time, value and metadata of every event.
def _events(path: Path) -> Iterator[Tuple[str, float, Any, Mapping[str, Any]]]:
    for match in filter(None, map(LINE.search, path.read_text(encoding="utf-8").splitlines())):
        content = json.loads(match.group(3))
        key, seconds = match.group(2), match.group(1)
        if key is None:
            key, seconds = content["key"], content["time_ms"] / 1000
        yield key, float(seconds), content["value"], content["metadata"]


def _mlperf_logger(path: Path, rank: int) -> Any:
    logger = logging.Logger("encore.mllog", logging.INFO)  # not getLogger's, which would keep an earlier run's file
    logger.addHandler(logging.FileHandler(path, encoding="utf-8") if rank == 0 else logging.NullHandler())
    return MLLogger(logger=logger, default_stack_offset=2)


# Return file and line of the calling code. inspect.stack would take 8 ms of timed training.
def _caller() -> Tuple[str, int]:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return (Path(frame.f_code.co_filename).name, frame.f_lineno) if frame is not None else ("", 0)


# ``:::MLL UNIX_SECONDS KEY: {"value": ..., "metadata": {...}}``, the v0.6 counterpart of MLLogger.
class _V06Lines:
    def __init__(self, path: Path, rank: int) -> None:
        self._lines = Lines(path, rank)

    def event(self, key: str, value: Any = None, metadata: Optional[Mapping[str, Any]] = None) -> None:
        file, line = _caller()
        content = {"value": value, "metadata": {**(metadata or {}), "file": file, "lineno": line}}
        self._lines.write(f":::MLL {time.time():.6f} {key}: {json.dumps(content)}")

    start = end = event


# Tags of mlperf_compliance 0.0.10 (tags.py) for the keys of later rounds; other keys are unchanged.
V05_KEYS: Mapping[str, Tuple[str, ...]] = {
    constants.GLOBAL_BATCH_SIZE: ("input_batch_size",),
    constants.OPT_BASE_LR: ("opt_learning_rate",),
    constants.OPT_ADAM_BETA_1: ("opt_hp_Adam_beta1",),
    constants.OPT_ADAM_BETA_2: ("opt_hp_Adam_beta2",),
    constants.OPT_ADAM_EPSILON: ("opt_hp_Adam_epsilon",),
    constants.MAX_SEQUENCE_LENGTH: ("input_max_length",),
    constants.TRAIN_SAMPLES: ("preproc_num_train_examples", "input_size"),
    constants.EVAL_SAMPLES: ("preproc_num_eval_examples", "eval_size"),
}


class V05Log:
    """``:::MLPv0.5.0 BENCHMARK UNIX_SECONDS (FILE:LINE) KEY: JSON``, the v0.5 format; epochs count from 0.

    v0.5 lacks untimed initialization: its clock includes model construction. Here, building the model also selects
    kernels and captures graphs, which no v0.5 submission timed, so all this is done before run_start, between
    init_start and init_stop. These tags of later rounds record its duration.
    """

    def __init__(self, path: Path, rank: int, wording: Wording) -> None:
        self._benchmark, self._names = wording.benchmark, wording.names
        self._keys = {**V05_KEYS, **wording.v05_keys}
        self._lines = Lines(path, rank)
        self._held: Optional[List[Tuple[str, Any]]] = None

    def event(self, key: str, value: Any = None) -> None:
        """Log ``key`` under its v0.5 tags with a JSON ``value``, after run_start, as in the submitted logs."""
        if self._held is not None:
            self._held.append((key, value))
            return
        plain = value.value if isinstance(value, Noted) else value
        for tag in self._keys.get(key, (key,)):
            self._write(tag, plain)

    def _write(self, key: str, value: Any = None) -> None:
        text = "" if value is None else f": {json.dumps(value)}"
        file, line = _caller()
        self._lines.write(f":::MLPv0.5.0 {self._benchmark} {time.time():.9f} ({file}:{line}) {key}{text}")

    def init_start(self, seed: int) -> None:
        self._write(constants.INIT_START)
        self._held = [("run_set_random_seed", seed)]

    def init_stop(self, choices: Optional[Mapping[str, Any]] = None) -> None:
        self._write(constants.INIT_STOP, {"choices": dict(choices)} if choices else None)

    def _ignore(self, *_: int) -> None:
        """Log nothing: v0.5 lacks blocks and epoch ends."""

    block_start = block_stop = epoch_stop = _ignore

    def run_start(self) -> None:
        self._write(constants.RUN_START)
        deferred, self._held = self._held or [], None
        for key, value in deferred:
            self.event(key, value)
        self._write("train_loop")

    def epoch_start(self, epoch: int) -> None:
        self._write("train_epoch", epoch)

    def eval_start(self, epoch_num: float) -> None:
        self._write("eval_start", epoch_num - 1)

    def eval_stop(self, epoch_num: float, qualities: Mapping[str, float], targets: Mapping[str, float]) -> None:
        reached, goals = (
            {self._names.get(name, name): values[name] for name in values} for values in (qualities, targets)
        )
        self._write("eval_accuracy", {"epoch": epoch_num - 1, "value": value_of(reached)})
        self._write("eval_target", value_of(goals))
        self._write("eval_stop", epoch_num - 1)

    def run_stop(self, reached: bool) -> None:
        self._write("run_stop", {"success": reached})
        self._write("run_final")
