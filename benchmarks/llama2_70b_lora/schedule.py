"""Learning rate and evaluations of Llama 2 70B LoRA, used by all frameworks.

``config``: the Config of any framework.
"""

from typing import Any

from benchmarks.common.run.timeline import Timeline
from benchmarks.llama.schedule import learning_rate

__all__ = ["learning_rate", "timeline"]


def timeline(config: Any, ranks: int) -> Timeline:
    """Evaluate every ``eval_interval_samples``, rounded up to steps, and after the last step.

    The first floor(global batch / 8 + 2) evaluations are skipped, according to the rules (training_rules.adoc,
    "evaluation").
    """
    global_batch = config.batch_size * ranks
    interval, skipped = -(-config.eval_interval_samples // global_batch), global_batch // 8 + 2
    checkpoint_steps = config.checkpoint_interval * interval

    def evaluates_after(step: int) -> bool:
        return step > 0 and ((step % interval == 0 and step // interval > skipped) or step == config.max_steps)

    return Timeline(
        steps_per_epoch=config.max_steps,
        epochs=1,
        evaluates_after=evaluates_after,
        checkpoints_after=lambda step: checkpoint_steps > 0 and step % checkpoint_steps == 0,
        epoch_num=lambda step: step * global_batch,
        evaluates_inside_epochs=True,
        lower_is_better=True,
    )
