"""How long a device has nothing to do because its next batch is not there."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Optional, TypeVar

T = TypeVar("T")


class InputWait:
    """Sums up the time of fetches, of each one from when the device has finished all earlier steps.

    Where steps are queued, Python fetches a batch while the device computes: only what is left of the fetch when the
    device is idle makes the training slower. ``finish`` waits until it is; without it a step is done when it returns.
    """

    def __init__(self, finish: Optional[Callable[[], Any]] = None) -> None:
        self._finish = finish
        self._watch: Optional[threading.Thread] = None
        self._idle_since = self._seconds = 0.0
        self._error: Optional[Exception] = None

    def fetch(self, call: Callable[[], T]) -> T:
        """Return what ``call`` does, and count the time in which the device waits for it."""
        started = time.perf_counter()
        # A watch that began in an earlier fetch and has not ended says that the device was never idle meanwhile.
        if self._finish is not None and not self._is_watching():
            # A daemon: a rank that fails must not wait for work that needs the other ranks.
            self._watch = threading.Thread(target=self._watch_device, args=(self._finish,), daemon=True)
            self._watch.start()
        fetched = call()
        if not self._is_watching():
            idle_since = started if self._finish is None else max(started, self._idle_since)
            self._seconds += time.perf_counter() - idle_since
        return fetched

    def take(self) -> float:
        """Return the seconds since the last call of this; afterwards nothing watches the device."""
        if self._watch is not None:
            self._watch.join()
        self._raise_error()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _is_watching(self) -> bool:
        self._raise_error()
        return self._watch is not None and self._watch.is_alive()

    def _watch_device(self, finish: Callable[[], Any]) -> None:
        try:
            finish()
        except Exception as error:  # of a step; whoever waits first gets it
            self._error = error
        self._idle_since = time.perf_counter()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
