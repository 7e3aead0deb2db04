"""Self-attention of packed sequences, without work on padding.

Queries, keys and values are (T, heads, size) for the T tokens of all sequences; offsets (B + 1) are the starts of
the sequences. All implementations compute softmax(q k' / sqrt(size)) v within the sequences (arXiv 1706.03762,
equation 1), with dropout on the weights:

    flash    PyTorch's variable-length flash attention (arXiv 2205.14135): GPUs, fp16 and bf16
    varlen   torch.nn.attention.varlen, since PyTorch 2.10: without dropout
    grouped  one call per run of sequences with equal length: batches sorted by length have few runs
    padded   all sequences padded to the longest, with a mask: the fallback
"""

import importlib
import sys
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices

Attention = Callable[..., torch.Tensor]  # (queries, keys, values, offsets, longest, dropout) -> (T, heads, size)


def grouped(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, longest: int, dropout: float
) -> torch.Tensor:
    # One call per run of sequences with equal length. Synchronizes with a GPU to read the offsets.
    heads, size = queries.shape[1:]
    outputs = []
    for start, count, length in runs_of_equal(offsets):
        if not length:
            continue
        part = slice(start, start + count * length)
        q, k, v = (tensor[part].view(count, length, heads, size).transpose(1, 2) for tensor in (queries, keys, values))
        attended = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        outputs.append(attended.transpose(1, 2).reshape(count * length, heads, size))
    return torch.cat(outputs)


def runs_of_equal(offsets: torch.Tensor) -> List[Tuple[int, int, int]]:
    # Return (first token, sequences, length) of the runs of equal length.
    runs: List[Tuple[int, int, int]] = []
    for start, length in zip(offsets.tolist(), (offsets[1:] - offsets[:-1]).tolist()):
        if runs and runs[-1][2] == length:
            first, count, _ = runs[-1]
            runs[-1] = (first, count + 1, length)
        else:
            runs.append((start, 1, length))
    return runs


def table_places(tokens: int, offsets: torch.Tensor, longest: int) -> torch.Tensor:
    # (T,): indices of the tokens in a flattened B x longest table, without synchronization.
    numbers = torch.arange(tokens, device=offsets.device)
    owners = torch.bucketize(numbers, offsets[1:], right=True)
    return owners * longest + numbers - offsets.long()[owners]


def padded(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, longest: int, dropout: float
) -> torch.Tensor:
    # Attend in a padded batch (B, longest) with a mask, without synchronization.
    heads, size = queries.shape[1:]
    lengths = (offsets[1:] - offsets[:-1]).long()
    there = torch.arange(longest, device=queries.device) < lengths[:, None]  # (B, longest)
    positions = table_places(len(queries), offsets, longest)

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        empty = tensor.new_zeros(len(lengths) * longest, heads, size)
        return empty.index_copy(0, positions, tensor).view(len(lengths), longest, heads, size).transpose(1, 2)

    # Unmask one position of empty sequences to avoid 0 / 0.
    there = there | (torch.arange(longest, device=queries.device) == 0)
    q, k, v = map(wide, (queries, keys, values))
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None], dropout_p=dropout)
    return attended.transpose(1, 2).reshape(-1, heads, size).index_select(0, positions)


def varlen(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, longest: int, dropout: float
) -> torch.Tensor:
    # Attend by PyTorch's public operator for such rows; the configurations reject dropout with it.
    operator: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return operator(queries, keys, values, offsets, offsets, longest, longest)


def table(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, longest: int, dropout: float
) -> torch.Tensor:
    # Attend in sequences that are all padded to ``longest``, to the tokens of ``mask`` (B, longest); for a server.
    heads, size = queries.shape[1:]
    q, k, v = (tensor.view(-1, longest, heads, size).transpose(1, 2) for tensor in (queries, keys, values))
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None] == 1, dropout_p=dropout)
    return attended.transpose(1, 2).reshape(-1, heads, size)


ATEN: Any = torch.ops.aten
# GPUs only: variable-length kernels with PyTorch's backward. cuDNN's operator for nested tensors is not used: it failed
# on 79,313 tokens in 256 sequences (PyTorch 2.11, cuDNN 9.19, H200).
KERNELS: Dict[str, Attention] = {
    "flash": lambda queries, keys, values, offsets, longest, dropout: ATEN._flash_attention_forward(
        queries, keys, values, offsets, offsets, longest, longest, dropout, False, False
    )[0],
    "varlen": varlen,
}
IMPLEMENTATIONS: Dict[str, Attention] = {**KERNELS, "grouped": grouped, "padded": padded, "table": table}


def choose(requested: str, device: torch.device, dtype: torch.dtype, size: int, rank: int = 0) -> str:
    """Return the implementation for activations of ``dtype`` with heads of ``size``; rank 0 prints it on a GPU.

    "auto" is ``grouped`` on a CPU, and on a GPU ``flash`` if the kernel exists and is correct, else ``padded``.
    Raises UnavailableError if a requested kernel cannot run.
    """
    if device.type != "cuda":
        if requested in KERNELS:
            raise choices.UnavailableError(f"attention={requested}: the kernel runs on GPUs only; use attention=auto")
        choices.record("attention", "grouped" if requested == "auto" else requested)
        return "grouped" if requested == "auto" else requested
    kernel = "flash" if requested == "auto" else requested
    reason = pytorch.agreed(why_not(kernel, device, dtype, size)) if kernel in KERNELS else ""
    if reason and requested != "auto":
        raise choices.UnavailableError(f"attention={requested}: {reason}; use attention=auto")
    backend = "padded" if reason else kernel
    choices.record("attention", backend)
    if rank == 0:
        print(f"attention: {backend}" + (f" ({reason})" if reason else ""), file=sys.stderr, flush=True)
    return backend


def why_not(kernel: str, device: torch.device, dtype: torch.dtype, size: int) -> str:
    # Return why this PyTorch cannot run a kernel on this GPU, found by asking it; empty where it can.
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{kernel} attention has fp16 and bf16"
    try:
        error = difference(KERNELS[kernel], device, dtype, size)
    except (AttributeError, ImportError):
        return f"PyTorch {torch.__version__} has no {kernel} attention for sequences of any length"
    # PyTorch lacks a specific exception for an unsupported release, GPU or head size.
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem) else ''}"
    return "" if error < 0.03 else f"wrong by {error:.3g} of the largest value"


def available(device: torch.device, dtype: torch.dtype, size: int, dropout: float) -> List[str]:
    """Return the implementations that can train here on packed sequences, for a speed comparison."""
    if device.type != "cuda":
        return ["grouped", "padded"]
    kernels = [name for name in KERNELS if not why_not(name, device, dtype, size)]
    return [name for name in kernels if not (name == "varlen" and dropout)] + ["padded"]


def difference(attention: Attention, device: torch.device, dtype: torch.dtype, size: int) -> float:
    # Return the maximum error of values and gradients compared with ``padded``, relative to the maximum value.
    lengths = (5, 17, 1, 64)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, sum(lengths), 2, size, generator=generator).to(device, dtype)

    def results(call: Attention) -> List[torch.Tensor]:
        leaf = inputs.clone().requires_grad_()
        value = call(*leaf.unbind(0), offsets, max(lengths), 0.0)
        value.float().square().sum().backward()
        return [value.detach(), leaf.grad]

    return max(
        float((output.float() - reference.float()).abs().max() / reference.float().abs().max())
        for output, reference in zip(results(attention), results(padded))
    )
