"""Time calls that queue work on a device, and the device's idle time while its next batch is fetched."""

import threading
import time
from typing import Any, Callable, Optional, TypeVar

T = TypeVar("T")


def seconds_of(call: Callable[[], Any], count: int, synchronize: Callable[[], Any]) -> float:
    """Return the mean seconds of ``count`` calls; ``synchronize`` waits for the device, optionally for all ranks."""
    synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return (time.perf_counter() - started) / count


class InputWait:
    """Accumulate fetch time, starting when the device has finished all earlier steps.

    If steps are queued, Python fetches a batch while the device computes; only the part of the fetch in which the
    device is idle slows the training down. ``finish`` waits until the device is idle; None: a step is complete when
    it returns.
    """

    def __init__(self, finish: Optional[Callable[[], Any]] = None) -> None:
        self._finish = finish
        self._watch: Optional[threading.Thread] = None
        self._idle_since = self._seconds = 0.0
        self.total = 0.0  # seconds of all fetches so far
        self._error: Optional[Exception] = None

    def fetch(self, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        # If a watch from an earlier fetch is still running, the device has not been idle since.
        if self._finish is not None and not self._is_watching():
            # A daemon: a rank that fails must not wait for work that needs the other ranks.
            self._watch = threading.Thread(target=self._watch_device, daemon=True)
            self._watch.start()
        fetched = call()
        if not self._is_watching():
            waited = time.perf_counter() - max(started, self._idle_since)
            self._seconds += waited
            self.total += waited
        return fetched

    def take(self) -> float:
        """Return the seconds since the last call; afterwards no thread watches the device."""
        if self._watch is not None:
            self._watch.join()
        self._is_watching()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _is_watching(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._watch is not None and self._watch.is_alive()

    def _watch_device(self) -> None:
        assert self._finish is not None
        try:
            self._finish()
        except Exception as error:  # raised by a step; reported by the next wait
            self._error = error
        self._idle_since = time.perf_counter()
