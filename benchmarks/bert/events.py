"""The learning rate and the MLPerf log events of BERT pretraining which do not depend on the framework.

The keys are those of the v0.7 compliance checker (mlperf-logging, ruleset 0.7.0, bert), as in NVIDIA's submitted logs:
a run is one epoch and one block, and train_samples, logged at its end, are the samples that it trained on.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.timeline import Timeline

WORDING = Wording("bert", accuracy_first=True)


def hyperparameters(config: Any, ranks: int, max_predictions: int) -> Dict[str, Any]:
    # Every hyperparameter event of a run, in the order in which it is logged.
    return {
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        "opt_gradient_accumulation_steps": config.accumulation,
        "max_predictions_per_seq": max_predictions,
        "opt_learning_rate_training_steps": config.max_steps,
        "num_warmup_steps": config.warmup_steps,
        constants.OPT_NAME: config.optimizer,
        constants.OPT_BASE_LR: config.learning_rate,
        "opt_epsilon": config.epsilon,
        "opt_lamb_beta_1": config.beta1,
        "opt_lamb_beta_2": config.beta2,
        "opt_lamb_weight_decay_rate": config.weight_decay,
        constants.OPT_LR_WARMUP_STEPS: config.warmup_steps,
        "opt_lamb_learning_rate_decay_poly_power": config.decay_power,
        "start_warmup_step": config.start_warmup_step,
    }


def timeline(config: Any, ranks: int) -> Timeline:
    """Evaluate once ``eval_start_samples`` are trained on, after each ``eval_interval_samples``, and at the end.

    As run_pretraining.py of NVIDIA's submission does: behind the first step that comes to the number of samples. The
    one at the end is ours.
    """
    global_batch = config.batch_size * ranks
    steps = min(config.max_steps, -(-config.max_samples // global_batch))
    start, interval = config.eval_start_samples, config.eval_interval_samples

    def passed(step: int) -> int:
        # Return the number of evaluations that are due up to a position.
        return max(0, (step * global_batch - start) // interval + 1)

    def evaluates_after(step: int) -> bool:
        return step > 0 and (passed(step) > passed(step - 1) or step == steps)

    checkpoint_interval = config.checkpoint_interval
    return Timeline(
        steps_per_epoch=steps,
        epochs=1,
        evaluates_after=evaluates_after,
        checkpoints_after=lambda step: (
            checkpoint_interval > 0 and evaluates_after(step) and passed(step) % checkpoint_interval == 0
        ),
        epoch_num=lambda step: 1,
        evaluates_inside_epochs=True,
    )


def learning_rate(config: Any, step: int) -> float:
    """Warm up linearly, then decay to 0 at ``max_steps``; ``step`` counts from 0 over the whole run.

    As LinearWarmupPolyDecayScheduler of NVIDIA's v0.7 submission has it (schedulers.py), which counts the first step
    as 1: the decay is that of the whole run, so that the rate falls by a step at the end of the warm-up.
    """
    number = step + 1
    warmed_up = number - config.start_warmup_step
    if warmed_up < config.warmup_steps:
        return float(config.learning_rate * warmed_up / config.warmup_steps)
    return float(config.learning_rate * (1 - min(number / config.max_steps, 1.0)) ** config.decay_power)
