"""How a step runs: over several ranks, compiled, replayed as a CUDA graph; and what must be done beforehand."""

from __future__ import annotations

import inspect
import os
from typing import Any, Callable, List, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import torch_precision, torch_ranks
from benchmarks.common.ranks import Ranks
from benchmarks.resnet.pytorch import model
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.data import Batch

WARM_UP_STEPS = 11
"""Steps before a capture: DistributedDataParallel settles its buckets in the first ten (PyTorch, CUDA graphs)."""
HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
"""How gradients travel, where not in their own type."""

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFER_OPTION = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"
"""PyTorch 2.13 gave the option another name."""


def set_up(config: Config) -> None:
    """Settings of the whole process; call before the ranks find each other."""
    torch_precision.set_matmul(config.precision)
    torch.backends.cudnn.benchmark = True
    if config.cuda_graph:
        # NCCL's watchdog would ask for the state of the device during a capture, which ends it (PyTorch,
        # CUDA graphs with DistributedDataParallel).
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def parallel(network: nn.Module, config: Config, ranks: Ranks) -> nn.Module:
    """``network`` with gradients averaged over all ranks during the backward pass, compiled if so configured.

    Rank 0's weights go to all ranks. The compiler comes last: it cuts the network at the borders of the
    gradient buckets, so that their sums still overlap with the backward pass.
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


def forward_backward(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config,
    images: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """Fill the gradients, times config.loss_scale; returns the mean loss of this rank's batch.

    train.py spells the same out; this is for warming up and for the capture.
    """
    optimizer.zero_grad(set_to_none=True)
    with torch_precision.autocast(images.device, config.precision):
        logits = network(images)
    loss = model.smoothed_loss(logits, labels, config.label_smoothing)
    (loss * config.loss_scale).backward()
    return loss.detach()


class GraphedStep:
    """Forward and backward as one CUDA graph over fixed memory: the CPU launches it whole."""

    def __init__(self, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], batch: Batch) -> None:
        self._images, self._labels = (tensor.clone() for tensor in batch)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads ask of the device meanwhile does not end the capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = run(self._images, self._labels)

    def replay(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Fill the gradients of this batch; the loss is valid until the next replay."""
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._graph.replay()
        return self._loss


def synthetic_batch(config: Config, device: torch.device) -> Batch:
    """One batch of noise on the device, in the type and memory order of the real one."""
    dtype = torch.float16 if config.precision == "fp16" else torch.float32
    images = torch.rand(model.input_shape(config)).to(
        device, dtype, memory_format=model.memory_format(config)
    )
    return images, torch.randint(0, config.num_classes, (config.batch_size,)).to(device)


def warm_up(
    network: nn.Module,
    bare: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config,
    device: torch.device,
) -> Optional[GraphedStep]:
    """Compile and capture on noise, before the clock starts; weights and statistics stay as they are.

    ``bare`` is the network inside of ``network``. Returns the captured step where one is configured; does nothing
    for a network that is neither compiled nor captured.
    """
    if config.compile == "none" and not config.cuda_graph:
        return None
    batch = synthetic_batch(config, device)
    kept = [buffer.clone() for buffer in model.statistics(bare)]

    def run(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return forward_backward(network, optimizer, config, images, labels)

    graphed = None
    if config.cuda_graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                run(*batch)
        torch.cuda.current_stream().wait_stream(stream)
        graphed = GraphedStep(run, batch)
    else:
        run(*batch)
    with torch.no_grad():
        for buffer, before in zip(model.statistics(bare), kept):
            buffer.copy_(before)
    if graphed is None:
        optimizer.zero_grad(set_to_none=True)
    return graphed


def average_statistics(network: nn.Module) -> None:
    """Give all ranks the mean of their running means and variances, so that they evaluate one network."""
    if torch_ranks.size() == 1:
        return
    buffers: List[Any] = model.statistics(network)
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    dist.all_reduce(flat)
    flat /= torch_ranks.size()
    for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
        buffer.copy_(mean.view_as(buffer))
