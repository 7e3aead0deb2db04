"""The network over the ranks: DistributedDataParallel as configured, and the compiler around it."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any, ContextManager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch.cuda_graphs import on_side_stream
from benchmarks.resnet.pytorch.config import Config

# How gradients travel, where not in their own type.
HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# PyTorch 2.13 gave the option another name.
_BUFFER_OPTION = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"


def wrap(network: nn.Module, config: Config, ranks: Ranks) -> nn.Module:
    """Wrap ``network``: rank 0's weights go to all ranks, gradients are averaged in the backward pass.

    The compiler comes last: it cuts the network at the borders of the gradient buckets, so that their sums still
    overlap with the backward pass.
    """
    if ranks.size > 1:
        network = replicated(network, config, ranks)
    if config.compile != "none":
        network = torch.compile(network, mode=config.compile, dynamic=False)
    return network


def replicated(network: nn.Module, config: Config, ranks: Ranks) -> DistributedDataParallel:
    """Return the network with all-reduce in its backward pass, in buckets of config.bucket_mb."""
    # Built on the stream on which the step runs: a graph's is not the default one.
    with on_side_stream() if config.cuda_graph else nullcontext():
        wrapped = DistributedDataParallel(
            network,
            device_ids=[ranks.context.index] if ranks.context.type == "cuda" else None,
            **{_BUFFER_OPTION: False},  # each rank has its own statistics until an evaluation
            gradient_as_bucket_view=True,
            bucket_cap_mb=config.bucket_mb,
        )
    if config.gradient_compression != "none":
        wrapped.register_comm_hook(dist.group.WORLD, HOOKS[config.gradient_compression])
    return wrapped


def no_sync(parallel: nn.Module) -> ContextManager[Any]:
    """Keep the gradients of the pass inside on this rank."""
    found = getattr(parallel, "no_sync", None)
    return nullcontext() if found is None else found()
