"""Train ResNet in MXNet: DALI in, Horovod across, MLPerf events out.

    $ python -m benchmarks.resnet.mxnet.train --config config.json --data DATA --output OUT
    $ horovodrun -np 8 python -m benchmarks.resnet.mxnet.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint there
resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

import mxnet as mx
from mxnet import autograd

from benchmarks.common.frameworks import mxnet
from benchmarks.common.frameworks.mxnet import hvd
from benchmarks.common.run import stopping
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.resnet import events
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.inputs import Batches, EvaluationInput, opened
from benchmarks.resnet.mxnet import data, model, optimizer
from benchmarks.resnet.mxnet.config import Config


class Training(NamedTuple):
    network: mx.gluon.HybridBlock
    loss: mx.gluon.HybridBlock
    trainer: hvd.DistributedTrainer
    # (batch_size,): head gradient of the losses, which makes them config.loss_scale times their mean.
    loss_scale: mx.nd.NDArray
    gammas: List[mx.nd.NDArray]  # parameters of all batch-norms
    config: Config


def build(config: Config, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    """Build with the weights and momenta of ``saved``, or with rank 0's fresh weights on all ranks if it is empty."""
    missing = model.missing_operators(config)
    if missing and ranks.rank == 0:
        print(missing, flush=True)
    network = model.build(config)
    model.initialize(network, config, ranks.context)
    loss = model.SmoothedLoss(config.label_smoothing)
    loss.hybridize(static_alloc=True, static_shape=True)
    parameters = network.collect_params()
    trainer = optimizer.build_trainer(parameters, config)
    loss_scale = mx.nd.full((config.batch_size,), config.loss_scale / config.batch_size, ctx=ranks.context)
    gammas = [parameter.data() for name, parameter in parameters.items() if name.endswith("gamma")]
    training = Training(network, loss, trainer, loss_scale, gammas, config)
    if saved:
        _restore(training, saved)
    else:
        mxnet.broadcast(parameters)
    return training


def train_step(training: Training, images: mx.nd.NDArray, labels: mx.nd.NDArray, rate: float) -> mx.nd.NDArray:
    """Forward, backward and update on one batch; return the mean loss of this rank, which nobody has waited for."""
    training.trainer.set_learning_rate(rate)
    with autograd.record():
        losses = training.loss(training.network(images), labels)
    losses.backward(training.loss_scale)
    training.trainer.step(training.config.loss_scale)
    return reported(training, losses)


def reported(training: Training, losses: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return the mean of ``losses``, or NaN where the step has left a gamma that is not finite.

    MXNet's ReLU makes 0 of NaN: once a convolution's gradient overflows, the loss stays at the logarithm of the number
    of classes. But the batch-norm behind that convolution has a NaN as gradient of gamma.
    """
    squares = mx.nd.multi_sum_sq(*training.gammas, num_arrays=len(training.gammas))
    return losses.mean() + 0.0 * squares.sum()


def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Dict[str, float]]:
    """Top-1 accuracy over all validation images of all ranks, or None if the run is to stop."""
    correct = mx.nd.zeros((1,))
    counted = 0
    for images, labels, valid in run.interruptible(evaluation.one_pass()):
        if valid:
            correct += hits(training, images, labels, valid).as_in_context(correct.context)
        counted += valid
    if run.interrupted:
        return None
    (hits_of_all,) = run.total([correct.asscalar(), counted], evaluation.total)
    return {"accuracy": hits_of_all / evaluation.total}


def hits(training: Training, images: mx.nd.NDArray, labels: mx.nd.NDArray, valid: int) -> mx.nd.NDArray:
    return (mx.nd.argmax(training.network(images), axis=1).astype("float32") == labels)[:valid].sum()


def warm_up(training: Training) -> None:
    """Run config.warm_up_steps steps on zeros, and put back weights, statistics and momenta."""
    config, context = training.config, training.loss_scale.context
    if config.warm_up_steps == 0:
        return
    kept = state_dict(training)
    images = mx.nd.zeros(input_shape(config), ctx=context, dtype="float16" if config.precision == "fp16" else "float32")
    labels = mx.nd.zeros((config.batch_size,), ctx=context)
    for _ in range(config.warm_up_steps):
        train_step(training, images, labels, config.learning_rate)
        stopping.progress()
    mx.nd.waitall()  # for rank_state_dict's reason
    _restore(training, kept)


def state_dict(training: Training) -> Dict[str, Any]:
    parameters = training.network.collect_params()
    with tempfile.NamedTemporaryFile() as file:
        training.trainer.save_states(file.name)
        states = Path(file.name).read_bytes()
    return {**{f"weights/{name}": p.data().asnumpy() for name, p in parameters.items()}, "trainer": states}


def rank_state_dict(training: Training, batches: Batches) -> Dict[str, Any]:
    """Return what a rank has for itself: the state of its input, and the running statistics with which it evaluates."""
    # MXNet does not know that a step still writes to them: reading waits for nothing.
    mx.nd.waitall()
    parameters = training.network.collect_params().items()
    statistics = {f"statistics/{name}": p.data().asnumpy() for name, p in parameters if p.grad_req == "null"}
    return {"input": batches.checkpoint(), **statistics}


# Set what ``state_dict`` and ``rank_state_dict`` returned.
def _restore(training: Training, saved: Mapping[str, Any]) -> None:
    for name, parameter in training.network.collect_params().items():
        value = saved.get(f"statistics/{name}", saved[f"weights/{name}"])
        parameter.set_data(mx.nd.array(value, dtype=parameter.dtype))
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(saved["trainer"])
        training.trainer.load_states(file.name)


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, mxnet, __doc__, argv, events.WORDING)
    config, ranks, saved = run.config, run.ranks, run.saved
    with run.initialization():
        run.log(events.initialization(config))
        training = build(config, ranks, saved)
        warm_up(training)
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
