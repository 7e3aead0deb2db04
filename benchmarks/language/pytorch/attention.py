"""Self-attention of sequences packed in one row of tokens: no work on padding.

Queries, keys and values are (T, heads, size), the T tokens of all sequences; offsets (B + 1) say where each begins.
All implementations compute softmax(q k' / sqrt(size)) v within each sequence (arXiv 1706.03762, equation 1), with
dropout on the weights:

``flash``    PyTorch's flash attention for sequences of any length in one kernel (arXiv 2205.14135): GPUs, fp16 and bf16
``cudnn``    the same by cuDNN, through PyTorch
``varlen``   torch.nn.attention.varlen, since PyTorch 2.10: without dropout
``grouped``  one call for all neighbours of equal length: batches sorted by length have few groups
``padded``   every sequence padded to the longest, with a mask: the equal path where neither can run
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
    # Attend in all neighbours of equal length together; waits for a GPU, whose offsets it reads.
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
    # Return (first token, sequences, length of each) for neighbours of equal length.
    runs: List[Tuple[int, int, int]] = []
    for start, length in zip(offsets.tolist(), (offsets[1:] - offsets[:-1]).tolist()):
        if runs and runs[-1][2] == length:
            first, count, _ = runs[-1]
            runs[-1] = (first, count + 1, length)
        else:
            runs.append((start, 1, length))
    return runs


def table_places(tokens: int, offsets: torch.Tensor, longest: int) -> torch.Tensor:
    # (T,): where each token is in a flat table of B x longest places; nobody waits for a device.
    numbers = torch.arange(tokens, device=offsets.device)
    owners = torch.bucketize(numbers, offsets[1:], right=True)
    return owners * longest + numbers - offsets.long()[owners]


def padded(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, longest: int, dropout: float
) -> torch.Tensor:
    # Attend in a batch (B, longest), whose padding no token looks at; nobody waits for a device.
    heads, size = queries.shape[1:]
    lengths = (offsets[1:] - offsets[:-1]).long()
    there = torch.arange(longest, device=queries.device) < lengths[:, None]  # (B, longest)
    positions = table_places(len(queries), offsets, longest)

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        empty = tensor.new_zeros(len(lengths) * longest, heads, size)
        return empty.index_copy(0, positions, tensor).view(len(lengths), longest, heads, size).transpose(1, 2)

    # An empty sequence looks at one place, so that it has no share of 0 / 0.
    there = there | (torch.arange(longest, device=queries.device) == 0)
    q, k, v = map(wide, (queries, keys, values))
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None], dropout_p=dropout)
    return attended.transpose(1, 2).reshape(-1, heads, size).index_select(0, positions)


def varlen(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, longest: int, dropout: float
) -> torch.Tensor:
    # Attend by PyTorch's public operator for such rows.
    if dropout:
        raise ValueError(f"attention=varlen has no dropout ({dropout}): set attention_dropout=0")
    operator: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    attended: torch.Tensor = operator(queries, keys, values, offsets, offsets, longest, longest)
    return attended


def table(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, longest: int, dropout: float
) -> torch.Tensor:
    # Attend in sequences that are all padded to ``longest``, to the tokens of ``mask`` (B, longest); for a server.
    heads, size = queries.shape[1:]
    q, k, v = (tensor.view(-1, longest, heads, size).transpose(1, 2) for tensor in (queries, keys, values))
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None] == 1, dropout_p=dropout)
    return attended.transpose(1, 2).reshape(-1, heads, size)


ATEN: Any = torch.ops.aten
# Of GPUs alone: one kernel for all sequences, whose gradient is PyTorch's own. cuDNN's is the operator that PyTorch
# calls for nested tensors, with the sums of the softmax for its gradient.
KERNELS: Dict[str, Attention] = {
    "flash": lambda queries, keys, values, offsets, longest, dropout: ATEN._flash_attention_forward(
        queries, keys, values, offsets, offsets, longest, longest, dropout, False, False
    )[0],
    "cudnn": lambda queries, keys, values, offsets, longest, dropout: ATEN._cudnn_attention_forward(
        queries, keys, values, None, offsets, offsets, longest, longest, True, dropout
    )[0],
    "varlen": varlen,
}
IMPLEMENTATIONS: Dict[str, Attention] = {**KERNELS, "grouped": grouped, "padded": padded, "table": table}


def choose(requested: str, device: torch.device, dtype: torch.dtype, size: int, rank: int = 0) -> str:
    """Return the implementation for activations of ``dtype`` with heads of ``size``; rank 0 prints a GPU's.

    "auto" is ``grouped`` on a CPU, and on a GPU ``flash`` where the kernel is there and right, else ``padded``. Raises
    UnavailableError where a kernel is wanted and cannot run.
    """
    if device.type != "cuda":
        if requested in KERNELS:
            raise choices.UnavailableError(f"attention={requested}: a kernel for GPUs alone; use attention=auto")
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
    # What this release, GPU or head size refuses has no type of its own.
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem) else ''}"
    return "" if error < 0.03 else f"wrong by {error:.3g} of the largest value"


def available(device: torch.device, dtype: torch.dtype, size: int, dropout: float) -> List[str]:
    """Return the names of what can train here on rows of any length, for a comparison of speeds."""
    if device.type != "cuda":
        return ["grouped", "padded"]
    kernels = [name for name in KERNELS if not why_not(name, device, dtype, size)]
    return [name for name in kernels if not (name == "varlen" and dropout)] + ["padded"]


def difference(attention: Attention, device: torch.device, dtype: torch.dtype, size: int) -> float:
    # Return the largest error next to ``padded`` in values and gradients, as a share of the largest value.
    lengths = (5, 17, 1, 64)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, sum(lengths), 2, size, generator=generator).to(device, dtype)

    def results(call: Attention) -> List[torch.Tensor]:
        leaf = inputs.clone().requires_grad_()
        value = call(*leaf.unbind(0), offsets, max(lengths), 0.0)
        value.float().square().sum().backward()
        return [value.detach(), leaf.grad]

    pairs = zip(results(attention), results(padded))
    return max(float((output.float() - its.float()).abs().max() / its.float().abs().max()) for output, its in pairs)
