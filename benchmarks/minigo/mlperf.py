"""MLPerf log keys of Minigo.

Source: the submitted logs, minigo.yaml of ruleset 0.6.0 and closed_minigo.yaml of 0.7.0 (mlperf-logging). Since v0.6
models are evaluated after the timed run; v0.6 ends with eval_result instead of run_stop. ``config``: the Config of any
framework.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Noted, Wording

WORDING = Wording("minigo", off_clock=True)
GAMES = "actual_selfplay_games_per_generation"


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Return the values to log before run_start, in this order."""
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
        # Required by the checker in the open division, counted in games as in the rules
        constants.TRAIN_SAMPLES: config.games,
        constants.EVAL_SAMPLES: config.eval_games,
    }


def games(config: Any, generation: int, count: int) -> Dict[str, Any]:
    """Return the values to log after the self-play in a generation, counted from 1."""
    return {GAMES: Noted(count, {"epoch_num": generation})} if config.round == "v0.7" else {}
