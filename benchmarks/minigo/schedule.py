"""Run settings, derived from the configuration: rank roles, learning rate, generations, rules, searches."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, List

from benchmarks.common.run.timeline import Timeline, by_epochs
from benchmarks.minigo.engine import Rules, Search

# A generation's game numbers start at a multiple, for unique numbers in a run
GAMES_PER_GENERATION = 10**6


@dataclass(frozen=True)
class Roles:
    """Ranks that train and ranks that play: the first and the last ranks, as declared in benchmark.toml."""

    training: range
    selfplay: range

    @classmethod
    def of(cls, config: Any, size: int) -> "Roles":
        """Return the roles of ``size`` ranks; a count of 0, or above ``size``, means all."""
        players = min(config.selfplay_ranks or size, size)
        return cls(range(min(config.train_ranks or size, size)), range(size - players, size))


def learning_rate(config: Any, step: int) -> float:
    """Return the learning rate at a step, counted including the steps of the initial weights:
    tf.train.piecewise_constant of dual_net.py.
    """
    return config.rates[bisect_left(config.rate_boundaries, step)]


def timeline(config: Any, ranks: int) -> Timeline:
    """Return a timeline with a generation as a one-step epoch.

    v0.5 evaluates after every generation, later rounds after the timed run.
    """
    is_timed = config.round == "v0.5"
    base = by_epochs(config, 1, lambda epoch: is_timed)
    return Timeline(
        steps_per_epoch=1,
        epochs=config.epochs,
        evaluates_after=base.evaluates_after,
        checkpoints_after=base.checkpoints_after,
        epoch_num=base.epoch_num,
        evaluates_inside_epochs=not is_timed,
        data_parallel_ranks=len(Roles.of(config, ranks).training),
    )


def share(total: int, part: int, parts: int) -> range:
    """Return the part of ``total`` consecutive numbers that belongs to one of ``parts``, sizes within one."""
    return range(total * part // parts, total * (part + 1) // parts)


def game_numbers(config: Any, generation: int, part: int, parts: int) -> range:
    """Return the numbers of the games that one of ``parts`` players plays in a generation, from 1."""
    part_numbers = share(config.games, part, parts)
    first = generation * GAMES_PER_GENERATION
    return range(first + part_numbers.start, first + part_numbers.stop)


def window(config: Any, generation: int) -> List[int]:
    """Return the generations used to train a generation, in ascending order."""
    return list(range(max(1, generation - config.window + 1), generation + 1))


# -- the games ------------------------------------------------------------------------------------------

BYTES_OF_A_PRIOR = 4
NEVER = 1 << 20  # Passes in a row that no game has


def rules_of(config: Any) -> Rules:
    return Rules(size=config.board_size, komi=config.komi, pass_alive=config.pass_alive, features=config.features)


def search_of(config: Any) -> Search:
    """Return the search of self-play; the options have the names of the submitted flags."""
    moves = config.board_size**2 + 1
    return Search(
        readouts=config.readouts,
        parallel_leaves=config.parallel_leaves,
        fastplay_frequency=config.fastplay_frequency,
        fastplay_readouts=config.fastplay_readouts,
        value_init_penalty=config.value_init_penalty,
        policy_softmax_temp=config.policy_softmax_temp,
        dirichlet_alpha=config.dirichlet_alpha,
        noise_mix=config.noise_mix,
        target_pruning=config.target_pruning,
        min_resign_threshold=config.min_resign_threshold,
        max_resign_threshold=config.max_resign_threshold,
        disable_resign_pct=config.disable_resign_pct,
        soft_pick_cutoff=soft_moves(config),
        restrict_pass_alive_play_threshold=4 if config.pass_alive else NEVER,
        move_limit=config.move_limit,
        cache_entries=(config.cache_mb << 20) // (BYTES_OF_A_PRIOR * moves),
    )


def soft_moves(config: Any) -> int:
    """Return the number of first moves that are sampled by visits (MctsPlayer of v0.6, MctsTree of v0.7)."""
    points: int = config.board_size**2
    return points // 12 // 2 * 2


def match_search(config: Any) -> Search:
    """Return the search for matches: without noise, and since v0.7 without resignation (eval.flags).

    In self-play the submitted default (train_loop.py, v0.7) prohibits moves into unconditional life after four
    opponent passes, in matches always (MctsPlayer::SuggestMove); v0.6 does not compute unconditional life.
    """
    return Search(
        readouts=config.eval_readouts,
        parallel_leaves=config.parallel_leaves,
        value_init_penalty=config.value_init_penalty,
        soft_pick_cutoff=config.eval_soft_moves,
        noise_mix=0.0,
        fastplay_frequency=0.0,
        min_resign_threshold=config.eval_resign_threshold,
        max_resign_threshold=config.eval_resign_threshold,
        disable_resign_pct=0.0 if config.eval_resign_threshold > -1 else 1.0,
        restrict_pass_alive_play_threshold=0 if config.pass_alive else NEVER,
        move_limit=config.move_limit,
    )
