"""NVML, the driver's own library, while it is asked something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def devices() -> Iterator[list[Any]]:
    """Yield a handle of each GPU in the order of nvidia-smi; none where the library does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        yield [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def text(value: str | bytes) -> str:
    """Return a text of NVML, whose older versions give bytes."""
    return value.decode() if isinstance(value, bytes) else value
