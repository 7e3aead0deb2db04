"""What a process knows of its place in the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ranks:
    """Rank and number of ranks, over all nodes and on this node, and the framework's device of this rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    context: Any
