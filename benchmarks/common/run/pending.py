"""Evaluations that end while training continues, as the submissions of SSD and Mask R-CNN have them.

An evaluator, on rank 0 alone, works in processes of its own and has

``open()``               before the first evaluation, where what it compares with is loaded
``start(epoch, found)``  begins to evaluate what was ``found`` after ``epoch``, from 1; keeps it in a file
``again(epoch)``         begins the same from its file: a resumed run
``poll()``               the oldest result that was not handed out, None while it is worked on; raises Problem
``keep(epochs)``         may remove the files of other epochs
``finish()``             waits for what no result waits for, such as pictures; after the clock has stopped
``close()``              ends its processes at once
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
    """An evaluation that was begun: what its lines in the logs need once it ends."""

    position: int  # steps done before it
    epoch: int  # from 1
    started: float  # Unix time; of a resumed run, that before the resume


class PendingEvaluations:
    """The evaluations that were begun and have not ended, and whether the run is to end because of one.

    ``log`` is called with an evaluation and its result, in the order in which they began, and returns whether the run
    ends. Where no evaluator is given, as on all ranks but 0, nothing is ever pending.
    """

    def __init__(self, log: Callable[[Begun, Result], bool], state: List[Dict[str, Any]]) -> None:
        """Continue with what ``saved`` returned; those evaluations begin anew once there is an evaluator."""
        self._log, self._begun = log, [Begun(**fields) for fields in state]
        self._evaluator: Any = None
        # Epochs whose files the last checkpoints need.
        self._saved = deque([[fields.epoch for fields in self._begun]], CHECKPOINTS)
        self.ends = False
        self.problem: Optional[Problem] = None  # why no result will come

    def open(self, evaluator: Any, ends: bool) -> None:
        """Let ``evaluator`` work for this run, which may have ended but for saying so."""
        self._evaluator, self.ends = evaluator, ends
        self._ask(evaluator.open)
        for evaluation in self._begun:
            self._ask(evaluator.again, evaluation.epoch)

    def saved(self) -> List[Dict[str, Any]]:
        """Return what a checkpoint holds of this, and keep the files that a run needs which resumes from it."""
        self._saved.append([evaluation.epoch for evaluation in self._begun])
        return [asdict(evaluation) for evaluation in self._begun]

    @property
    def votes(self) -> Tuple[bool, bool, bool]:
        """Whether the run ends because of a result, whether none will come, and whether one is to come."""
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
        """Log the results that are there; return whether there was one."""
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
