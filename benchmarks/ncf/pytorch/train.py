"""Train NCF with PyTorch: sampling and training on the device, torch.distributed, v0.5 MLPerf log.

    $ python -m benchmarks.ncf.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --standalone --nproc-per-node 8 -m benchmarks.ncf.pytorch.train --config config.json ...

Writes result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/ to OUT, and resumes from a checkpoint
there. Exit code 0: finished as configured, see the last record of metrics.jsonl; otherwise: failed.
"""

from functools import partial
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.data import manifest
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.torch import kernels, optimizers
from benchmarks.common.torch.cuda_graphs import Captured
from benchmarks.ncf import mlperf, schedule
from benchmarks.ncf.flops import training_flops
from benchmarks.ncf.pytorch import data, model, operators
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.data import DataSet, Sampler
from benchmarks.ncf.pytorch.evaluation import Candidates, gains
from benchmarks.ncf.pytorch.model import NeuMF

CANDIDATES = 1000  # candidates per user: the held-out item and 999 negatives, as in the submissions
MEASURED = 1 << 20  # training pairs for measurements of the sampling kernels
WARMUP_STEPS = 3  # before a capture, as recommended in PyTorch's notes on CUDA graphs


class Training(NamedTuple):
    network: NeuMF
    optimizer: torch.optim.Optimizer
    kernel: str  # name of the optimizer's implementation
    kernels: Mapping[str, str]  # names of the operators' implementations
    gradients: torch.Tensor  # of all parameters, flat
    sampler: Sampler
    losses: torch.Tensor  # (steps per epoch,): local part of the mean loss by step
    config: Config
    graph: Optional[Captured] = None  # full epoch: sampling and all steps


