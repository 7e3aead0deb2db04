"""Triton version of operators.py for NHWC. Compiled for GPUs, tested in Triton's interpreter and on an H200.

Images in NHWC are a matrix (pixels, channels). A program processes some channels and some pixels; PyTorch adds the
programs' statistics in fp32.

Tensors that are read and written, for the time at memory bandwidth: forward 3, with a shortcut 4; backward 5, with a
shortcut 7. The first backward kernel computes the ReLU mask from the images, or from the output with a shortcut;
then it also writes the shortcut's gradient, which the second kernel reads instead of gradient and output.
"""

from typing import Any, Dict, List, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import nn

from benchmarks.common.torch.kernels import OPTIONS, Specification
from benchmarks.resnet.pytorch import operators

PIXELS, CHANNELS, WARPS = 32, 64, 4  # block per program: 16 numbers per thread, rows of 128 bytes in 16 bits
# Programs of the reduction kernels: about four per SM on an H100, for any number of channels
SUMMING = 512


@triton.jit
def _channels_and_share(channels, CHANNELS: tl.constexpr):
    # This program's channels and its share of the pixels: one grid axis, since the others are limited to 65,535
    # programs. Programs of the same pixels are adjacent.
    blocks = tl.cdiv(channels, CHANNELS)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    return channel, tl.program_id(0) // blocks


