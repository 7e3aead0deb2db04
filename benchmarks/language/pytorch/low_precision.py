"""FP8 GEMMs with PyTorch's kernel, and cached low-precision copies of weights.

FP8 (arXiv 2209.05433): inputs and weights in E4M3, gradients in E5M2, one scale per tensor from its current maximum.
Without a scaling history, a resumed run is bitwise equal. Everything stays on the device: it can be
captured in a CUDA graph and compiled.
"""

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.language.pytorch import operators

ROWS = 16  # required divisor for input rows and for both weight sides (cuBLASLt)
INPUTS, GRADIENTS = "float8_e4m3fn", "float8_e5m2"
SMALLEST = 1e-12  # largest value below which a tensor counts as zero


def cast(
    tensor: torch.Tensor, kind: torch.dtype, rows: bool = True, columns: bool = False
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale the tensor to the maximum of ``kind`` and cast it, see operators.py.

    Return the row-major and the transposed copy, empty if not requested, and the inverse scale.
    """
    largest = torch.linalg.vector_norm(tensor, float("inf"), dtype=torch.float32).clamp_min(SMALLEST)
    limit = torch.finfo(kind).max
    return (*operators.selected["cast"](tensor, limit / largest, kind, rows, columns), largest / limit)


def multiply(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, kind: torch.dtype,
    fast: bool,
) -> torch.Tensor:  # fmt: skip
    """GEMM of (M, K) and the transpose of (N, K), both row-major FP8, to (M, N) in ``kind``.

    ``fast``: accumulate in the tensor cores, which TransformerEngine does in forward passes only.
    """
    operator: Any = torch._scaled_mm
    return operator(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=kind, use_fast_accum=fast)


def _gradients(
    gradient: torch.Tensor, inputs: torch.Tensor, input_scale: torch.Tensor, columns: torch.Tensor, scale: torch.Tensor,
    kind: Optional[torch.dtype],
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:  # fmt: skip
    # Gradients of the input, and of the weight in ``kind`` unless that is None; inputs and weight are column-major.
    rows, transposed, gradient_scale = cast(gradient, getattr(torch, GRADIENTS), columns=kind is not None)
    by_input = multiply(rows, gradient_scale, columns, scale, gradient.dtype, fast=False)
    if kind is None:
        return by_input, None
    return by_input, multiply(transposed, gradient_scale, inputs, input_scale, kind, fast=False)


class _Float8Product(torch.autograd.Function):
    # GEMM of hidden states (T, in) and a weight (out, in), given as row-major and column-major FP8 copies.

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        inputs, transposed, input_scale = cast(hidden, rows.dtype, columns=True)
        ctx.save_for_backward(transposed, input_scale, columns, scale)
        ctx.weight_type = weight.dtype
        return multiply(inputs, input_scale, rows, scale, hidden.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs, input_scale, columns, scale = ctx.saved_tensors
        return (*_gradients(gradients[0], inputs, input_scale, columns, scale, ctx.weight_type), None, None, None)


# Return an FP8 copy of a weight with the scale. Weights with a ``scale`` hold FP8 values, as bytes or in the type that
# FSDP gathers them in; a cast in each pass keeps no copy between forward and backward.
def _copy(weight: torch.Tensor, scale: Optional[torch.Tensor], columns: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    kind = getattr(torch, INPUTS)
    if scale is None:
        *copies, scale = cast(weight, kind, not columns, columns)
        return copies[columns], scale
    weight = weight.view(kind) if weight.dtype == torch.uint8 else weight.to(kind)
    if not columns:
        return weight, scale
    _, transposed = operators.selected["cast"](weight, torch.ones_like(scale), kind, False, True)
    return transposed, scale


class _GatheredProduct(torch.autograd.Function):
    # The same for a weight that FSDP gathers only in its layer's passes: each pass casts it.

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, scale: Optional[torch.Tensor], learns: bool
    ) -> torch.Tensor:
        inputs, transposed, input_scale = cast(hidden, getattr(torch, INPUTS), columns=learns)
        ctx.save_for_backward(transposed if learns else None, input_scale, weight, scale)
        return multiply(inputs, input_scale, *_copy(weight, scale, columns=False), hidden.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs, input_scale, weight, scale = ctx.saved_tensors
        kind = None if inputs is None else weight.dtype
        return (*_gradients(gradients[0], inputs, input_scale, *_copy(weight, scale, columns=True), kind), None, None)


def gathered_product(hidden: torch.Tensor, weight: torch.Tensor, scale: Optional[torch.Tensor] = None) -> torch.Tensor:
    """(..., in) by a weight (out, in), both in bf16, to (..., out); no copy of the weight outlives a pass.

    With a ``scale`` the weight is frozen and holds FP8 values.
    """
    learns = weight.requires_grad and torch.is_grad_enabled()
    product: torch.Tensor = _GatheredProduct.apply(hidden.flatten(0, -2), weight, scale, learns)
    return product.unflatten(0, hidden.shape[:-1])


class _Kept(torch.autograd.Function):
    # Use a weight's cached copy; the gradient goes to the weight.

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.weight_type = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].to(ctx.weight_type), None


class KeptLinear(nn.Module):
    """A Linear's GEMM with a cached 16 or 8 bit weight copy, updated by ``refresh`` after each step.

    The parameters keep their names; the copies are not in checkpoints.
    """

    def __init__(self, linear: nn.Linear, kind: torch.dtype) -> None:
        """Take the weight (out, in) and bias of ``linear``; ``kind`` is float8_e4m3fn, or the type of the inputs."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_fp8 = kind == getattr(torch, INPUTS, None)
        self.register_buffer("rows", torch.empty_like(self.weight, dtype=kind), persistent=False)
        if self.in_fp8:
            columns = torch.empty_like(self.rows.t(), memory_format=torch.contiguous_format)
            self.register_buffer("columns", columns, persistent=False)
            self.register_buffer("scale", self.weight.new_ones((), dtype=torch.float32), persistent=False)

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """(T, in) to (T, out) in the type of the copy, in bf16 where that is FP8; without the bias."""
        if not self.in_fp8:
            return functional.linear(hidden, _Kept.apply(self.weight, self.rows))
        x = hidden.to(torch.bfloat16)
        product: torch.Tensor = _Float8Product.apply(x, self.weight, self.rows, self.columns, self.scale)
        return product

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.in_fp8:
            # Under autocast, as the Linear: the bias is added before the sum is rounded.
            return functional.linear(hidden, _Kept.apply(self.weight, self.rows), self.bias)
        product = self.product(hidden)
        return product + self.bias.to(product.dtype)


@torch.no_grad()
def refresh(layers: Sequence[KeptLinear]) -> None:
    """Copy the weights again, in place, since CUDA graphs refer to these tensors."""
    for layer in layers:
        if not layer.in_fp8:
            layer.rows.copy_(layer.weight)
            continue
        copies = cast(layer.weight, layer.rows.dtype, columns=True)
        for buffer, copy in zip((layer.rows, layer.columns, layer.scale), copies):
            buffer.copy_(copy)


def why_no_fp8(device: torch.device) -> str:
    """Return why this PyTorch cannot multiply in FP8 on ``device``, found by asking it; empty where it can."""
    if not (hasattr(torch, INPUTS) and hasattr(torch, "_scaled_mm")):
        return f"PyTorch {torch.__version__} has no FP8 (since 2.1)"
    try:
        error = _error(device)
    # Unsupported releases and GPUs do not raise a specific class.
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem) else ''}"
    return "" if error < 0.1 else f"wrong by {error:.3g} of the largest value"


