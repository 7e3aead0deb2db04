"""A process's rank and device."""

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Deque, List, Optional

# Elements (4 bytes each) of the collectives that open connections before the clock starts. NCCL connects on first use,
# and since 2.22 separately for each algorithm (NCCL_RUNTIME_CONNECT); small and large collectives use different ones.
CONNECTING = (1, 1 << 24)


@dataclass(frozen=True)
class Ranks:
    """Rank and number of ranks, over all nodes and on this node, and the framework's device of this rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    context: Any


def unlimited_memory(context: Any) -> float:
    """Return infinity: ``memory`` of a framework none of whose configurations has a memory estimate."""
    return math.inf


def no_compiled_code(path: Path, ranks: Ranks) -> None:
    """Do nothing: ``load_compiled`` and ``save_compiled`` of a framework that cannot save compiled code."""


class Lines:
    """Append flushed lines to a file on rank 0; a no-op on other ranks."""

    def __init__(self, path: Path, rank: int) -> None:
        self._file = open(path, "a", encoding="utf-8") if rank == 0 else None  # noqa: SIM115

    def write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(f"{line}\n")
            self._file.flush()


class Lagged:
    """Values that are read ``lag`` sends later.

    Reading a sum immediately would synchronize with the device in every step. The delayed read also limits how far
    Python runs ahead of the device, and all ranks read the same sum in the same step, so that they can agree to
    stop.
    """

    def __init__(self, lag: int = 2) -> None:
        self.lag = lag
        self._waiting: Deque[Callable[[], List[float]]] = deque()

    def send(self, read: Callable[[], List[float]]) -> Optional[List[float]]:
        """Store ``read``; return the value sent ``lag`` sends ago, or None."""
        self._waiting.append(read)
        return self._waiting.popleft()() if len(self._waiting) > self.lag else None

    def drain(self) -> List[List[float]]:
        return [self._waiting.popleft()() for _ in range(len(self._waiting))]
