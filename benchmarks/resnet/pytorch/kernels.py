"""operators.py in Triton, for NHWC. Compiled for GPUs, run in Triton's interpreter and on an H200.

Images in NHWC are a matrix (pixels, channels). A program has some channels and a share of the pixels; the shares'
statistics are put together by PyTorch, in fp32.
"""

from typing import Any, Dict, List, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import nn

from benchmarks.common.torch.kernels import OPTIONS, Specification
from benchmarks.resnet.pytorch import operators

PIXELS, CHANNELS, WARPS = 32, 64, 4  # block of a program: 16 numbers a thread, rows of 128 bytes in 16 bits
# Programs of the two kernels that sum, about four for each part of an H100, however many channels there are.
SUMMING = 512


@triton.jit
def norm_statistics(
    images, shift, sums, squares, pixels, channels, shares, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A share's sums of x - shift and of its square per channel: ``shift`` is near the mean, so nothing cancels."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    centre = tl.load(shift + channel, mask=exists, other=0.0)[None, :]
    total = tl.zeros([CHANNELS], tl.float32)
    square = tl.zeros([CHANNELS], tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(pixels, PIXELS), shares):
        pixel = tl.zeros([PIXELS], tl.int64) + block * PIXELS + tl.arange(0, PIXELS)
        inside = (pixel < pixels)[:, None] & exists[None, :]
        values = tl.load(images + pixel[:, None] * channels + channel[None, :], mask=inside, other=0.0)
        values = tl.where(inside, values.to(tl.float32) - centre, 0.0)
        total += tl.sum(values, axis=0)
        square += tl.sum(values * values, axis=0)
    at = tl.program_id(1) * channels + channel
    tl.store(sums + at, total, mask=exists)
    tl.store(squares + at, square, mask=exists)


@triton.jit
def norm_forward(
    images, shortcut, scale, offset, passed, pixels, channels,
    ADDS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """passed = ReLU(images * scale + offset + shortcut)."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    pixel = tl.program_id(1).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    inside = (pixel < pixels)[:, None] & exists[None, :]
    at = pixel[:, None] * channels + channel[None, :]
    factor = tl.load(scale + channel, mask=exists, other=0.0)[None, :]
    values = tl.load(images + at, mask=inside, other=0.0).to(tl.float32) * factor
    values += tl.load(offset + channel, mask=exists, other=0.0)[None, :]
    if ADDS:
        values += tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
    # Not maximum, which would turn NaN into 0 and hide a diverged training.
    values = tl.where(values < 0.0, 0.0, values)
    tl.store(passed + at, values.to(passed.dtype.element_ty), mask=inside)


@triton.jit
def norm_gradient_sums(
    images, passed, gradient, mean, sums, products, pixels, channels, shares,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A share's sums, per channel, of the gradient where ReLU let it pass, and of that times x - mean."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    centre = tl.load(mean + channel, mask=exists, other=0.0)[None, :]
    total = tl.zeros([CHANNELS], tl.float32)
    product = tl.zeros([CHANNELS], tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(pixels, PIXELS), shares):
        pixel = tl.zeros([PIXELS], tl.int64) + block * PIXELS + tl.arange(0, PIXELS)
        inside = (pixel < pixels)[:, None] & exists[None, :]
        at = pixel[:, None] * channels + channel[None, :]
        given = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        given = tl.where(tl.load(passed + at, mask=inside, other=0.0).to(tl.float32) > 0.0, given, 0.0)
        values = tl.load(images + at, mask=inside, other=0.0).to(tl.float32) - centre
        total += tl.sum(given, axis=0)
        product += tl.sum(given * values, axis=0)
    at_share = tl.program_id(1) * channels + channel
    tl.store(sums + at_share, total, mask=exists)
    tl.store(products + at_share, product, mask=exists)


@triton.jit
def norm_backward(
    images, passed, gradient, factor, slope, constant, of_images, of_shortcut, pixels, channels,
    ADDS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """of_images = factor * passed gradient + slope * images + constant; the shortcut gets the passed gradient."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    pixel = tl.program_id(1).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    inside = (pixel < pixels)[:, None] & exists[None, :]
    at = pixel[:, None] * channels + channel[None, :]
    given = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    given = tl.where(tl.load(passed + at, mask=inside, other=0.0).to(tl.float32) > 0.0, given, 0.0)
    if ADDS:
        tl.store(of_shortcut + at, given.to(of_shortcut.dtype.element_ty), mask=inside)
    values = tl.load(images + at, mask=inside, other=0.0).to(tl.float32)
    found = given * tl.load(factor + channel, mask=exists, other=0.0)[None, :]
    found += values * tl.load(slope + channel, mask=exists, other=0.0)[None, :]
    found += tl.load(constant + channel, mask=exists, other=0.0)[None, :]
    tl.store(of_images + at, found.to(of_images.dtype.element_ty), mask=inside)


# -- launched -----------------------------------------------------------------------------------------


def _launch(kernel: Any, shares: int, *arguments: Any, **constants: Any) -> None:
    channels = arguments[-1]
    rest = (shares,) if kernel in (norm_statistics, norm_gradient_sums) else ()
    grid = (triton.cdiv(channels, CHANNELS), shares)
    sizes = {"PIXELS": PIXELS, "CHANNELS": CHANNELS, **constants}
    kernel[grid](*arguments, *rest, **sizes, num_warps=WARPS, **OPTIONS)


# Both sums per channel that ``kernel`` makes for each share of the pixels of its first tensor.
def _summed(kernel: Any, *tensors: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    channels = tensors[0].shape[1]
    pixels = tensors[0].numel() // channels
    shares = min(max(1, SUMMING // triton.cdiv(channels, CHANNELS)), triton.cdiv(pixels, PIXELS))
    sums = torch.empty(2, shares, channels, dtype=torch.float32, device=tensors[0].device)
    _launch(kernel, shares, *tensors, sums[0], sums[1], pixels, channels)
    return sums[0].sum(0), sums[1].sum(0)


def _forward(
    images: torch.Tensor, shortcut: Optional[torch.Tensor], gamma: torch.Tensor, beta: torch.Tensor, epsilon: float
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # What is passed on, and mean and variance of the batch.
    channels = images.shape[1]
    pixels = images.numel() // channels
    shift = images[0, :, 0, 0].float()
    total, square = _summed(norm_statistics, images, shift)
    from_shift = total / pixels
    variance = (square / pixels - from_shift * from_shift).clamp_min(0.0)
    mean = shift + from_shift
    scale = gamma * torch.rsqrt(variance + epsilon)
    passed = torch.empty_like(images)
    tensors = (images, images if shortcut is None else shortcut, scale, beta - mean * scale, passed)
    _launch(norm_forward, triton.cdiv(pixels, PIXELS), *tensors, pixels, channels, ADDS=shortcut is not None)
    return passed, mean, variance


def _backward(
    images: torch.Tensor, passed: torch.Tensor, gradient: torch.Tensor, gamma: torch.Tensor, mean: torch.Tensor,
    variance: torch.Tensor, epsilon: float, adds: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    # Gradients of images, of the shortcut, which is empty where none was added, of gamma and of beta.
    channels = images.shape[1]
    pixels = images.numel() // channels
    total, product = _summed(norm_gradient_sums, images, passed, gradient, mean)
    # Ioffe and Szegedy 2015, section 3: the gradient less its mean and its part along the normalised values.
    inverse = torch.rsqrt(variance + epsilon)
    factor = gamma * inverse
    slope = -factor * inverse * inverse * product / pixels
    constant = -factor * total / pixels - slope * mean
    of_images = torch.empty_like(images)
    of_shortcut = torch.empty_like(images) if adds else images.new_empty(0)
    tensors = (images, passed, gradient, factor, slope, constant, of_images, of_shortcut if adds else of_images)
    _launch(norm_backward, triton.cdiv(pixels, PIXELS), *tensors, pixels, channels, ADDS=adds)
    return of_images, of_shortcut, product * inverse, total


# Since PyTorch 2.4 torch.compile leaves both as they are and compiles what is around them; before, it is refused.
forward_operator: Any = _forward
backward_operator: Any = _backward
if hasattr(torch.library, "custom_op"):
    forward_operator = torch.library.custom_op("encore::norm_relu", mutates_args=())(_forward)
    backward_operator = torch.library.custom_op("encore::norm_relu_backward", mutates_args=())(_backward)

    @forward_operator.register_fake
    def _(images: Any, shortcut: Any, gamma: Any, beta: Any, epsilon: Any) -> Any:
        return torch.empty_like(images), torch.empty_like(gamma), torch.empty_like(gamma)

    @backward_operator.register_fake
    def _(
        images: Any, passed: Any, gradient: Any, gamma: Any, mean: Any, variance: Any, epsilon: Any, adds: Any
    ) -> Any:
        of_shortcut = torch.empty_like(images) if adds else images.new_empty(0)
        return torch.empty_like(images), of_shortcut, torch.empty_like(gamma), torch.empty_like(gamma)


# See operators.norm_relu.
class _NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: torch.Tensor, shortcut: Optional[torch.Tensor], gamma: torch.Tensor, beta: torch.Tensor,
        epsilon: float,
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        passed, mean, variance = forward_operator(images, shortcut, gamma, beta, epsilon)
        ctx.save_for_backward(images, passed, gamma, mean, variance)
        ctx.adds, ctx.epsilon = shortcut is not None, epsilon
        ctx.mark_non_differentiable(mean, variance)
        return passed, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[Any, ...]:
        images, passed, gamma, mean, variance = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        of_images, of_shortcut, of_gamma, of_beta = backward_operator(
            images, passed, gradient, gamma, mean, variance, ctx.epsilon, ctx.adds
        )
        return of_images, of_shortcut if ctx.adds else None, of_gamma, of_beta, None


def norm_relu(norm: nn.BatchNorm2d, images: torch.Tensor, shortcut: Optional[torch.Tensor] = None) -> torch.Tensor:
    """See operators.norm_relu; an evaluation and images in NCHW take the plain path."""
    tensors = [images] if shortcut is None else [images, shortcut]
    if not norm.training or not all(each.is_contiguous(memory_format=torch.channels_last) for each in tensors):
        return operators.norm_relu(norm, images, shortcut)
    passed, mean, variance = _NormRelu.apply(images, shortcut, norm.weight, norm.bias, norm.eps)
    if norm.running_mean is not None and norm.momentum is not None:
        pixels = images.numel() // images.shape[1]
        with torch.no_grad():
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * (pixels / max(pixels - 1, 1)), norm.momentum)
    return passed


def specifications() -> List[Specification]:
    """Every kernel in each type of the activations."""
    found = []
    blocks = {"PIXELS": PIXELS, "CHANNELS": CHANNELS}
    sizes = {"pixels": "i32", "channels": "i32"}
    for variant in ("fp16", "bf16", "fp32"):
        pointer, number = f"*{variant}", "*fp32"
        sums: Dict[str, Any] = {**sizes, "shares": "i32", **blocks}
        last: Dict[str, Any] = {**sizes, "ADDS": True, **blocks}
        given = {"images": pointer, "passed": pointer, "gradient": pointer}
        arguments: List[Tuple[Any, Dict[str, Any]]] = [
            (norm_statistics, {"images": pointer, "shift": number, "sums": number, "squares": number, **sums}),
            (norm_gradient_sums, {**given, "mean": number, "sums": number, "products": number, **sums}),
            (
                norm_forward,
                {"images": pointer, "shortcut": pointer, "scale": number, "offset": number, "passed": pointer, **last},
            ),
            (
                norm_backward,
                {**given, "factor": number, "slope": number, "constant": number, "of_images": pointer,
                 "of_shortcut": pointer, **last},
            ),
        ]  # fmt: skip
        found += [Specification(kernel, variant, each, WARPS, ("channels",)) for kernel, each in arguments]
    return found
