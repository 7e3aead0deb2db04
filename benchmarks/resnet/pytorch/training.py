"""What a step works on: built over the ranks, compiled or captured as a CUDA graph, carried through checkpoints."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.cuda_graphs import Captured, repeated
from benchmarks.common.ranks import Ranks
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.inputs import TrainingInput
from benchmarks.resnet.pytorch import model, optimizer
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.data import Batch
from benchmarks.resnet.pytorch.optimizer import MomentumSGD

WARM_UP_STEPS = 11
"""Steps before a capture: DistributedDataParallel settles its buckets in the first ten (PyTorch, CUDA graphs)."""
HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
"""How gradients travel, where not in their own type."""

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFER_OPTION = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"
"""PyTorch 2.13 gave the option another name."""


class Training(NamedTuple):
    """All that a step works on."""

    network: nn.Module
    parallel: nn.Module
    """The network with gradients averaged over the ranks in its backward pass, compiled if so configured."""
    optimizer: MomentumSGD
    config: Config
    graph: Optional[Captured] = None
    """Forward and backward of a batch."""


ForwardBackward = Callable[[Training, torch.Tensor, torch.Tensor], torch.Tensor]


def build(config: Config, ranks: Ranks, saved: Mapping[str, Any], forward_backward: ForwardBackward) -> Training:
    """Build with what ``content`` and ``own_content`` saved, or with rank 0's fresh weights, and warm up."""
    network = model.place(model.build(config), config, ranks.context)
    sgd = optimizer.build(network, config)
    if saved:
        network.load_state_dict(saved["network"])
        sgd.load_state_dict(saved["optimizer"])
    training = Training(network, _parallel(network, config, ranks), sgd, config)
    if config.compile != "none" or config.cuda_graph:
        training = warm_up(training, ranks.context, forward_backward)
    if saved:
        _set_statistics(network, saved["statistics"])
    return training


def content(training: Training) -> Dict[str, Any]:
    """Weights and momenta for a checkpoint."""
    return {"network": training.network.state_dict(), "optimizer": training.optimizer.state_dict()}


def own_content(training: Training, batches: TrainingInput) -> Dict[str, Any]:
    """What a rank has for itself: the state of its input, and its own running statistics."""
    statistics: List[torch.Tensor] = [tensor.cpu() for tensor in model.statistics(training.network)]
    return {"input": batches.checkpoint(), "statistics": statistics}


def _parallel(network: nn.Module, config: Config, ranks: Ranks) -> nn.Module:
    """Wrap ``network``: rank 0's weights go to all ranks, gradients are averaged in the backward pass.

    The compiler comes last: it cuts the network at the borders of the gradient buckets, so that their sums still
    overlap with the backward pass.
    """
    if ranks.size > 1:
        network = _distributed(network, config, ranks)
    if config.compile != "none":
        network = torch.compile(network, mode=config.compile, dynamic=False)
    return network


def _distributed(network: nn.Module, config: Config, ranks: Ranks) -> DistributedDataParallel:
    on_gpu = ranks.context.type == "cuda"
    # A capture needs its buckets made on another stream than the default one.
    stream = torch.cuda.Stream() if on_gpu else None
    with torch.cuda.stream(stream):
        wrapped = DistributedDataParallel(
            network,
            device_ids=[ranks.context.index] if on_gpu else None,
            **{_BUFFER_OPTION: False},  # each rank has its own statistics until an evaluation
            gradient_as_bucket_view=True,
            bucket_cap_mb=config.bucket_mb,
        )
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    if config.gradient_compression != "none":
        wrapped.register_comm_hook(dist.group.WORLD, HOOKS[config.gradient_compression])
    return wrapped


def synthetic_batch(config: Config, device: torch.device) -> Batch:
    """One batch of noise on the device, in the type and memory order of the real one."""
    dtype = torch.float16 if config.precision == "fp16" else torch.float32
    images = torch.rand(input_shape(config)).to(device, dtype)
    images = images.permute(0, 3, 1, 2) if config.layout == "NHWC" else images
    return images, torch.randint(0, config.num_classes, (config.batch_size,)).to(device)


def warm_up(training: Training, device: torch.device, forward_backward: ForwardBackward) -> Training:
    """Compile and capture on noise; weights and statistics stay as they are."""
    batch = synthetic_batch(training.config, device)
    kept = [buffer.clone() for buffer in model.statistics(training.network)]
    run = partial(forward_backward, training)
    if training.config.cuda_graph:
        training = training._replace(graph=Captured(run, batch, repeated(run, WARM_UP_STEPS)))
    else:
        run(*batch)
        training.optimizer.zero_grad(set_to_none=True)
    _set_statistics(training.network, kept)
    return training


@torch.no_grad()
def _set_statistics(network: nn.Module, values: List[torch.Tensor]) -> None:
    for buffer, value in zip(model.statistics(network), values):
        buffer.copy_(value)
