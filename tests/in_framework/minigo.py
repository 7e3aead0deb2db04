"""Minigo's small configuration, for tests in its framework."""

from pathlib import Path

import tensorflow as tf
import tomllib

from benchmarks.minigo.tensorflow import config

SYSTEM = Path(config.__file__).parent / "systems" / "cpu_v0.7.toml"
# A run of two generations in seconds
TINY = {"epochs": 2, "games": 40, "concurrent_games": 8, "readouts": 16, "eval_games": 12,
        "eval_readouts": 8, "eval_first_model": False, "quality_target": 1.0, "conv_width": 4, "trunk_layers": 1,
        "fc_width": 4, "batch_size": 64, "gating_win_rate": 0.01, "gating_games": 4, "warm_up_steps": 0}  # fmt: skip


def config_of(**changes):
    # The small system's configuration with changes
    values = {**tomllib.loads(SYSTEM.read_text())["config"], "seed": 3, **changes}
    return config.Config(**{name: tuple(each) if isinstance(each, list) else each for name, each in values.items()})


def frozen_graph(weights, layout, kind, outputs=("policy_output", "value_output")):
    # A graph whose weights are constants, with the names of the submissions' and the value of black's side
    graph = tf.Graph()
    with graph.as_default():
        shape = (None, 5, 5, 17) if layout == "nhwc" else (None, 17, 5, 5)
        x = tf.cast(tf.compat.v1.placeholder(kind, shape, name="pos_tensor"), tf.float32)
        x = x if layout == "nhwc" else tf.transpose(x, (0, 2, 3, 1))
        found = tf.matmul(tf.reshape(x, (-1, 425)), tf.constant(weights, tf.float32))
        tf.nn.softmax(found[:, :26], name=outputs[0])
        tf.tanh(found[:, 26], name=outputs[1])
    return graph.as_graph_def().SerializeToString()
