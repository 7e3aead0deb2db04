"""A generation, phase by phase, on every rank: games by the newest model, training on the window, a new model."""

import json
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import numpy as np
import tensorflow as tf

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run.run import Run
from benchmarks.minigo import examples, mlperf, models, records, schedule, selfplay
from benchmarks.minigo.engine import Evaluate
from benchmarks.minigo.examples import TARGET, GoGames
from benchmarks.minigo.records import generation_folder, read_generation
from benchmarks.minigo.selfplay import MatchWorker, Worker
from benchmarks.minigo.tensorflow import data, model
from benchmarks.minigo.tensorflow.data import Batch, Positions
from benchmarks.minigo.tensorflow.networks import Evaluator, load_evaluator
from benchmarks.minigo.tensorflow.training import Training

Step = Callable[..., Any]
EVALUATIONS = "evaluations.jsonl"


class Generations:
    """State of the training loop: the trained network, the network that plays, and the checkpoint of both."""

    def __init__(self, training: Training, step: Step, run: Run) -> None:
        self.training, self.step, self.run, self.config = training, step, run, run.config
        self.player = model.build(run.config, training.network.shape, training.network.values())
        if run.saved:
            self.player.assign({name: run.saved[f"player/{name}"] for name in self.player.variables})
        self.evaluate = Evaluator(self.player, run.config.inference_batch)
        # Reused for all generations: XLA would compile a new evaluator again.
        self.challenger = Evaluator(training.network, run.config.inference_batch)
        self._saved: Optional[Tuple[model.Network, Evaluator]] = None
        self.models = run.output / "models"
        self.state: Dict[str, Any] = {}  # at the end of the last generation, also while the next one is trained
        self.keep()

    def keep(self) -> None:
        """Save the current state for checkpoints, after a generation."""
        player = {f"player/{name}": value for name, value in self.player.values().items()}
        self.state = {**self.training.state_dict(), **player}

    def begin(self) -> None:
        """Remove files of later generations left by a killed run; train on the data set's games first if configured."""
        if self.run.ranks.rank == 0:
            self.models.mkdir(exist_ok=True)
            for folder in sorted((self.run.output / "games").glob("[0-9]*")):
                if int(folder.name) > self.run.position + 1:
                    shutil.rmtree(folder)
            if self.run.position < self.config.epochs:
                (self.run.output / EVALUATIONS).unlink(missing_ok=True)
        tensorflow.barrier()
        if self.run.position == 0 and self.config.supervised_steps:
            training, games = self.training, GoGames(self.run.data, self.config.board_size)
            batches = data.supervised(self.config, games, self.run.ranks.rank, len(training.roles.training))
            for _ in self.run.interruptible(range(self.config.supervised_steps)):
                if training.trains:
                    self._train_on(next(batches))
            training.share()
            self.player.assign(training.network.values())
            self.keep()

    def generation(self, number: int) -> Optional[Tuple[tf.Tensor, float, int]]:
        """Make generation ``number``, from 1: loss, learning rate and samples; None if the run is to stop."""
        run = self.run
        with run.stage("selfplay"):
            self._play(number)
        if run.interrupted:
            return None
        folder = generation_folder(run.output, number)
        games = run.open(lambda: read_generation(folder, self.config.board_size))
        outcomes = selfplay.outcomes(games)
        run.log(mlperf.games(self.config, number, int(outcomes["games"])))
        with run.stage("training"):
            metrics = self._train(number)
        if metrics is None:
            return None
        self.training.share()
        with run.stage("gating"):
            if not self._promote(number):
                return None
        if run.ranks.rank == 0:
            self.training.save_model(self._model(number))
            # For monitoring; a resumed run may repeat lines.
            line = {
                name: round(float(value), 5) for name, value in {"generation": number, **outcomes, **metrics}.items()
            }
            with open(run.output / "generations.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            records.show(run.output, number, games[0], self.config)
        self.keep()
        size, trainers = run.ranks.size, len(self.training.roles.training)
        loss = metrics["loss"] * size / trainers if self.training.trains else 0.0
        rate = schedule.learning_rate(self.config, self.training.steps - 1)
        return tf.constant(loss, tf.float32), rate, int(metrics["positions"])

    def _model(self, number: int) -> Path:
        return self.models / f"{number:06d}.npz"

    def _play(self, number: int) -> None:
        run, roles = self.run, self.training.roles
        worker: Any = None
        # All ranks read existing games, so that all ranks fail if a record is damaged.
        existing = run.open(lambda: read_generation(generation_folder(run.output, number), self.config.board_size))
        tensorflow.barrier()
        if self.training.plays:
            part = run.ranks.rank - roles.selfplay.start
            done = {game.number for game in existing}
            worker = Worker(self.config, run.output, number, part, len(roles.selfplay), self.evaluate, done)
        tensorflow.barrier()
        self._play_together(worker)
        if worker is not None:
            worker.close()
        tensorflow.barrier()

    def _play_together(self, worker: Any) -> None:
        # Play on ranks with a worker until all games are finished, or the run is to stop

        def rounds() -> Iterator[None]:
            # All ranks start a slice together.
            while tensorflow.total([float(worker.missing) if worker is not None else 0.0])[0] > 0:
                if worker is not None:
                    worker.play()
                yield

        for _ in self.run.interruptible(rounds()):
            pass

    # Train on the window; return mean losses and the count of positions, None if the run is to stop.
    def _train(self, number: int) -> Optional[Dict[str, float]]:
        config, generator = self.config, np.random.RandomState((self.config.seed + number) % 2**32)
        positions_local = self.run.open(lambda: self._positions(number))
        sums = [tf.zeros(())] * 3
        batches: Iterator[Batch] = data.batches(config, positions_local, generator)
        for _ in self.run.interruptible(range(positions_local.steps)):
            if self.training.trains:
                sums = [total + step_loss for total, step_loss in zip(sums, self._train_on(next(batches)))]
            else:
                self.training.steps += 1
        if self.run.interrupted:
            return None
        policy, value, l2 = (float(total) / positions_local.steps for total in sums)
        loss = policy + config.value_cost_weight * value + config.l2_strength * l2
        positions = positions_local.steps * config.batch_size * len(self.training.roles.training)
        return {"loss": loss, "policy_loss": policy, "value_loss": value, "positions": positions}

    def _train_on(self, batch: Batch) -> Any:
        rate = schedule.learning_rate(self.config, self.training.steps)
        self.training.steps += 1
        return self.step(*batch, tf.constant(rate, tf.float32))

    def _positions(self, number: int) -> Positions:
        roles, batch = self.training.roles, self.config.batch_size
        games = examples.read_window(self.run.output, self.config, number)
        positions = examples.sample(games, self.config, number, batch * len(roles.training))
        steps = len(positions) // (batch * len(roles.training))
        local = positions[:0]
        if self.training.trains:
            local = examples.rank_part(positions, self.run.ranks.rank, len(roles.training), batch)
        return Positions(examples.build(games, local, self.config), steps)

    # Let the new network play from now on, unless it loses against the present one; False: the run is to stop.
    def _promote(self, number: int) -> bool:
        config = self.config
        if config.gating_win_rate > 0:
            won = self.match(self.challenger, self.evaluate, config.gating_games, number)
            if won is None or won < config.gating_win_rate:
                return won is not None
        self.player.assign(self.training.network.values())
        return True

    def match(self, first: Evaluate, second: Evaluate, games: int, seed: int) -> Optional[float]:
        """Return the win rate of ``first`` over all ranks; None if the run is to stop."""
        run = self.run
        numbers = schedule.share(games, run.ranks.rank, run.ranks.size)
        worker = MatchWorker(self.config, (first, second), numbers, self.config.seed + seed)
        self._play_together(worker)
        if run.interrupted:
            return None
        return run.total([worker.wins, worker.played], games)[0] / games

    # -- after the clock ---------------------------------------------------------------------------------

    def evaluate_saved(self, target: Evaluate) -> Iterator[Tuple[int, Dict[str, float]]]:
        """Yield all generations with win rates, in order; existing results are reused.

        Returns early if the run is to stop.
        """
        finished = self._read_evaluations()
        for number in range(1, self.run.position + 1):
            result = finished.get(number) or self._evaluate_model(number, target)
            if result is None:
                return
            if number not in finished and self.run.ranks.rank == 0:
                with open(self.run.output / EVALUATIONS, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"generation": number, **result}) + "\n")
            yield number, result

    # The results that an interrupted run wrote; the same on every rank.
    def _read_evaluations(self) -> Dict[int, Dict[str, float]]:
        path, results = self.run.output / EVALUATIONS, {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # Truncate an incomplete line from a killed run.
        complete = text[: text.rfind("\n") + 1]
        for line in complete.splitlines():
            record = json.loads(line)
            results[int(record.pop("generation"))] = record
        tensorflow.barrier()
        if self.run.ranks.rank == 0 and complete != text:
            path.write_text(complete, encoding="utf-8")
        return results

    def _saved_model(self, number: int) -> Evaluator:
        if self._saved is None:
            network = model.build(self.config, *models.load(self._model(number), self.config.board_size))
            self._saved = network, Evaluator(network, self.config.inference_batch)
        else:
            self._saved[0].assign(models.load(self._model(number), self.config.board_size)[1])
        return self._saved[1]

    def _evaluate_model(self, number: int, target: Evaluate) -> Optional[Dict[str, float]]:
        config = self.config
        evaluator = self.run.open(lambda: self._saved_model(number))
        won = self.match(evaluator, target, config.eval_games, number)
        result = None if won is None else {"win_rate": won}
        last = won is not None and (won >= config.quality_target or number == config.epochs)
        if result is not None and config.eval_first_model and last:
            first = self.run.open(lambda: load_evaluator(self._model(1), config))
            against = self.match(evaluator, first, config.eval_games, number)
            result = None if against is None else {**result, "win_rate_first": against}
        return result


def open_target(folder: Path, config: Any) -> Evaluate:
    if not (folder / TARGET).exists():
        raise Problem(f"{folder} has no {TARGET}", "a target model", "prepare the data set again")
    return load_evaluator(folder / TARGET, config)
