"""Train ResNet in PyTorch: DALI in, DistributedDataParallel across, MLPerf events out.

    $ python -m benchmarks.resnet.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --standalone --nproc-per-node 8 -m benchmarks.resnet.pytorch.train --config config.json ...

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint there
resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

import inspect
from contextlib import nullcontext
from functools import partial
from typing import Any, ContextManager, Dict, List, Mapping, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.frameworks import pytorch
from benchmarks.common.frameworks.pytorch import autocast
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.torch import abilities, networks, optimizers
from benchmarks.common.torch.cuda_graphs import Captured, on_side_stream, repeated
from benchmarks.resnet import events
from benchmarks.resnet.inputs import Batches, EvaluationInput, opened
from benchmarks.resnet.pytorch import data, model, operators, optimizer
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.optimizer import MomentumSGD

# Steps before a capture: DistributedDataParallel settles its buckets in the first ten (PyTorch, CUDA graphs).
STEPS_BEFORE_CAPTURE = 11

# How gradients travel, where not in their own type.
HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class Training(NamedTuple):
    network: nn.Module
    # The network with gradients averaged over the ranks in its backward pass, compiled if so configured.
    parallel: nn.Module
    optimizer: MomentumSGD
    config: Config
    graph: Optional[Captured] = None  # the whole step on a batch, at the rate that the optimizer has


def build(config: Config, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    """Build with what ``state_dict`` and ``rank_state_dict`` saved, or with rank 0's fresh weights, and warm up."""
    config = abilities.resolve(config, ranks)
    network = model.place(model.build(config), config, ranks.context)
    model.use(network, operators.choose(config, ranks, saved.get("operators")))
    sgd = optimizer.build(network, config)
    if saved:
        network.load_state_dict(saved["network"])
        sgd.load_state_dict(saved["optimizer"])
    if config.cuda_graph:
        sgd.make_capturable(ranks.context)
    training = Training(network, wrap(network, config, ranks), sgd, config)
    if saved:
        networks.set_statistics(network, saved["statistics"])
    return warm_up(training, ranks)


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
    # PyTorch 2.13 gave the option another name.
    takes = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in takes else "broadcast_buffers"
    # Built on the stream on which the step runs: a graph's is not the default one.
    with on_side_stream() if config.cuda_graph else nullcontext():
        wrapped = DistributedDataParallel(
            network,
            device_ids=[ranks.context.index] if ranks.context.type == "cuda" else None,
            **{buffers: False},  # each rank has its own statistics until an evaluation
            gradient_as_bucket_view=True,
            bucket_cap_mb=config.bucket_mb,
        )
    if config.gradient_compression != "none":
        wrapped.register_comm_hook(dist.group.WORLD, HOOKS[config.gradient_compression])
    return wrapped


def no_sync(parallel: nn.Module) -> ContextManager[Any]:
    """Keep the gradients of the pass inside on this rank."""
    return parallel.no_sync() if hasattr(parallel, "no_sync") else nullcontext()


def forward_backward(training: Training, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Fill the gradients, times config.loss_scale, summed over the ranks; return the mean loss of this rank."""
    config, passes = training.config, training.config.accumulation_steps
    training.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=images.device)
    for number, (part, targets) in enumerate(zip(images.chunk(passes), labels.chunk(passes)), start=1):
        with no_sync(training.parallel) if number < passes else nullcontext():
            with autocast(images.device, config.precision):
                logits = training.parallel(part)
            loss = model.smoothed_loss(logits, targets, config.label_smoothing)
            (loss * (config.loss_scale / passes)).backward()
        total += loss.detach()
    return total / passes


def whole_step(training: Training, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Forward, backward and update on one batch, at the rate that is set."""
    loss = forward_backward(training, images, labels)
    training.optimizer.step()
    return loss


def train_step(training: Training, images: torch.Tensor, labels: torch.Tensor, rate: float) -> torch.Tensor:
    """Train on one batch; return the mean loss of this rank, still on the device."""
    training.optimizer.set_learning_rate(rate)
    compute = training.graph or partial(whole_step, training)  # the same, captured
    return compute(images, labels)


@torch.no_grad()
def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Dict[str, float]]:
    """Top-1 accuracy over all validation images of all ranks, or None if the run is to stop."""
    network, device = training.network, run.ranks.context
    pytorch.average_tensors(networks.statistics(network))  # all ranks evaluate one network
    network.eval()
    correct = torch.zeros(1, device=device)
    counted = 0
    for images, labels, valid in run.interruptible(evaluation.one_pass()):
        if valid:
            with autocast(device, training.config.precision):
                logits = network(images)
            correct += (logits.argmax(dim=1) == labels)[:valid].sum()
        counted += valid
    network.train()
    if run.interrupted:
        return None
    (hits,) = run.total(torch.cat((correct, correct.new_tensor([counted]))), evaluation.total)
    return {"accuracy": hits / evaluation.total}


def warm_up(training: Training, ranks: Ranks) -> Training:
    """Compile, choose kernels, connect the ranks and capture, all on noise and before the clock (MLPerf since v0.6)."""
    config, step, device = training.config, partial(whole_step, training), ranks.context
    with optimizers.unchanged(training.network, training.optimizer):
        batch = data.synthetic_batch(config, device)
        if config.compile != "none" and (config.cuda_graph or config.warm_up_steps):
            abilities.compile_in_turns(partial(_own_pass, training, *batch), ranks)
        if config.cuda_graph:
            steps = max(config.warm_up_steps, STEPS_BEFORE_CAPTURE)
            training = training._replace(graph=Captured(step, batch, repeated(step, steps)))
        elif config.warm_up_steps:
            repeated(step, config.warm_up_steps)(*batch)
            training.optimizer.zero_grad(set_to_none=True)
        if config.warm_up_steps:
            images, _ = data.synthetic_batch(config, device, config.eval_batch_size)
            with torch.no_grad(), autocast(device, config.precision):
                training.network.eval()(images)
            training.network.train()
    return training


# Forward and backward pass whose gradients no other rank sees.
def _own_pass(training: Training, images: torch.Tensor, labels: torch.Tensor) -> None:
    config = training.config
    part, targets = (each.chunk(config.accumulation_steps)[0] for each in (images, labels))
    # On the stream of the step that follows: see ``replicated``.
    with on_side_stream() if config.cuda_graph else nullcontext(), no_sync(training.parallel):
        with autocast(images.device, config.precision):
            logits = training.parallel(part)
        (model.smoothed_loss(logits, targets, config.label_smoothing) * config.loss_scale).backward()
    training.optimizer.zero_grad(set_to_none=True)


def state_dict(training: Training) -> Dict[str, Any]:
    return {
        "network": training.network.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "operators": training.network.operators.names,
    }


def rank_state_dict(training: Training, batches: Batches) -> Dict[str, Any]:
    """Return what a rank has for itself: the state of its input, and its own running statistics."""
    return {
        "input": batches.checkpoint(),
        "statistics": [tensor.cpu() for tensor in networks.statistics(training.network)],
    }


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks, saved = run.config, run.ranks, run.saved
    with run.initialization():
        run.log(events.initialization(config))
        training = build(config, ranks, saved)
    with opened(run, data, saved) as (batches, evaluation, steps):
        run.register_state(partial(state_dict, training), partial(rank_state_dict, training, batches))
        for _ in run.blocks():
            for step in run.steps():
                rate = events.learning_rate(config, step, steps)
                run.report(train_step(training, *run.wait_for(batches.next), rate), rate)
            if run.evaluates():
                run.evaluated(evaluate(training, evaluation, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
