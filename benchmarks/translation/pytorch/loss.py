"""Cross-entropy with label smoothing over a large vocabulary, from the last hidden states.

The logits of all positions need several times as much memory as the rest of the training step. Here they exist for a
chunk of rows at a time: gradients are computed in the forward pass and the logits are discarded. Padding rows are
skipped.
"""

from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from benchmarks.translation.vocabulary import PAD

# Bytes of logits per chunk: large enough to make accumulating the weight gradient, once per chunk, cheap.
CHUNK_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}
# Signature of ``row_loss``: plain, Triton or apex (operators.py).
RowLoss = Callable[[torch.Tensor, torch.Tensor, float, bool], Tuple[torch.Tensor, Optional[torch.Tensor]]]


def plain_loss(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    # Return the loss of ``smoothed_loss`` from ``logits`` (N, V), with PyTorch's operators.
    log_probabilities = F.log_softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    counts = targets != PAD
    nll = -log_probabilities.gather(1, targets[:, None])[counts].sum()
    uniform = -log_probabilities.mean(1)[counts].sum()
    return (1 - smoothing) * nll + smoothing * uniform


def row_loss(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float, with_gradient: bool
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Return the sum of the smoothed losses of ``logits`` (N, V), which may be overwritten, and the gradient (N, V).

    Sum and gradient are float32 or wider here; other implementations may return the gradient in the type of the
    logits.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    at_target, mean = wide.gather(1, targets[:, None]), wide.mean(1, keepdim=True)
    largest = wide.amax(1, keepdim=True)
    exponentials = wide.sub_(largest).exp_()
    total = exponentials.sum(1, keepdim=True)
    log_total = total.log() + largest
    loss = (1 - smoothing) * (log_total - at_target).sum() + smoothing * (log_total - mean).sum()
    if not with_gradient:
        return loss, None
    # d loss / d logits = softmax - (1 - smoothing) * one-hot - smoothing / V
    by_logits = exponentials.div_(total)
    if smoothing:
        by_logits.sub_(smoothing / logits.shape[1])
    return loss, by_logits.scatter_add_(1, targets[:, None], torch.full_like(at_target, smoothing - 1))


def smoothed_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    targets: torch.Tensor,
    smoothing: float,
    chunk: Optional[int] = None,
    rows: Optional[torch.Tensor] = None,
    of_rows: RowLoss = row_loss,
) -> torch.Tensor:
    """Return the sum over all tokens of the smoothed loss.

    Per token: (1 - smoothing) * -log p(target) + smoothing * mean over V of -log p (Szegedy et al. 2016, section 7;
    both submissions, with the padded vocabulary). Under autocast the GEMMs use its type; softmax, sums and weight
    gradients are float32 or wider. fp16 needs no loss scale up to here: the gradients of the sum are as large as
    probabilities, and the loss scale applies to the backward pass before ``hidden``.

    Args:
        hidden: (N, width), or of the ``rows`` only.
        weight: (V, width), may be the embedding.
        bias: (V,) or None.
        targets: int64 (N,); PAD is ignored.
        smoothing: 0 to 1.
        chunk: rows per chunk; default: according to CHUNK_BYTES.
        rows: int64, where ``targets`` is not PAD. Computing it on a GPU would synchronize.
        of_rows: loss and gradient per chunk.
    """
    if rows is None:
        rows = (targets != PAD).nonzero(as_tuple=True)[0]
    targets = targets.index_select(0, rows)
    if len(hidden) > len(rows):
        hidden = hidden.index_select(0, rows)
    # Autocast's type for a GEMM, on all devices and PyTorch releases.
    dtype = F.linear(hidden[:0], weight).dtype
    wide = torch.promote_types(dtype, torch.float32)
    row_bytes = weight.shape[0] * torch.finfo(wide).bits // 8
    chunk = chunk or max(1, CHUNK_BYTES[hidden.device.type] // row_bytes)
    with_gradients = torch.is_grad_enabled()
    return _ChunkedLoss.apply(hidden, weight, bias, targets, smoothing, chunk, dtype, with_gradients, of_rows)


class _ChunkedLoss(torch.autograd.Function):
    # The gradients are computed in the forward pass except for one factor, which ``backward`` applies.

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        targets: torch.Tensor,
        smoothing: float,
        chunk: int,
        dtype: torch.dtype,
        with_gradients: bool,
        of_rows: RowLoss,
    ) -> torch.Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        gradients = tuple(
            torch.zeros_like(tensor, dtype=wide) if with_gradients and tensor is not None and needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad)
        )
        with torch.autocast(hidden.device.type, enabled=False):
            operands = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
            loss = torch.zeros((), dtype=wide, device=hidden.device)
            for start in range(0, len(targets), chunk):
                part = slice(start, start + chunk)
                logits = F.linear(operands[0][part], operands[1], operands[2])
                chunk_loss, by_logits = of_rows(
                    logits, targets[part], smoothing, any(gradient is not None for gradient in gradients)
                )
                loss += chunk_loss
                if by_logits is not None:
                    _add_gradients(part, operands, by_logits, gradients)
        ctx.save_for_backward(*gradients)
        ctx.types = tuple(None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        gradients_of_inputs = (
            None if gradient is None else (gradient * factor).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.types)
        )
        return (*gradients_of_inputs, None, None, None, None, None, None)


def _add_gradients(
    part: slice,
    operands: Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]],
    by_logits: torch.Tensor,
    gradients: Tuple[Optional[torch.Tensor], ...],
) -> None:
    # Accumulate the gradients of hidden states, weights and bias from the rows in ``part``.
    hidden, weight, _ = operands
    of_hidden, of_weight, of_bias = gradients
    if of_bias is not None:
        of_bias += by_logits.sum(0, dtype=of_bias.dtype)
    factors = by_logits.to(weight.dtype)
    if of_hidden is not None:
        of_hidden[part] = factors @ weight
    if of_weight is not None:
        if of_weight.dtype == weight.dtype:
            of_weight.addmm_(factors.t(), hidden[part])
        else:
            of_weight += factors.t() @ hidden[part]
