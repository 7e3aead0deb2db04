"""The number formats of a PyTorch training: which autocast, which loss scaling, which matrix products."""

from __future__ import annotations

from typing import Any, ContextManager

import torch

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Type of activations for each ``precision`` of a configuration; weights and optimizer stay in fp32."""


def set_matmul(precision: str) -> None:
    """Let fp32 matrix products and convolutions on a GPU use TF32 or not; call once, before the first one."""
    allowed = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def autocast(device: torch.device, precision: str) -> ContextManager[Any]:
    """Context in which the forward pass runs in the type of ``precision``."""
    dtype = DTYPES[precision]
    if dtype is torch.float32:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=dtype)


def loss_scaler(device: torch.device, precision: str, scale: float, growth_interval: int = 2000) -> Any:
    """A GradScaler that starts at ``scale``; does nothing but for fp16, whose gradients would underflow.

    A very large ``growth_interval`` (steps) keeps the scale where it is, as a submission with a fixed one did.
    """
    enabled = precision == "fp16"
    options = {"init_scale": scale, "growth_interval": growth_interval, "enabled": enabled}
    if hasattr(torch, "amp") and hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler(device.type, **options)
    # PyTorch before 2.3.
    return torch.cuda.amp.GradScaler(**options)
