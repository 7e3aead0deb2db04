"""Time a call that queues its work on a device."""

from __future__ import annotations

import time
from typing import Any, Callable


def seconds_of(call: Callable[[], Any], count: int, synchronize: Callable[[], Any]) -> float:
    """Return the seconds of one of ``count`` calls; ``synchronize`` waits for the device, and may for other ranks."""
    synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return (time.perf_counter() - started) / count
