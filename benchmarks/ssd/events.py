"""The learning rate and the MLPerf log events of SSD, which do not depend on the framework.

The keys are those of the compliance checker (mlperf-logging, rulesets 0.6.0 and 0.7.0, ssd), as in the submitted logs.
"""

from typing import Any, Dict, List

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.timeline import Timeline, by_epochs

WORDING = Wording("ssd", accuracy_first=True)
REFERENCE_BATCH = 32
REFERENCE_RATE = 2.5e-3


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    return {
        constants.MODEL_BN_SPAN: config.batch_size * config.bn_group,
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        constants.OPT_BASE_LR: base_rate(config, ranks),
        constants.OPT_WEIGHT_DECAY: config.weight_decay,
        constants.OPT_LR_WARMUP_STEPS: config.warmup_steps,
        constants.OPT_LR_WARMUP_FACTOR: config.warmup_factor,
        constants.MAX_SAMPLES: 1,  # attempts to crop an image
    }


def decays(config: Any, ranks: int, steps_per_epoch: int) -> Dict[str, Any]:
    """When the learning rate drops, in epochs, which are fractions where a round counts in steps."""
    epochs = [step / steps_per_epoch for step in boundaries(config, ranks, steps_per_epoch)]
    whole = [int(epoch) if epoch == int(epoch) else round(epoch, 3) for epoch in epochs]
    return {constants.OPT_LR_DECAY_BOUNDARY_EPOCHS: whole, constants.OPT_LR_DECAY_STEPS: whole}


def timeline(config: Any, ranks: int, steps_per_epoch: int) -> Timeline:
    """Evaluate after the submitted epochs, or after the submitted steps of 32 images, and at the end."""
    last = config.epochs
    if not config.eval_steps:
        return by_epochs(
            config,
            steps_per_epoch,
            lambda epoch: epoch + 1 in config.eval_epochs or epoch + 1 == last,
            stops_at_target=config.stop_at_target,
            evaluates_concurrently=config.concurrent_evaluation,
        )
    steps = last * steps_per_epoch
    points = {each * REFERENCE_BATCH // (config.batch_size * ranks) for each in config.eval_steps} | {steps}
    interval = config.checkpoint_interval * steps_per_epoch
    return Timeline(
        steps_per_epoch=steps_per_epoch,
        epochs=last,
        evaluates_after=lambda step: step in points,
        checkpoints_after=lambda step: interval > 0 and step % interval == 0,
        epoch_num=lambda step: (step - 1) // steps_per_epoch + 1,
        evaluates_inside_epochs=True,
        stops_at_target=config.stop_at_target,
        evaluates_concurrently=config.concurrent_evaluation,
    )


# -- the learning rate ------------------------------------------------------------------------------------


def base_rate(config: Any, ranks: int) -> float:
    """Return the rate after the warm-up, for the global batch.

    The rules allow whole multiples of the reference's 0.0025 (mlperf/training_policies, training_rules.adoc,
    "hyperparameters"): the one nearest to ``learning_rate`` for each 32 images, as the submissions round it.
    """
    wanted = config.learning_rate / REFERENCE_RATE * config.batch_size * ranks / REFERENCE_BATCH
    return REFERENCE_RATE * max(1, round(wanted))


def boundaries(config: Any, ranks: int, steps_per_epoch: int) -> List[int]:
    """Return the steps, counted from 0, from which on the rate is lower."""
    if config.decay_steps:
        return [steps * REFERENCE_BATCH // (config.batch_size * ranks) for steps in config.decay_steps]
    return [epoch * steps_per_epoch for epoch in config.decay_epochs]


def learning_rate(config: Any, step: int, ranks: int, steps_per_epoch: int) -> float:
    """Warm up linearly, and drop by a factor at each boundary; ``step`` counts from 0 over the whole run.

    As lr_warmup of the submissions (ssd/implementations/pytorch/train.py): the first step's rate is 0 with a
    warmup_factor of 0.
    """
    passed = sum(step >= boundary for boundary in boundaries(config, ranks, steps_per_epoch))
    rate = base_rate(config, ranks) * config.decay_factor**passed
    if step < config.warmup_steps:
        rate -= rate * (config.warmup_steps - step) / (config.warmup_steps * 2**config.warmup_factor)
    return float(rate)