@triton.jit
def norm_statistics(
    images, shift, sums, squares, pixels, channels, shares, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sum x - shift and (x - shift) ** 2 per channel over this program's pixels; ``shift`` is close to the mean, to
    avoid cancellation.
    """
    channel, share = _channels_and_share(channels, CHANNELS)
    exists = channel < channels
    centre = tl.load(shift + channel, mask=exists, other=0.0)[None, :]
    total = tl.zeros([CHANNELS], tl.float32)
    square = tl.zeros([CHANNELS], tl.float32)
    for block in range(share, tl.cdiv(pixels, PIXELS), shares):
        pixel = tl.zeros([PIXELS], tl.int64) + block * PIXELS + tl.arange(0, PIXELS)
        mask = (pixel < pixels)[:, None] & exists[None, :]
        values = tl.load(images + pixel[:, None] * channels + channel[None, :], mask=mask, other=0.0)
        values = tl.where(mask, values.to(tl.float32) - centre, 0.0)
        total += tl.sum(values, axis=0)
        square += tl.sum(values * values, axis=0)
    offset = share * channels + channel
    tl.store(sums + offset, total, mask=exists)
    tl.store(squares + offset, square, mask=exists)


@triton.jit
def norm_forward(
    images, shortcut, scale, offset, output, pixels, channels,
    ADDS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """output = ReLU(images * scale + offset + shortcut)."""
    channel, share = _channels_and_share(channels, CHANNELS)
    exists = channel < channels
    pixel = share.to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    mask = (pixel < pixels)[:, None] & exists[None, :]
    position = pixel[:, None] * channels + channel[None, :]
    factor = tl.load(scale + channel, mask=exists, other=0.0)[None, :]
    values = tl.load(images + position, mask=mask, other=0.0).to(tl.float32) * factor
    values += tl.load(offset + channel, mask=exists, other=0.0)[None, :]
    if ADDS:
        values += tl.load(shortcut + position, mask=mask, other=0.0).to(tl.float32)
    # Not maximum, which would turn NaN into 0 and hide a diverged training.
    values = tl.where(values < 0.0, 0.0, values)
    tl.store(output + position, values.to(output.dtype.element_ty), mask=mask)


@triton.jit
def norm_gradient_sums(
    images, output, gradient, scale, offset, mean, grad_shortcut, sums, products, pixels, channels, shares,
    ADDS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A share's sums, per channel, of g, the gradient where ReLU let it pass, and of g * (x - mean).

    With a shortcut, the mask comes from ``output``, and g is stored in ``grad_shortcut``.
    """
    channel, share = _channels_and_share(channels, CHANNELS)
    exists = channel < channels
    centre = tl.load(mean + channel, mask=exists, other=0.0)[None, :]
    factor = tl.load(scale + channel, mask=exists, other=0.0)[None, :]
    summand = tl.load(offset + channel, mask=exists, other=0.0)[None, :]
    total = tl.zeros([CHANNELS], tl.float32)
    product = tl.zeros([CHANNELS], tl.float32)
    for block in range(share, tl.cdiv(pixels, PIXELS), shares):
        pixel = tl.zeros([PIXELS], tl.int64) + block * PIXELS + tl.arange(0, PIXELS)
        mask = (pixel < pixels)[:, None] & exists[None, :]
        position = pixel[:, None] * channels + channel[None, :]
        upstream = tl.load(gradient + position, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(images + position, mask=mask, other=0.0).to(tl.float32)
        if ADDS:
            activated = tl.load(output + position, mask=mask, other=0.0).to(tl.float32)
        else:
            activated = values * factor + summand
        upstream = tl.where(activated > 0.0, upstream, 0.0)
        if ADDS:
            tl.store(grad_shortcut + position, upstream.to(grad_shortcut.dtype.element_ty), mask=mask)
        total += tl.sum(upstream, axis=0)
        product += tl.sum(upstream * (values - centre), axis=0)
    at_share = share * channels + channel
    tl.store(sums + at_share, total, mask=exists)
    tl.store(products + at_share, product, mask=exists)


@triton.jit
def norm_backward(
    images, gradient, scale, offset, slope, constant, grad_images, pixels, channels,
    MASKED: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """grad_images = scale * g + slope * images + constant; g: ``gradient``, where the output is > 0 unless MASKED."""
    channel, share = _channels_and_share(channels, CHANNELS)
    exists = channel < channels
    pixel = share.to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    mask = (pixel < pixels)[:, None] & exists[None, :]
    position = pixel[:, None] * channels + channel[None, :]
    factor = tl.load(scale + channel, mask=exists, other=0.0)[None, :]
    upstream = tl.load(gradient + position, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(images + position, mask=mask, other=0.0).to(tl.float32)
    if not MASKED:
        activated = values * factor + tl.load(offset + channel, mask=exists, other=0.0)[None, :]
        upstream = tl.where(activated > 0.0, upstream, 0.0)
    result = upstream * factor
    result += values * tl.load(slope + channel, mask=exists, other=0.0)[None, :]
    result += tl.load(constant + channel, mask=exists, other=0.0)[None, :]
    tl.store(grad_images + position, result.to(grad_images.dtype.element_ty), mask=mask)


# -- launched -----------------------------------------------------------------------------------------


def _launch(kernel: Any, shares: int, *arguments: Any, **constants: Any) -> None:
    channels = arguments[-1]
    rest = (shares,) if kernel in (norm_statistics, norm_gradient_sums) else ()
    grid = (triton.cdiv(channels, CHANNELS) * shares,)
    sizes = {"PIXELS": PIXELS, "CHANNELS": CHANNELS, **constants}
    kernel[grid](*arguments, *rest, **sizes, num_warps=WARPS, **OPTIONS)


# Both sums per channel over all pixels of the first tensor; ``kernel`` computes partial sums
def _channel_sums(kernel: Any, *tensors: torch.Tensor, **constants: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    channels = tensors[0].shape[1]
    pixels = tensors[0].numel() // channels
    shares = min(max(1, SUMMING // triton.cdiv(channels, CHANNELS)), triton.cdiv(pixels, PIXELS))
    sums = torch.empty(2, shares, channels, dtype=torch.float32, device=tensors[0].device)
    _launch(kernel, shares, *tensors, sums[0], sums[1], pixels, channels, **constants)
    return sums[0].sum(0), sums[1].sum(0)


def _forward(
    images: torch.Tensor, shortcut: Optional[torch.Tensor], gamma: torch.Tensor, beta: torch.Tensor, epsilon: float
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Return the output, and mean and variance of the batch.
    channels = images.shape[1]
    pixels = images.numel() // channels
    shift = images[0, :, 0, 0].float()
    total, square = _channel_sums(norm_statistics, images, shift)
    from_shift = total / pixels
    variance = (square / pixels - from_shift * from_shift).clamp_min(0.0)
    mean = shift + from_shift
    scale = gamma * torch.rsqrt(variance + epsilon)
    output = torch.empty_like(images)
    tensors = (images, images if shortcut is None else shortcut, scale, beta - mean * scale, output)
    _launch(norm_forward, triton.cdiv(pixels, PIXELS), *tensors, pixels, channels, ADDS=shortcut is not None)
    return output, mean, variance


def _backward(
    images: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor,
    mean: torch.Tensor, variance: torch.Tensor, epsilon: float, adds: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    # Gradients of images, of the shortcut, of gamma and of beta. Without a shortcut, its gradient and ``output`` are
    # empty.
    channels = images.shape[1]
    pixels = images.numel() // channels
    inverse = torch.rsqrt(variance + epsilon)
    scale = gamma * inverse
    offset = beta - mean * scale
    grad_images = torch.empty_like(images)
    grad_shortcut = torch.empty_like(images) if adds else images.new_empty(0)
    total, product = _channel_sums(
        norm_gradient_sums, images, output, gradient, scale, offset, mean, grad_shortcut, ADDS=adds
    )
    # Ioffe and Szegedy 2015, section 3: gradient minus the mean gradient and the projection on the normalized values
    slope = -scale * inverse * inverse * product / pixels
    constant = -scale * total / pixels - slope * mean
    tensors = (images, grad_shortcut if adds else gradient, scale, offset, slope, constant, grad_images)
    _launch(norm_backward, triton.cdiv(pixels, PIXELS), *tensors, pixels, channels, MASKED=adds)
    return grad_images, grad_shortcut, product * inverse, total


# Since PyTorch 2.4 torch.compile treats both as opaque and compiles the other operators; earlier versions are rejected.
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
        images: Any,
        output: Any,
        gradient: Any,
        gamma: Any,
        beta: Any,
        mean: Any,
        variance: Any,
        epsilon: Any,
        adds: Any,
    ) -> Any:
        grad_shortcut = torch.empty_like(images) if adds else images.new_empty(0)
        return torch.empty_like(images), grad_shortcut, torch.empty_like(gamma), torch.empty_like(gamma)


# See operators.norm_relu.
class _NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: torch.Tensor, shortcut: Optional[torch.Tensor], gamma: torch.Tensor, beta: torch.Tensor,
        epsilon: float,
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        output, mean, variance = forward_operator(images, shortcut, gamma, beta, epsilon)
        ctx.save_for_backward(images, images.new_empty(0) if shortcut is None else output, gamma, beta, mean, variance)
        ctx.adds, ctx.epsilon = shortcut is not None, epsilon
        ctx.mark_non_differentiable(mean, variance)
        return output, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[Any, ...]:
        images, output, gamma, beta, mean, variance = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        grad_images, grad_shortcut, grad_gamma, grad_beta = backward_operator(
            images, output, gradient, gamma, beta, mean, variance, ctx.epsilon, ctx.adds
        )
        return grad_images, grad_shortcut if ctx.adds else None, grad_gamma, grad_beta, None


def norm_relu(norm: nn.BatchNorm2d, images: torch.Tensor, shortcut: Optional[torch.Tensor] = None) -> torch.Tensor:
    """See operators.norm_relu; an evaluation and images in NCHW take the plain path."""
    tensors = [images] if shortcut is None else [images, shortcut]
    if not norm.training or not all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors):
        return operators.norm_relu(norm, images, shortcut)
    output, mean, variance = _NormRelu.apply(images, shortcut, norm.weight, norm.bias, norm.eps)
    if norm.running_mean is not None and norm.momentum is not None:
        pixels = images.numel() // images.shape[1]
        with torch.no_grad():
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * (pixels / max(pixels - 1, 1)), norm.momentum)
    return output


def specifications() -> List[Specification]:
    """Return all kernels for all activation types."""
    specs = []
    blocks = {"PIXELS": PIXELS, "CHANNELS": CHANNELS}
    sizes = {"pixels": "i32", "channels": "i32"}
    for variant in ("fp16", "bf16", "fp32"):
        pointer, number = f"*{variant}", "*fp32"
        sums: Dict[str, Any] = {**sizes, "shares": "i32", **blocks}
        pointers = {"images": pointer, "output": pointer, "gradient": pointer}
        linear = {"scale": number, "offset": number}
        arguments: List[Tuple[Any, Dict[str, Any]]] = [
            (norm_statistics, {"images": pointer, "shift": number, "sums": number, "squares": number, **sums}),
            (
                norm_gradient_sums,
                {**pointers, **linear, "mean": number, "grad_shortcut": pointer, "sums": number, "products": number,
                 **sums, "ADDS": True},
            ),
            (
                norm_forward,
                {"images": pointer, "shortcut": pointer, **linear, "output": pointer, **sizes, **blocks, "ADDS": True},
            ),
            (
                norm_backward,
                {"images": pointer, "gradient": pointer, **linear, "slope": number, "constant": number,
                 "grad_images": pointer, **sizes, **blocks, "MASKED": False},
            ),
        ]  # fmt: skip
        specs += [Specification(kernel, variant, argument, WARPS, ("channels",)) for kernel, argument in arguments]
    return specs
