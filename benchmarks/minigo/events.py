"""The MLPerf log events of Minigo that do not depend on the framework.

The keys are those of the submitted logs, which minigo.yaml of ruleset 0.6.0 and closed_minigo.yaml of 0.7.0 ask for.
From v0.6 on models are evaluated after the clock; v0.6 ends with eval_result in place of run_stop.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Noted, Wording
from benchmarks.common.run.timeline import Timeline, by_epochs
from benchmarks.minigo.schedule import Roles

WORDING = Wording("minigo", off_clock=True)
GAMES = "actual_selfplay_games_per_generation"


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    batch = config.batch_size * min(config.train_ranks or ranks, ranks)
    rates = [float(f"{config.learning_rate * factor:.6g}") for factor in config.rate_factors]
    boundaries = list(config.rate_boundaries)
    if config.round != "v0.7":
        return {
            constants.OPT_BASE_LR: rates,
            "opt_learning_rate_decay_boundary_steps": boundaries,
            constants.GLOBAL_BATCH_SIZE: batch,
            "virtual_losses": config.parallel_leaves,
        }
    return {
        "lr_rates": rates,
        "lr_boundaries": boundaries,
        "train_batch_size": batch,
        "virtual_losses": config.parallel_leaves,
        constants.OPT_WEIGHT_DECAY: config.l2_strength,
        "filter_amount": config.sample_share,
        "num_readouts": config.readouts,
        "value_init_penalty": config.value_init_penalty,
        "disable_resign_pct": config.disable_resign_pct,
        "resign_threshold": config.max_resign_threshold,
        "min_selfplay_games_per_generation": config.games,
        "window_size": config.window,
        "eval_games": config.eval_games,
        # In the open division the checker asks for them; in games, which is what the rules count.
        constants.TRAIN_SAMPLES: config.games,
        constants.EVAL_SAMPLES: config.eval_games,
    }


def games(config: Any, generation: int, count: int) -> Dict[str, Any]:
    """What is logged once a generation, from 1, has its games."""
    return {GAMES: Noted(count, {"epoch_num": generation})} if config.round == "v0.7" else {}


def timeline(config: Any, ranks: int) -> Timeline:
    """A generation is an epoch of one step; v0.5 evaluates after each, later rounds after the clock."""
    within = config.round == "v0.5"
    base = by_epochs(config, 1, lambda epoch: within)
    return Timeline(
        steps_per_epoch=1,
        epochs=config.epochs,
        evaluates_after=base.evaluates_after,
        checkpoints_after=base.checkpoints_after,
        epoch_num=base.epoch_num,
        evaluates_inside_epochs=not within,
        training_ranks=len(Roles.of(config, ranks).training),
    )