def build(config: Config, users: int, items: int, sampler: Sampler, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    """Restore the state of ``state_dict``, or broadcast the initial weights of rank 0; capture an epoch on a GPU."""
    torch.manual_seed(config.seed)
    network = model.build(config, users, items).to(ranks.context)
    training = assemble(config, network, sampler, ranks, saved)
    if saved:
        network.load_state_dict(saved["network"])
    else:
        pytorch.broadcast(network.parameters())
    if config.cuda_graph and config.device == "gpu":
        training = training._replace(graph=_capture_epoch(training))
    if saved:
        optimizers.restore(training.optimizer, saved["optimizer"])
    return training


def assemble(
    config: Config, network: NeuMF, sampler: Sampler, ranks: Ranks, saved: Optional[Mapping[str, Any]] = None
) -> Training:
    """Optimizer, gradients and losses for ``network``, the sampler's kernel; ``saved`` is a checkpoint's content."""
    saved = saved or {}
    sizes = {"samples": {"users": network.gmf_users.shape[0], "items": network.gmf_items.shape[0], "pairs": MEASURED}}
    clock = kernels.clock(config.cuda_graph)
    names = kernels.choose(
        operators.OPERATORS, config.kernels, ranks, torch.float32, sizes, saved.get("kernels"), clock
    )
    sampler.draws = kernels.implementation(operators.OPERATORS["samples"], names["samples"])
    candidates = optimizers.adam_candidates(
        config.learning_rate,
        (config.beta1, config.beta2),
        config.epsilon,
        optimizers.find_apex(),
        capturable=config.device == "gpu",
    )
    parameters = list(network.parameters())
    name, optimizer = optimizers.choose(candidates, parameters, saved.get("kernel", config.optimizer_kernel))
    losses = torch.zeros(sampler.steps_per_epoch, device=ranks.context)
    return Training(network, optimizer, name, names, pytorch.flat_gradients(parameters), sampler, losses, config)


def train_step(training: Training, step_in_epoch: int) -> None:
    """Forward, backward and update for a step of the sampled epoch, without synchronization."""
    config, gradients, losses = training.config, training.gradients, training.losses
    scale = config.loss_scale if config.precision == "fp16" else 1.0
    users, items, labels, global_size = training.sampler.batch(step_in_epoch)
    with pytorch.autocast(losses.device, config.precision):
        loss = training.network.loss_sum(users, items, labels) / global_size
    (loss * scale).backward()
    if pytorch.size() > 1:
        dist.all_reduce(gradients)
    if scale != 1.0:
        gradients.mul_(1.0 / scale)
    training.optimizer.step()
    gradients.zero_()
    losses[step_in_epoch] = loss.detach()


def train_steps(training: Training, run: Run, steps: range, seed: int) -> None:
    """Run and report steps of the epoch with ``seed``, eagerly, or the full epoch as one graph."""
    sampler, losses = training.sampler, training.losses
    first = steps.start % sampler.steps_per_epoch
    last = first + len(steps)
    if training.graph is None:
        run.wait_for(partial(sampler.draw_epoch, seed))
        for step_in_epoch in range(first, last):
            train_step(training, step_in_epoch)
    else:
        torch.manual_seed(seed)
        training.graph()
    loss = losses[first:last].mean() * run.ranks.size
    run.report(loss, training.config.learning_rate, sampler.seen(last) - sampler.seen(first))


@torch.no_grad()
def evaluate(training: Training, candidates: Candidates, users: int, run: Run) -> Optional[Dict[str, float]]:
    """HR@10 and NDCG@10 over all users of all ranks, or None if the run is to stop."""
    config, network, device = training.config, training.network, run.ranks.context
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with pytorch.autocast(device, config.precision):
        tables = network.first_layer_tables()
    for number in run.interruptible(range(candidates.parts)):
        part = candidates.part(number)
        with pytorch.autocast(device, config.precision):
            scores = network.score_candidates(candidates.first_user, part, candidates.items[part], tables)
        sums += gains(candidates.ranks_of_held_out(scores, part))
    if run.interrupted:
        return None
    hits, gain = run.total(sums, users)
    return {"hit_rate": hits / users, "ndcg": gain / users}


def users_per_part(config: Config) -> int:
    return max(1, config.eval_batch_size // CANDIDATES)


def evaluation_step(training: Training, data_set: DataSet, ranks: Ranks) -> Callable[[], None]:
    """Rank the held-out items of some users among synthetic candidates."""
    config = training.config
    count = min(users_per_part(config), data_set.users)
    negatives = np.random.RandomState(0).randint(data_set.items, size=(count, CANDIDATES - 1))
    subset = data_set._replace(users=count, test_items=data_set.test_items[:count], negatives=negatives)
    candidates, part = Candidates(subset, config, Ranks(0, 1, 0, 1, ranks.context)), slice(0, count)

    @torch.no_grad()
    def step() -> None:
        with pytorch.autocast(ranks.context, config.precision):
            tables = training.network.first_layer_tables()
            scores = training.network.score_candidates(0, part, candidates.items, tables)
        gains(candidates.ranks_of_held_out(scores, part))

    return step


# Capture a full epoch as one CUDA graph: sampling and all steps. The warm-up before the capture trains; weights and
# optimizer are restored. The graph uses the device's generator, so seeding it before a replay determines the epoch.
def _capture_epoch(training: Training) -> Captured:
    steps = training.sampler.steps_per_epoch

    def run(count: int = steps) -> None:
        training.sampler.draw()
        for step_in_epoch in range(count):
            train_step(training, step_in_epoch)

    @torch.no_grad()
    def warm_up() -> None:
        saved = [parameter.clone() for parameter in training.network.parameters()]
        with torch.enable_grad():
            run(min(WARMUP_STEPS, steps))
        for parameter, value in zip(training.network.parameters(), saved):
            parameter.copy_(value)
        optimizers.reset(training.optimizer)
        training.gradients.zero_()

    return Captured(run, (), warm_up)


def state_dict(training: Training) -> Dict[str, Any]:
    """Return the state shared by all ranks; an epoch's samples are reproducible from its seed."""
    return {
        "network": training.network.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "kernel": training.kernel,
        "kernels": training.kernels,
    }


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, mlperf.WORDING)
    config, ranks = run.config, run.ranks
    with run.initialization():
        data_set = data.synthetic(manifest.read(run.data), ranks.context)
        sampler = data.Sampler(data_set, config.batch_size, config.negatives, ranks)
        training = build(config, data_set.users, data_set.items, sampler, ranks, run.saved)
        evaluation_step(training, data_set, ranks)()  # loads its kernels before the clock
    run.log(mlperf.data(data_set.counts, len(data_set.train_users), sampler.global_batch_size))
    run.log(mlperf.hyperparameters(config, data_set.counts))
    with run.timed(schedule.timeline(config, sampler.steps_per_epoch), partial(training_flops, config)):
        data_set = data.load(run.data, data_set)
        sampler.index()
        candidates = Candidates(data_set, config, ranks)
        run.register_state(partial(state_dict, training))
        stride = sampler.steps_per_epoch if training.graph else config.log_interval
        for epoch in run.blocks():
            if run.starts_epoch:
                run.log(mlperf.epoch(config))
            for steps in run.step_ranges(stride):
                train_steps(training, run, steps, data.epoch_seed(config.seed, epoch))
            if run.evaluates():
                run.log(mlperf.evaluation(epoch, data_set.counts))
                run.evaluated(evaluate(training, candidates, data_set.users, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
