"""What a step works on: built over the ranks, compiled or captured as a CUDA graph, carried through checkpoints."""

from __future__ import annotations

import inspect
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import torch_abilities
from benchmarks.common.cuda_graphs import Captured, on_side_stream, repeated
from benchmarks.common.frameworks.pytorch import autocast
from benchmarks.common.ranks import Ranks
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.inputs import TrainingInput
from benchmarks.resnet.pytorch import model, operators, optimizer
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.data import Batch
from benchmarks.resnet.pytorch.optimizer import MomentumSGD

STEPS_BEFORE_CAPTURE = 11
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
    """The whole step on a batch, at the rate that the optimizer has."""


Step = Callable[[Training, torch.Tensor, torch.Tensor], torch.Tensor]


def build(config: Config, ranks: Ranks, saved: Mapping[str, Any], whole_step: Step) -> Training:
    """Build with what ``content`` and ``own_content`` saved, or with rank 0's fresh weights, and warm up."""
    config = torch_abilities.settle(config, ranks)
    network = model.place(model.build(config), config, ranks.context)
    model.use(network, operators.choose(config, ranks, saved.get("operators")))
    sgd = optimizer.build(network, config)
    if saved:
        network.load_state_dict(saved["network"])
        sgd.load_state_dict(saved["optimizer"])
    if config.cuda_graph:
        sgd.make_capturable(ranks.context)
    training = Training(network, _parallel(network, config, ranks), sgd, config)
    if saved:
        _set_statistics(network, saved["statistics"])
    return warm_up(training, ranks, whole_step)


def content(training: Training) -> Dict[str, Any]:
    """Weights and momenta for a checkpoint."""
    return {
        "network": training.network.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "operators": training.network.operators.names,
    }


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


def accumulating(training: Training, is_last: bool) -> ContextManager[Any]:
    """Keep the gradients of a pass that is not the last of its step on this rank."""
    no_sync = getattr(training.parallel, "no_sync", None)
    return nullcontext() if is_last or no_sync is None else no_sync()


def synthetic_batch(config: Config, device: torch.device, batch_size: int = 0) -> Batch:
    """One batch of noise on the device, in the type and memory order of the real one; default: of a training step."""
    count = batch_size or config.batch_size
    dtype = torch.float16 if config.precision == "fp16" else torch.float32
    images = torch.rand((count, *input_shape(config)[1:])).to(device, dtype)
    images = images.permute(0, 3, 1, 2) if config.layout == "NHWC" else images
    return images, torch.randint(0, config.num_classes, (count,)).to(device)


def warm_up(training: Training, ranks: Ranks, whole_step: Step) -> Training:
    """Compile, choose kernels, connect the ranks and capture, all on noise and before the clock (MLPerf since v0.6)."""
    config, step, device = training.config, partial(whole_step, training), ranks.context
    with _unchanged(training, device):
        batch = synthetic_batch(config, device)
        if config.compile != "none" and (config.cuda_graph or config.warm_up_steps):
            torch_abilities.compile_in_turns(partial(_own_pass, training, *batch), ranks)
        if config.cuda_graph:
            steps = max(config.warm_up_steps, STEPS_BEFORE_CAPTURE)
            training = training._replace(graph=Captured(step, batch, repeated(step, steps)))
        elif config.warm_up_steps:
            repeated(step, config.warm_up_steps)(*batch)
            training.optimizer.zero_grad(set_to_none=True)
        if config.warm_up_steps:
            images, _ = synthetic_batch(config, device, config.eval_batch_size)
            with torch.no_grad(), autocast(device, config.precision):
                training.network.eval()(images)
            training.network.train()
    return training


def _own_pass(training: Training, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Forward and backward pass whose gradients no other rank sees."""
    config = training.config
    part, targets = (each.chunk(config.accumulation_steps)[0] for each in (images, labels))
    # On the stream of the step that follows: see _distributed.
    with on_side_stream() if config.cuda_graph else nullcontext(), accumulating(training, is_last=False):
        with autocast(images.device, config.precision):
            logits = training.parallel(part)
        (model.smoothed_loss(logits, targets, config.label_smoothing) * config.loss_scale).backward()
    training.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _unchanged(training: Training, device: torch.device) -> Iterator[None]:
    """Put back what is inside changes, in place, since a graph holds these very tensors: all but gradients."""
    kept = [(tensor, tensor.clone()) for tensor in (*training.network.state_dict().values(), *_momenta(training))]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for momentum in _momenta(training):
        momentum.zero_()
    for tensor, value in kept:
        tensor.copy_(value)


def _momenta(training: Training) -> List[torch.Tensor]:
    return [state["momentum_buffer"] for state in training.optimizer.state.values()]


@torch.no_grad()
def _set_statistics(network: nn.Module, values: List[torch.Tensor]) -> None:
    for buffer, value in zip(model.statistics(network), values):
        buffer.copy_(value)
