"""What a configuration's games are played by, and how they are searched, as the engine takes it."""

from __future__ import annotations

from typing import Any

from benchmarks.minigo.engine import Rules, Search

BYTES_OF_A_PRIOR = 4
NEVER = 1 << 20  # Passes in a row that no game has


def rules_of(config: Any) -> Rules:
    """Return the rules of a configuration's games."""
    return Rules(size=config.board_size, komi=config.komi, pass_alive=config.pass_alive, features=config.features)


def search_of(config: Any, readouts: int) -> Search:
    """Return the search of self-play; the options have the names of the submitted flags."""
    moves = config.board_size**2 + 1
    return Search(
        readouts=readouts,
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
    """Return how many first moves of a game are drawn by their visits (MctsPlayer of v0.6, MctsTree of v0.7)."""
    points: int = config.board_size**2
    return points // 12 // 2 * 2


def match_search(config: Any) -> Search:
    """Return the search of a match: without noise, and without resignation from v0.7 on (eval.flags).

    In self-play the submitted default (train_loop.py, v0.7) forbids a move into unconditional life after four passes of
    the other side, in a match always (MctsPlayer::SuggestMove); v0.6 knows no unconditional life.
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
