"""The MLPerf result log of one run, in the dialect of its round; rank 0 alone writes.

Both dialects have the same methods, one for each moment of a run, so that Run need not know the round.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional

from mlperf_logging.mllog import constants
from mlperf_logging.mllog.mllog import MLLogger


def value_of(qualities: Mapping[str, float]) -> Any:
    """Return a single quality as its number, several by their names, as the rounds' logs have them."""
    return next(iter(qualities.values())) if len(qualities) == 1 else dict(qualities)


def samples(train: int, evaluation: int) -> Dict[str, Any]:
    """Return the events of the data set's sizes, logged once the input is open."""
    return {constants.TRAIN_SAMPLES: train, constants.EVAL_SAMPLES: evaluation}


class Noted(NamedTuple):
    """A value of an event with its metadata, where a round's rules ask for more than the value."""

    value: Any
    metadata: Dict[str, Any]


class MLLog:
    """``:::MLLOG`` lines of mlperf-logging, v0.6 and later; epochs are counted from 1 in the log, from 0 here.

    Each line is flushed as it is written, so that a reader can follow the run.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        accuracy_first: bool = False,
        factor: float = 1.0,
        names: Optional[Mapping[str, str]] = None,
    ) -> None:
        """Append to ``path``.

        Args:
            path: of the log.
            rank: of this process.
            accuracy_first: log eval_accuracy before eval_stop, as some submissions do.
            factor: on each quality, whose unit is another one in the log (BLEU of 25.0 is 0.25 there).
            names: of qualities in the log, where several are logged by other names than the benchmark's.
        """
        self._accuracy_first, self._factor, self._names = accuracy_first, factor, names or {}
        logger = logging.Logger("encore.mllog", logging.INFO)  # not getLogger's, which would keep an earlier run's file
        logger.addHandler(logging.FileHandler(path, encoding="utf-8") if rank == 0 else logging.NullHandler())
        self._log = MLLogger(logger=logger, default_stack_offset=2)

    def init_start(self, seed: int) -> None:
        """Log the beginning of the untimed part."""
        self._log.start(constants.INIT_START)
        self.event(constants.SEED, seed)

    def init_stop(self) -> None:
        """Log the end of the untimed part."""
        self._log.end(constants.INIT_STOP)

    def run_start(self) -> None:
        """Log the moment from which time counts."""
        self._log.start(constants.RUN_START)

    def event(self, key: str, value: Any = None) -> None:
        """Log POINT_IN_TIME of ``key``."""
        noted = value if isinstance(value, Noted) else Noted(value, {})
        self._log.event(key, noted.value, metadata=noted.metadata)

    def block_start(self, first_epoch: int, epochs: int) -> None:
        """Log the start of a block of epochs."""
        self._log.start(constants.BLOCK_START, metadata={"first_epoch_num": first_epoch + 1, "epoch_count": epochs})

    def block_stop(self, first_epoch: int) -> None:
        """Log the end of the block that began with ``first_epoch``."""
        self._log.end(constants.BLOCK_STOP, metadata={"first_epoch_num": first_epoch + 1})

    def epoch_start(self, epoch: int) -> None:
        """Log the start of an epoch."""
        self._log.start(constants.EPOCH_START, metadata={"epoch_num": epoch + 1})

    def epoch_stop(self, epoch: int) -> None:
        """Log the end of an epoch."""
        self._log.end(constants.EPOCH_STOP, metadata={"epoch_num": epoch + 1})

    def eval_start(self, epoch_num: float) -> None:
        """Log the start of an evaluation; ``epoch_num`` as the log has it."""
        self._log.start(constants.EVAL_START, metadata={"epoch_num": epoch_num})

    def eval_stop(self, epoch_num: float, qualities: Mapping[str, float], targets: Mapping[str, float]) -> None:
        """Log the end of an evaluation and what it found."""
        metadata = {"epoch_num": epoch_num}
        if not self._accuracy_first:
            self._log.end(constants.EVAL_STOP, metadata=metadata)
        # 24.0 * 0.01 is not 0.24, which a checker compares with.
        values = {self._names.get(name, name): round(value * self._factor, 12) for name, value in qualities.items()}
        self._log.event(constants.EVAL_ACCURACY, value_of(values), metadata=metadata)
        if self._accuracy_first:
            self._log.end(constants.EVAL_STOP, metadata=metadata)

    def run_stop(self, reached: bool) -> None:
        """Log the moment up to which time counts."""
        self._log.end(constants.RUN_STOP, metadata={"status": "success" if reached else "aborted"})


class V05Log:
    """``:::MLPv0.5.0 BENCHMARK UNIX_SECONDS (FILE:LINE) KEY: JSON``, as in the logs of v0.5; epochs count from 0.

    That round has no untimed start: building the model belongs to the run.
    """

    def __init__(self, path: Path, rank: int, benchmark: str, names: Optional[Mapping[str, str]] = None) -> None:
        """Append to ``path``; ``names`` are those of qualities in the log, where several are logged by other ones."""
        self._benchmark, self._names = benchmark, names or {}
        self._file = open(path, "a", encoding="utf-8") if rank == 0 else None  # noqa: SIM115

    def event(self, key: str, value: Any = None) -> None:
        """Log ``key`` with a JSON ``value``, or without one, and flush the line."""
        if self._file is None:
            return
        caller = next(frame for frame in inspect.stack(context=0) if frame.filename != __file__)
        place = f"({Path(caller.filename).name}:{caller.lineno})"
        text = "" if value is None else f": {json.dumps(value)}"
        self._file.write(f":::MLPv0.5.0 {self._benchmark} {time.time():.9f} {place} {key}{text}\n")
        self._file.flush()

    def init_start(self, seed: int) -> None:
        """Log the beginning of the run."""
        self.event("run_start")
        self.event("run_set_random_seed", seed)

    def _ignore(self, *_: int) -> None:
        """Log nothing: the clock runs already, and this round has neither blocks nor an epoch's end."""

    init_stop = block_start = block_stop = epoch_stop = _ignore

    def run_start(self) -> None:
        """Log that all is built."""
        self.event("train_loop")

    def epoch_start(self, epoch: int) -> None:
        """Log the start of an epoch."""
        self.event("train_epoch", epoch)

    def eval_start(self, epoch_num: float) -> None:
        """Log the start of an evaluation."""
        self.event("eval_start", epoch_num)

    def eval_stop(self, epoch_num: float, qualities: Mapping[str, float], targets: Mapping[str, float]) -> None:
        """Log what the evaluation found, and its end."""
        found, wanted = ({self._names.get(name, name): each[name] for name in each} for each in (qualities, targets))
        self.event("eval_accuracy", {"epoch": epoch_num, "value": value_of(found)})
        self.event("eval_target", value_of(wanted))
        self.event("eval_stop", epoch_num)

    def run_stop(self, reached: bool) -> None:
        """Log the end of the run."""
        self.event("run_stop", {"success": reached})
        self.event("run_final")