# Maximum error in a GEMM and its gradients, relative to the largest value
def _error(device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3 * ROWS, 4 * ROWS, generator=generator)
    linear = nn.Linear(4 * ROWS, 2 * ROWS)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator))
    linear = linear.to(device)
    layer = KeptLinear(linear, getattr(torch, INPUTS))
    refresh([layer])

    def results(multiplied: Callable[[torch.Tensor], torch.Tensor]) -> List[torch.Tensor]:
        hidden = x.to(device, torch.bfloat16).requires_grad_()
        value = multiplied(hidden)
        value.float().square().sum().backward()
        tensors: List[Any] = [value.detach(), hidden.grad, linear.weight.grad]
        linear.weight.grad = None
        return [tensor.float() for tensor in tensors]

    plain = results(lambda hidden: functional.linear(hidden, linear.weight.bfloat16(), linear.bias.bfloat16()))
    return max(
        float((actual - expected).abs().max() / expected.abs().max()) for actual, expected in zip(results(layer), plain)
    )


def keep(modules: Sequence[nn.Module], names: Sequence[str], kind: torch.dtype) -> List[KeptLinear]:
    """Replace the Linears called ``names`` in all ``modules`` by KeptLinear, and return these."""
    layers = []
    for module in modules:
        for name in names:
            layers.append(KeptLinear(getattr(module, name), kind))
            setattr(module, name, layers[-1])
    refresh(layers)
    return layers
