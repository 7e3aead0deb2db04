"""Asynchronous evaluations that overlap with training, as in the SSD and Mask R-CNN submissions.

An evaluator runs on rank 0, in separate processes, and implements

    open()                     called before the first evaluation; loads the ground truth
    start(epoch, predictions)  starts evaluating the predictions after ``epoch``, from 1, and stores them in a file
    again(epoch)               restarts the evaluation from the file, in a resumed run
    poll()                     returns the oldest new result, None if it is in progress; raises Problem
    keep(epochs)               may remove the files of other epochs
    finish()                   waits for work without a result, such as pictures; after the clock has stopped
    close()                    terminates its processes
"""

import time
from collections import deque
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.common.run.checkpoints import KEPT as CHECKPOINTS

Result = Mapping[str, float]


@dataclass(frozen=True)
class Begun:
    """An evaluation in progress, with the data for its log lines."""

    position: int  # steps done before it
    epoch: int  # from 1
    started: float  # Unix time; preserved by a resume


class PendingEvaluations:
    """Evaluations in progress, and whether their results end the run.

    ``log`` is called with each evaluation and its result in order of their start, and returns whether the run ends.
    Without an evaluator, as on all ranks except 0, nothing is pending.
    """

    def __init__(self, log: Callable[[Begun, Result], bool], state: List[Dict[str, Any]]) -> None:
        """Restore the result of ``saved``; these evaluations restart once an evaluator is set."""
        self._log, self._begun = log, [Begun(**fields) for fields in state]
        self._evaluator: Any = None
        # Epochs whose files are needed by the retained checkpoints
        self._saved = deque([[fields.epoch for fields in self._begun]], CHECKPOINTS)
        self.ends = False
        self.problem: Optional[Problem] = None  # why no result will come

    def open(self, evaluator: Any, ends: bool) -> None:
        """Set the evaluator; ``ends``: the run has reached its end except for the last log lines."""
        self._evaluator, self.ends = evaluator, ends
        self._ask(evaluator.open)
        for evaluation in self._begun:
            self._ask(evaluator.again, evaluation.epoch)

    def saved(self) -> List[Dict[str, Any]]:
        """Return the state for a checkpoint, and retain the files that a run resumed from it needs."""
        self._saved.append([evaluation.epoch for evaluation in self._begun])
        return [asdict(evaluation) for evaluation in self._begun]

    @property
    def votes(self) -> Tuple[bool, bool, bool]:
        """Whether a result ends the run, whether the evaluator failed, and whether a result is pending."""
        return self.ends, self.problem is not None, self._is_waiting()

    def _is_waiting(self) -> bool:
        return self._evaluator is not None and bool(self._begun) and not self.ends

    def start(self, evaluation: Begun, predictions: Any) -> None:
        if self._evaluator is not None:
            self._ask(self._evaluator.start, evaluation.epoch, predictions)
            self._begun.append(evaluation)

    def forget(self) -> None:
        self._begun.clear()

    def collect(self) -> bool:
        """Log the available results; return whether there was one."""
        count = len(self._begun)
        while self._is_waiting() and self.problem is None:
            result = self._ask(self._evaluator.poll)
            if result is None:
                break
            finished = self._begun.pop(0)
            self.ends = self._log(finished, result)
            self._evaluator.keep(
                {finished.epoch, *(evaluation.epoch for evaluation in self._begun), *chain(*self._saved)}
            )
        return len(self._begun) < count

    def finish(self) -> None:
        if self._evaluator is not None:
            self._evaluator.finish()

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()

    # Call the evaluator; keep a problem until all ranks know of it.
    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Problem as problem:
            self.problem = problem
            return None


def pause() -> None:
    time.sleep(0.05)
