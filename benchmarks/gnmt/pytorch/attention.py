"""Normalized Bahdanau attention (arXiv 1409.0473; weight normalization: arXiv 1602.07868).

score[b, t, s] = sum over w of v[w] * tanh(q[b, t, w] + k[b, s, w]); the weights are the softmax over s without
padding. Plain PyTorch operators save multiple tensors (B, T, S, W) for the backward pass; ``chunked`` processes a
few target positions at a time and recomputes tanh in the backward pass, as does the Triton kernel in kernels.py.
"""

from typing import Any, Callable, Tuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

# (B, T, S), float32 or wider, of queries (B, T, W), keys (B, S, W), v (W,) and padding, bool (B, S).
Weights = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Bytes of tanh per chunk: fits into a CPU's caches; enough to fill a GPU.
CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}


def plain(queries: torch.Tensor, keys: torch.Tensor, vector: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return _softmax(torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1)) @ vector, padding)


def chunked(queries: torch.Tensor, keys: torch.Tensor, vector: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    # Return the same, without a tensor (B, T, S, W).
    return _softmax(_Chunked.apply(queries, keys, vector), padding)


def _softmax(scores: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    scores = scores.masked_fill(padding.unsqueeze(1), float("-inf"))
    return functional.softmax(scores, dim=2, dtype=torch.promote_types(scores.dtype, torch.float32))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: torch.Tensor, keys: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(queries, keys, vector)
        scores = queries.new_empty(queries.shape[0], queries.shape[1], keys.shape[1])
        for part in _parts(queries, keys):
            scores[:, part] = _tanh(queries, keys, part) @ vector
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        queries, keys, vector = ctx.saved_tensors
        of_queries, of_keys, of_vector = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(vector)
        for part in _parts(queries, keys):
            tanh, here = _tanh(queries, keys, part), gradient[:, part]
            of_vector += here.reshape(-1) @ tanh.view(-1, len(vector))
            # d tanh = 1 - tanh ** 2, v is common to all positions and comes last.
            inner = tanh.square_().neg_().add_(1).mul_(here.unsqueeze(3))
            of_queries[:, part] = inner.sum(2)
            of_keys += inner.sum(1)
        return of_queries * vector, of_keys * vector, of_vector


def _tanh(queries: torch.Tensor, keys: torch.Tensor, part: slice) -> torch.Tensor:
    return (queries[:, part].unsqueeze(2) + keys.unsqueeze(1)).tanh_()


def _parts(queries: torch.Tensor, keys: torch.Tensor) -> Any:
    # Slices of target positions with CHUNK_BYTES of tanh.
    limit = CHUNK_BYTES.get(queries.device.type, CHUNK_BYTES["cpu"])
    size = max(1, limit // (keys.numel() * keys.element_size()))
    return (slice(start, start + size) for start in range(0, queries.shape[1], size))
