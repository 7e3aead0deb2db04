"""The place of a process in the job."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Deque, List, Optional

# Elements, of 4 bytes, of the collectives that open connections before the clock: NCCL connects when the first one
# asks, and since 2.22 for each algorithm by itself (NCCL_RUNTIME_CONNECT), of which small and large ones have others.
CONNECTING = (1, 1 << 24)


@dataclass(frozen=True)
class Ranks:
    """Rank and number of ranks, over all nodes and on this node, and the framework's device of this rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    context: Any


class Lines:
    """Appends lines to a file on rank 0, each flushed, so that a reader can follow the run; nothing on other ranks."""

    def __init__(self, path: Path, rank: int) -> None:
        self._file = open(path, "a", encoding="utf-8") if rank == 0 else None  # noqa: SIM115

    def write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(f"{line}\n")
            self._file.flush()


class Lagged:
    """Values handed out ``lag`` sends after they were sent, each by a call that waits for it.

    Reading a sum at once would stop the device at every step. The late reading also keeps Python from running
    ahead of the device by more than ``lag`` steps, and all ranks read the same sum at the same step, so that
    they can agree to stop.
    """

    def __init__(self, lag: int = 2) -> None:
        self.lag = lag
        self._waiting: Deque[Callable[[], List[float]]] = deque()

    def send(self, read: Callable[[], List[float]]) -> Optional[List[float]]:
        """Keep ``read`` for later; return what was sent ``lag`` sends ago, None at first."""
        self._waiting.append(read)
        return self._waiting.popleft()() if len(self._waiting) > self.lag else None

    def drain(self) -> List[List[float]]:
        return [self._waiting.popleft()() for _ in range(len(self._waiting))]
