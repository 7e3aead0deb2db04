"""Floating-point operations of products and convolutions, and of training, from their sizes alone.

Model FLOPs as Chowdhery et al. 2022 (arXiv 2204.02311, appendix B) count them: two for each multiply-add of products,
convolutions and attention, without what an implementation computes twice, on padding or elementwise. Their share of the
device's peak is the model FLOPs utilization (MFU).
"""

# The gradients of a product by its weights and by its inputs are a product of the same size each.
TRAINING = 3
_ENOUGH = 10_000  # samples whose mean stands for that of all


def evenly(count: int) -> slice:
    """Return which of ``count`` samples to take for the mean of all: about 10,000, since the clock runs meanwhile."""
    return slice(None, None, max(1, count // _ENOUGH))


def product(rows: float, inputs: float, outputs: float) -> float:
    """FLOPs of a product of (rows, before) and (before, after)."""
    return 2.0 * rows * inputs * outputs


def convolution(height: int, width: int, kernel: int, in_channels: int, out_channels: int) -> float:
    """FLOPs of a convolution with ``height`` x ``width`` outputs in each of ``out_channels`` channels."""
    return product(height * width, kernel * kernel * in_channels, out_channels)
