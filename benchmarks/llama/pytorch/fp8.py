"""GEMMs of Llama's layers in FP8 by PyTorch's own kernel: ``fp8=scaled_mm`` of a configuration.

As benchmarks/common/torch/low_precision.py has it: E4M3, gradients in E5M2, each tensor with one scale by its own
largest value. FSDP gathers the weights in bf16 and a layer casts them where they are gathered, in its forward and in
its backward pass. With tensor parallelism each rank scales its share of a weight. The embedding and the head stay in
bf16, as do attention and all between GEMMs.

Frozen weights are kept in FP8, each with one scale for the whole of it, so that the casts are exact.
"""

from typing import Optional

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.torch import low_precision
from benchmarks.llama.pytorch.network import Network


class Float8Linear(nn.Linear):
    """A Linear without bias; with tensor parallelism its input and output are DTensors, as nn.Linear's."""

    scale: Optional[torch.Tensor] = None  # of a weight that is kept in FP8

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, DTensor):
            return low_precision.gathered_product(hidden, self.weight, self.scale)
        # Split by outputs, each rank has a share of the input's gradient; by inputs, a share of the output.
        (placement,), last, share = self.weight.placements, Shard(hidden.ndim - 1), Partial()
        grad, out = (share, last) if placement == Shard(0) else (last, share)
        local_hidden = hidden.to_local(grad_placements=[grad])
        product = low_precision.gathered_product(local_hidden, self.weight.to_local(), self.scale)
        return DTensor.from_local(product, self.weight.device_mesh, [out])


def set_up(network: Network, mode: str, device: torch.device, frozen: bool = False) -> None:
    """Let the Linears of all layers, which are on no device yet, multiply in FP8; their parameters stay.

    Those that are ``frozen`` become FP8; parallel.py's ``keep`` gives them their values.

    Raises:
        Problem: a rank's PyTorch or device has no FP8.
    """
    reason = pytorch.agreed(low_precision.why_no_fp8(device))
    if reason:
        raise Problem(f"fp8={mode}: {reason}", "PyTorch 2.10 or newer, on a GPU with FP8", "set fp8=none")
    choices.record("fp8", "scaled_mm")
    for module in list(network.layers.modules()):
        for name, linear in module.named_children():
            if isinstance(linear, nn.Linear):
                float8 = Float8Linear(linear.in_features, linear.out_features, bias=False, device="meta")
                float8.weight = linear.weight
                if frozen:
                    quantized = linear.weight.to(getattr(torch, low_precision.INPUTS))
                    float8.weight = nn.Parameter(quantized, requires_grad=False)
                setattr(module, name, float8)
