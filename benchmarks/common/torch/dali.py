"""DALI's batches as PyTorch's tensors."""

from typing import Any

import torch
from nvidia.dali.plugin.pytorch import feed_ndarray, to_torch_type


def to_tensor(device: torch.device, output: Any) -> torch.Tensor:
    """Copy what a pipeline puts out, all samples of one shape, into PyTorch's memory on the same kind of device."""
    batch = output.as_tensor()
    tensor = torch.empty(batch.shape(), dtype=to_torch_type[batch.dtype], device=device)
    # Nobody waits for the copy: it is queued on PyTorch's stream, so that the network's first kernel comes after it,
    # and DALI's stream waits for it before DALI fills this memory again (CopyToExternalImplGPU in its backend_impl.cc).
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return feed_ndarray(batch, tensor, cuda_stream=stream)
