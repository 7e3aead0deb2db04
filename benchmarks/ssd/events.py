"""The MLPerf log events of SSD that do not depend on the framework.

The keys are those of the compliance checker (mlperf-logging, rulesets 0.6.0 and 0.7.0, ssd), as in the submitted logs.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.timeline import Timeline, by_epochs
from benchmarks.ssd.schedule import REFERENCE_BATCH, base_rate, boundaries

WORDING = Wording("ssd", accuracy_first=True)


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
