"""Minigo for inference servers: planes of positions to move probabilities and values.

    $ python -m benchmarks.minigo.tensorflow.export --experiment RUN/experiment_0 --data DATA -o DIR

Exports the generation that reached the target, otherwise the last generation. Clients implement the search, with
some hundred positions per move.
"""

import json
from pathlib import Path
from typing import Any, Dict, Mapping, Tuple

import numpy as np

from benchmarks.common.export import export
from benchmarks.common.export.export import Infer, Subject, Value, on_cpu
from benchmarks.common.export.tensorflow import TOOLS, Evaluating
from benchmarks.common.run.ranks import Ranks
from benchmarks.minigo import models
from benchmarks.minigo.engine import Evaluate
from benchmarks.minigo.examples import GoGames
from benchmarks.minigo.selfplay import MatchWorker
from benchmarks.minigo.tensorflow import data, model
from benchmarks.minigo.tensorflow.config import Config
from benchmarks.minigo.tensorflow.generations import EVALUATIONS, open_target
from benchmarks.minigo.tensorflow.networks import Evaluator

import tensorflow as tf  # isort: skip  # after frameworks.tensorflow, which settles what it prints and takes

ALONE = Ranks(0, 1, 0, 1, "/CPU:0")
PLANES = {
    "agz": "0 or 1 at each point; 2k: stones of the side to move k moves ago, 2k + 1: the other side's, k = 0..7; "
    "16: whether black is to move",
    "mlperf07": "0 or 1 at each point; 2k: stones of the side to move k moves ago, 2k + 1: the other side's, k = 0..3; "
    "8: whether black is to move; 9, 10, 11: strings with 1, 2, 3 or more liberties; 12: a move there captures",
}
POLICY = "probability of each move: row x board_size + column, the last one is a pass"
VALUE = "what the side to move may expect: -1 is a loss, 1 a win"


def read(experiment: Path, framework: Any) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Return the state, and the model of the exported generation.

    A finished run has evaluated the generations in order, up to the generation that reached the target.
    """
    state, _ = export.newest(experiment, framework)
    matches = experiment / EVALUATIONS
    if state["trained"] and matches.exists():
        last = json.loads(matches.read_text(encoding="utf-8").splitlines()[-1])["generation"]
        state = {**state, "step": last, "evaluated": last}
    path = experiment / "models" / f"{state['step']:06d}.npz"
    return state, {"model": models.load(path), "generation": state["step"]}


def won(config: Config, infer: Infer, other: Evaluate, seed: int) -> float:
    """Return a model's win rate in the games of Generations.match."""

    def evaluate(planes: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        if not len(planes):
            return other(planes)  # empty batch
        policy, value = infer(planes)
        return policy, value

    games = range(config.eval_games)
    worker = MatchWorker(config, (evaluate, other), games, config.seed + seed)
    while worker.missing:
        worker.play()
    return worker.wins / len(games)


def predicted(config: Config, games: GoGames, infer: Infer) -> float:
    """Return the fraction of held-out professional moves that a model predicts."""
    batches, total = data.held_out(config, games, ALONE)
    hits = 0
    for planes, moves, valid in batches:
        policy, _ = infer(planes.numpy()[:valid])
        hits += int((policy.argmax(axis=1) == moves[:valid]).sum())
    return hits / max(1, total)


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    config = on_cpu(config)
    network = model.build(config, *saved["model"])
    games = GoGames(folder, config.board_size)

    def evaluate(infer: Infer) -> Dict[str, float]:
        # In all rounds: positions of real games are the example inputs for clients.
        share = predicted(config, games, infer)
        if config.round == "v0.5":
            return {"win_rate": share}
        return {"win_rate": won(config, infer, open_target(folder, config), saved["generation"])}

    planes = models.PLANES[config.features]
    return Subject(
        # (B, N x N + 1) and (B,)
        model=Evaluating(network, lambda outputs: (tf.nn.softmax(outputs[0]), outputs[1])),
        inputs=(Value("planes", PLANES[config.features]),),
        outputs=(Value("policy", POLICY), Value("value", VALUE)),
        example=(np.zeros((2, config.board_size, config.board_size, planes), np.uint8),),
        evaluate=evaluate,
        preprocessing={
            "board_size": config.board_size,
            "komi": config.komi,
            "features": config.features,
            "layout": "NHWC",
            "generation": saved["generation"],
        },
        original=Evaluator(network, config.inference_batch),
    )


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare, read)
