"""Measure the peak compute and memory throughput of this device: a GEMM per precision, copy and triad.

    from benchmarks.common.checks import measured_peaks
    print(measured_peaks.flops_per_second(torch.device("cuda"), "bf16"))

These are the ceilings of the roofline: measured, not from the data sheet. A GEMM with two square matrices counts
2 n^3 operations; the triad a = b + s * c moves three arrays, the copy two (McCalpin, STREAM, which does not
count the read for ownership, either).
"""

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.frameworks.pytorch import DTYPES
from benchmarks.common.run.timing import seconds_of

# By device type. CPUs are not used for training in fp16, and only GPUs have TF32.
PRECISIONS = {"cuda": ("fp32", "tf32", "bf16", "fp16"), "cpu": ("fp32", "bf16")}
SIDE = {"cuda": 8192, "cpu": 2048}  # rows of the matrices: large enough that memory is not the limit
# Elements per fp32 array: 1 GiB and 128 MiB, much larger than caches except on the largest servers
ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 25}
SECONDS = 0.5  # duration per measurement, after the first call
REPEATS = 3  # repeats per measurement; the fastest is the peak
# A CPU without bf16 instructions computes element by element, not faster for large matrices than for small ones.
PROBED, LONGEST = 256, 2.0  # size for the first GEMM, and maximum seconds for a measured one


def measure(device: torch.device) -> Dict[str, Any]:
    return {
        "device": device.type,
        "name": name_of(device),
        "library": f"PyTorch {torch.__version__}",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "flops_per_second": {precision: flops_per_second(device, precision) for precision in PRECISIONS[device.type]},
        "bytes_per_second": bytes_per_second(device),
    }


def name_of(device: torch.device) -> str:
    """Return the GPU's name; empty for a CPU, which the host identifies."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def flops_per_second(device: torch.device, precision: str, n: int = 0, seconds: float = SECONDS) -> float:
    """Return the peak FLOP/s for an n x n GEMM."""

    def product(size: int) -> Callable[[], Any]:
        a, b = (torch.rand(size, size, device=device, dtype=DTYPES[precision]) for _ in range(2))
        result = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=result)

    with _tf32(precision == "tf32"):
        size = n or SIDE[device.type]
        probe = product(PROBED)
        probe()
        once = seconds_of(probe, 1, pytorch.synchronize)
        while not n and size > PROBED and once * (size / PROBED) ** 3 > LONGEST:
            size //= 2
        return 2.0 * size**3 / fastest(product(size), seconds)


def bytes_per_second(device: torch.device, elements: int = 0, seconds: float = SECONDS) -> Dict[str, float]:
    count = elements or ELEMENTS[device.type]
    first, second, target = (torch.ones(count, device=device) for _ in range(3))
    moved = 4.0 * count
    return {
        "copy": 2 * moved / fastest(lambda: target.copy_(first), seconds),
        "triad": 3 * moved / fastest(lambda: torch.add(first, second, alpha=3.0, out=target), seconds),
    }


def fastest(call: Callable[[], Any], seconds: float = SECONDS) -> float:
    call()  # chooses a kernel, touches the memory
    once = seconds_of(call, 1, pytorch.synchronize)
    count = max(1, int(seconds / max(once, 1e-7)))
    return min(seconds_of(call, count, pytorch.synchronize) for _ in range(REPEATS))


@contextmanager
def _tf32(enabled: bool) -> Iterator[None]:
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous
