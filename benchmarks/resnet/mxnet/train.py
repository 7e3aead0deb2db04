"""Train ResNet in MXNet: DALI in, Horovod across, MLPerf events out.

    $ python -m benchmarks.resnet.mxnet.train --config config.json --data DATA --output OUT
    $ horovodrun -np 8 python -m benchmarks.resnet.mxnet.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint there
resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Dict, List, Optional

import mxnet as mx
from mxnet import autograd

from benchmarks.common.frameworks import mxnet
from benchmarks.common.mllog import samples
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process
from benchmarks.resnet import events
from benchmarks.resnet.inputs import EvaluationInput, TrainingInput, count_records, steps_per_epoch
from benchmarks.resnet.mxnet import data
from benchmarks.resnet.mxnet.config import Config
from benchmarks.resnet.mxnet.training import Training, build, content, own_content, reported, warm_up
from benchmarks.resnet.schedule import learning_rate


def train_step(training: Training, images: mx.nd.NDArray, labels: mx.nd.NDArray, rate: float) -> mx.nd.NDArray:
    """Forward, backward and update on one batch; return the mean loss of this rank, which nobody has waited for."""
    training.trainer.set_learning_rate(rate)
    with autograd.record():
        losses = training.loss(training.network(images), labels)
    losses.backward(training.loss_scale)
    training.trainer.step(training.config.loss_scale)
    return reported(training, losses)


def hits(training: Training, images: mx.nd.NDArray, labels: mx.nd.NDArray, valid: int) -> mx.nd.NDArray:
    """Right answers for the first ``valid`` images."""
    return (mx.nd.argmax(training.network(images), axis=1).astype("float32") == labels)[:valid].sum()


def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Dict[str, float]]:
    """Top-1 accuracy over all validation images of all ranks, or None if the run is to stop."""
    correct = mx.nd.zeros((1,))
    counted = 0
    for images, labels, valid in run.watch(evaluation.one_pass()):
        if valid:
            correct += hits(training, images, labels, valid).as_in_context(correct.context)
        counted += valid
    if run.interrupted:
        return None
    (hits_of_all,) = run.total([correct.asscalar(), counted], evaluation.total)
    return {"accuracy": hits_of_all / evaluation.total}


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, mxnet, __doc__, argv, events.WORDING)
    config, ranks, saved = run.config, run.ranks, run.saved
    with run.initialization():
        run.log(events.initialization(config))
        training = build(config, ranks, saved)
        warm_up(training, train_step)
    train_images = lru_cache(None)(partial(count_records, run.data / "train.idx"))
    # The index is read behind run_start, like all of the data set.
    with run.timed(lambda: events.timeline(config, steps_per_epoch(train_images(), config, ranks))) as timeline:
        steps = timeline.steps_per_epoch
        run.log(events.hyperparameters(config, ranks.size, steps))
        batches = TrainingInput(data, config, run.data, ranks, saved.get("input"))
        evaluation = EvaluationInput(data, config, run.data, ranks)
        run.log(samples(train_images(), evaluation.total))
        run.keep(partial(content, training), partial(own_content, training, batches))
        for _ in run.blocks():
            for step in run.steps():
                rate = learning_rate(config, step, steps)
                run.report(train_step(training, *run.wait_for(batches.next), rate), rate)
            if run.evaluates():
                run.evaluated(evaluate(training, evaluation, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
