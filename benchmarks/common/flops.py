"""Model FLOPs of GEMMs, convolutions and training, computed from their sizes.

Counted as in Chowdhery et al. 2022 (arXiv 2204.02311, appendix B): two per multiply-add of GEMMs, convolutions and
attention, without recomputation, padding or elementwise operations. Divided by the peak of the device, they give the
model FLOPs utilization (MFU).
"""

# The gradients with respect to weights and inputs are one GEMM of the same size each.
TRAINING = 3
_ENOUGH = 10_000  # sample count for an estimate of the mean


def evenly(count: int) -> slice:
    """Return a slice of about 10,000 of ``count`` samples to estimate the mean, since the clock is running."""
    return slice(None, None, max(1, count // _ENOUGH))


def product(rows: float, inputs: float, outputs: float) -> float:
    """FLOPs for a (rows, inputs) x (inputs, outputs) GEMM."""
    return 2.0 * rows * inputs * outputs


def convolution(height: int, width: int, kernel: int, in_channels: int, out_channels: int) -> float:
    """FLOPs for a convolution with ``out_channels`` x ``height`` x ``width`` outputs."""
    return product(height * width, kernel * kernel * in_channels, out_channels)
