"""DALI's batches as PyTorch's tensors."""

from typing import Any

import torch
from nvidia.dali.plugin.pytorch import feed_ndarray, to_torch_type


def to_tensor(device: torch.device, output: Any) -> torch.Tensor:
    """Copy a DALI output with uniform sample shapes to a PyTorch tensor on the same type of device."""
    batch = output.as_tensor()
    tensor = torch.empty(batch.shape(), dtype=to_torch_type[batch.dtype], device=device)
    # The copy is asynchronous on PyTorch's stream, so that the first kernel of the network runs after it, and DALI's
    # stream waits for it before DALI reuses the memory (CopyToExternalImplGPU in its backend_impl.cc).
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return feed_ndarray(batch, tensor, cuda_stream=stream)
