"""NVML, the driver's own library, while it is asked something."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Value = TypeVar("Value")


@contextmanager
def devices() -> Iterator[list[Any]]:
    """Yield a handle of each GPU in the order of nvidia-smi; none where the library does not answer."""
    import pynvml

    def handles() -> list[Any]:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    try:
        yield known(handles) or []
    finally:
        known(pynvml.nvmlShutdown)


def known(read: Callable[[], Value]) -> Value | None:
    """Return what NVML answers; None where the driver or the GPU does not know."""
    import pynvml

    try:
        return read()
    except pynvml.NVMLError:
        return None


def bus(handle: Any) -> str:
    """Return the PCI address of a GPU."""
    import pynvml

    return text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()


def busses() -> list[str]:
    """Return the PCI address of each GPU; none where the library does not answer."""
    with devices() as handles:
        return known(lambda: [bus(handle) for handle in handles]) or []


def text(value: str | bytes) -> str:
    """Return a text of NVML, whose older versions give bytes."""
    return value.decode() if isinstance(value, bytes) else value
