"""Minigo's submitted systems against the submitted scripts and the files of flags that they name."""

from __future__ import annotations

from typing import Any

import pytest

from encore import configuration
from tests.test_systems import SUBMITTED, Submitted, name_of, resolved


def lists_of(each: Submitted) -> dict[str, list[str]]:
    """Return the values of each flag of Minigo's, one after the other: its lists are flags that are repeated."""
    found: dict[str, list[str]] = {}
    for flag in each.flags:
        name, _, value = flag.partition("=")
        found.setdefault(name, []).extend(value.strip("[]").split(","))
    return found


def expected_of_minigo(each: Submitted) -> dict[str, Any]:
    """Return our keys with the values of the submitted command and of the files of flags that it names."""
    lists = lists_of(each)
    given = {name: values[-1] for name, values in lists.items()}
    rates = [float(rate) for rate in lists["lr_rates"]]
    expected = {
        "epochs": int(given["iterations"]),
        "window": int(given["window_size"]),
        "train_ranks": int(given["num_gpus_train"]),
        "readouts": int(given["num_readouts"]),
        "parallel_leaves": int(given["virtual_losses"]),
        "value_init_penalty": float(given["value_init_penalty"]),
        "disable_resign_pct": float(given["disable_resign_pct"]),
        "conv_width": int(given["conv_width"]),
        "trunk_layers": int(given["trunk_layers"]),
        "fc_width": int(given["fc_width"]),
        "value_cost_weight": float(given["value_cost_weight"]),
        "batch_size": int(given["train_batch_size"]) // int(given["num_gpus_train"]),
        "learning_rate": max(rates),
        "rates": tuple(rates),
        "rate_boundaries": tuple(map(int, lists["lr_boundaries"])),
        "l2_strength": float(given["l2_strength"]),
        "momentum": 0.9,  # sgd_momentum's default in dual_net.py
        "quality_target": 0.5,  # winrate's default, and eval_models.py
    }
    return {**expected, **(expected_of_nine_lines(each, given) if each.round == "v0.6" else roles_of_minigo(given))}


def expected_of_nine_lines(each: Submitted, given: dict[str, str]) -> dict[str, Any]:
    """Return what the commands of v0.6 that reference_implementation.py starts have."""
    nodes, gpus = each.ours.nodes, int(given["num_gpus_selfplay"])
    several = given.get("use_multinode") == "True"
    workers = 2 * gpus * (nodes - several)  # selfplay() in reference_implementation.py; one node trains
    resigns = float(given["resign_threshold"])
    return {
        "board_size": 9,
        "games": int(given["num_games"]) * workers,
        "concurrent_games": int(given["parallel_games"]) * 2,
        "selfplay_ranks": gpus * (nodes - 1) if several else 0,
        "inference_batch": int(given["engine"].partition(":")[2]),
        "gating_win_rate": float(given["gating_win_rate"]),
        "gating_games": int(given["eval_num_games"]),
        "eval_games": int(given["eval_num_games"]),
        "eval_readouts": int(given["num_readouts"]),
        "eval_resign_threshold": resigns,
        "min_resign_threshold": resigns,
        "max_resign_threshold": resigns,
        "sample_share": float(given["filter_amount"]),
        "fastplay_frequency": 0.0,
        "precision": "fp16",  # set_env_variables() in reference_implementation.py; trt's graph is fp16 as well
    }


def roles_of_minigo(given: dict[str, str]) -> dict[str, Any]:
    """Return what train_loop.py of v0.7 makes of its flags."""
    processes = int(given["procs_per_gpu"])
    threads = int(given["selfplay_threads"]) * processes
    return {
        "board_size": int(given["board_size"]),
        "features": given["input_features"],
        "games": int(given["suggested_games_per_iteration"]),
        "concurrent_games": int(given["concurrent_games_per_thread"]) * threads,
        "selfplay_threads": threads,
        "inference_batch": int(given["trt_max_batch_size"]),
        "fastplay_frequency": float(given["fastplay_frequency"]),
        "fastplay_readouts": int(given["fastplay_readouts"]),
        "min_resign_threshold": float(given["min_resign_threshold"]),
        "max_resign_threshold": float(given["max_resign_threshold"]),
        "dirichlet_alpha": float(given["dirichlet_alpha"]),
        "noise_mix": float(given["noise_mix"]),
        "cache_mb": int(given["cache_size_mb"]) * processes,
        "target_pruning": given["target_pruning"] == "1",
        "sample_share": float(given["train_filter"]),
        "gating_win_rate": 0.0,
        "eval_games": 256,  # defaults of num_eval_games and num_eval_readouts in train_loop.py
        "eval_readouts": 100,
        "eval_resign_threshold": -1.0,  # resign_enabled is False
    }


@pytest.mark.parametrize("each", [each for each in SUBMITTED if each.choice.name == "minigo"], ids=name_of)
def test_minigo_has_the_submitted_values(each: Submitted) -> None:
    made, expected = resolved(each.ours, each.choice), expected_of_minigo(each)
    values = made.plain()
    found = {**values, "rates": configuration.config_class(each.choice.folder)(**values).rates}
    assert {name: found[name] for name in expected} == expected
    if each.round == "v0.7":
        # distribute_mpiranks() in train_loop.py: with several processes a GPU those that train play as well, but on
        # a node that trains as a whole none do.
        gpus, train = each.ours.gpus_per_node, found["train_ranks"]
        shared = int(lists_of(each)["procs_per_gpu"][-1]) > 1 and train <= gpus
        assert found["selfplay_ranks"] == (0 if shared else made.ranks - train)
        mixed = each.variables.get("TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE") == "1"
        assert (found["precision"] == "fp16") == mixed
