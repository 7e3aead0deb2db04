"""FP8 GEMMs in Llama's layers with PyTorch's scaled_mm (``fp8=scaled_mm``).

As in benchmarks/language/pytorch/low_precision.py: E4M3, gradients in E5M2, per-tensor scaling by the current absolute
maximum. FSDP gathers the weights in bf16; layers cast them to FP8 in forward and in backward. With tensor
parallelism each rank scales its shard. ``fp8=scaled_mm_head`` includes the LM head. The embedding, attention and all
operations between GEMMs are in bf16.

Frozen weights are stored in FP8 with one scale for the full tensor, and gathered in it since PyTorch 2.13: as uint8,
since FSDP casts floating-point parameters to bf16.
"""

from typing import Any, Optional

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.language.pytorch import low_precision, operators
from benchmarks.llama.pytorch.network import Network


class Float8Linear(nn.Linear):
    """Linear without bias; with tensor parallelism input and output are DTensors, as for nn.Linear."""

    scale: Optional[torch.Tensor] = None  # set if the weight is stored in FP8

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        if not isinstance(self.weight, DTensor):
            return low_precision.gathered_product(hidden, weight, self.scale)
        # Column-wise: partial input gradients. Row-wise: partial outputs.
        (placement,), last, share = self.weight.placements, Shard(hidden.ndim - 1), Partial()
        grad, out = (share, last) if placement == Shard(0) else (last, share)
        local_hidden = hidden.to_local(grad_placements=[grad])
        product = low_precision.gathered_product(local_hidden, weight, self.scale)
        return DTensor.from_local(product, self.weight.device_mesh, [out])


def stored_type() -> torch.dtype:
    """Return the type of frozen parameters; FSDP rejects integers before the release in requirements/pytorch.txt."""
    version: Any = torch.__version__
    return torch.uint8 if version >= (2, 13) else getattr(torch, low_precision.INPUTS)


def set_up(network: Network, mode: str, ranks: Ranks, frozen: bool = False) -> None:
    """Replace the Linear modules, which are on the meta device, by Float8Linear; parameters are kept.

    With ``frozen`` the weights become FP8; set them with ``keep`` in parallel.py.

    Raises:
        Problem: PyTorch or any rank's device does not support FP8.
    """
    reason = pytorch.agreed(low_precision.why_no_fp8(ranks.context))
    if reason:
        raise Problem(f"fp8={mode}: {reason}", "PyTorch 2.10 or newer, on a GPU with FP8", "set fp8=none")
    operators.choose(ranks)
    choices.record("fp8", mode)
    for module in list((network if mode == "scaled_mm_head" else network.layers).modules()):
        for name, linear in module.named_children():
            if isinstance(linear, nn.Linear):
                float8 = Float8Linear(linear.in_features, linear.out_features, bias=False, device="meta")
                float8.weight = linear.weight
                if frozen:
                    float8.weight = nn.Parameter(linear.weight.to(stored_type()), requires_grad=False)
                setattr(module, name, float8)
