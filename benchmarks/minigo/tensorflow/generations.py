"""A generation, phase by phase, on every rank: games by the newest model, training on the window, a new model."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, Optional, Tuple

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

if TYPE_CHECKING:
    from benchmarks.minigo.tensorflow.train import Training

Step = Callable[..., Any]
EVALUATIONS = "evaluations.jsonl"


class Generations:
    """The loop's state: the network that trains, the one that plays, and what a checkpoint has of both."""

    def __init__(self, training: "Training", step: Step, run: Run) -> None:
        self.training, self.step, self.run, self.config = training, step, run, run.config
        self.player = model.build(run.config, training.network.shape, training.network.values())
        if run.saved:
            self.player.assign({name: run.saved[f"player/{name}"] for name in self.player.variables})
        self.evaluate = Evaluator(self.player, run.config.inference_batch)
        # One for all generations: XLA compiles each evaluator's pass anew.
        self.challenger = Evaluator(training.network, run.config.inference_batch)
        self._saved: Optional[Tuple[model.Network, Evaluator]] = None
        self.models = run.output / "models"
        self.state: Dict[str, Any] = {}  # at the end of the last generation, also while the next one is trained
        self.keep()

    def keep(self) -> None:
        """Remember the present state as what a checkpoint holds: that at the end of a generation."""
        player = {f"player/{name}": each for name, each in self.player.values().items()}
        self.state = {**self.training.state_dict(), **player}

    def begin(self) -> None:
        """Remove what a killed run left of later generations; train on the data set's games first if so asked."""
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
            mine = data.supervised(self.config, games, self.run.ranks.rank, len(training.roles.training))
            for _ in self.run.interruptible(range(self.config.supervised_steps)):
                if training.trains:
                    self._train_on(next(mine))
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
        facts = selfplay.outcomes(games)
        run.log(mlperf.games(self.config, number, int(facts["games"])))
        with run.stage("training"):
            found = self._train(number)
        if found is None:
            return None
        self.training.share()
        with run.stage("gating"):
            if not self._promote(number):
                return None
        if run.ranks.rank == 0:
            self.training.save_model(self._model(number))
            # For whoever follows the run; a resumed run writes some again.
            line = {name: round(float(value), 5) for name, value in {"generation": number, **facts, **found}.items()}
            with open(run.output / "generations.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            records.show(run.output, number, games[0], self.config)
        self.keep()
        size, trainers = run.ranks.size, len(self.training.roles.training)
        loss = found["loss"] * size / trainers if self.training.trains else 0.0
        rate = schedule.learning_rate(self.config, self.training.steps - 1)
        return tf.constant(loss, tf.float32), rate, int(found["positions"])

    def _model(self, number: int) -> Path:
        return self.models / f"{number:06d}.npz"

    def _play(self, number: int) -> None:
        run, roles = self.run, self.training.roles
        worker: Any = None
        # All ranks read what is there, so that a damaged record ends them together.
        there = run.open(lambda: read_generation(generation_folder(run.output, number), self.config.board_size))
        tensorflow.barrier()
        if self.training.plays:
            part = run.ranks.rank - roles.selfplay.start
            done = {game.number for game in there}
            worker = Worker(self.config, run.output, number, part, len(roles.selfplay), self.evaluate, done)
        tensorflow.barrier()
        self._together(worker)
        if worker is not None:
            worker.close()
        tensorflow.barrier()

    def _together(self, worker: Any) -> None:
        # Let a worker, if this rank has one, play until no rank has games left, or the run is to stop

        def rounds() -> Iterator[None]:
            # All ranks come to each slice together.
            while tensorflow.total([float(worker.missing) if worker is not None else 0.0])[0] > 0:
                if worker is not None:
                    worker.play()
                yield

        for _ in self.run.interruptible(rounds()):
            pass

    # Train on the window; return mean losses and the count of positions, None if the run is to stop.
    def _train(self, number: int) -> Optional[Dict[str, float]]:
        config, generator = self.config, np.random.RandomState((self.config.seed + number) % 2**32)
        found = self.run.open(lambda: self._positions(number))
        sums = [tf.zeros(())] * 3
        mine: Iterator[Batch] = data.batches(config, found, generator)
        for _ in self.run.interruptible(range(found.steps)):
            if self.training.trains:
                sums = [total + each for total, each in zip(sums, self._train_on(next(mine)))]
            else:
                self.training.steps += 1
        if self.run.interrupted:
            return None
        policy, value, l2 = (float(total) / found.steps for total in sums)
        loss = policy + config.value_cost_weight * value + config.l2_strength * l2
        positions = found.steps * config.batch_size * len(self.training.roles.training)
        return {"loss": loss, "policy_loss": policy, "value_loss": value, "positions": positions}

    def _train_on(self, batch: Batch) -> Any:
        rate = schedule.learning_rate(self.config, self.training.steps)
        self.training.steps += 1
        return self.step(*batch, tf.constant(rate, tf.float32))

    def _positions(self, number: int) -> Positions:
        roles, batch = self.training.roles, self.config.batch_size
        games = examples.read_window(self.run.output, self.config, number)
        places = examples.sample(games, self.config, number, batch * len(roles.training))
        steps = len(places) // (batch * len(roles.training))
        mine = places[:0]
        if self.training.trains:
            mine = examples.own_part(places, self.run.ranks.rank, len(roles.training), batch)
        return Positions(examples.build(games, mine, self.config), steps)

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
        """Return the share of games that ``first`` wins, over all ranks; None if the run is to stop."""
        run = self.run
        numbers = schedule.share(games, run.ranks.rank, run.ranks.size)
        worker = MatchWorker(self.config, (first, second), numbers, self.config.seed + seed)
        self._together(worker)
        if run.interrupted:
            return None
        return run.total([worker.wins, worker.played], games)[0] / games

    # -- after the clock ---------------------------------------------------------------------------------

    def evaluate_saved(self, target: Evaluate) -> Iterator[Tuple[int, Dict[str, float]]]:
        """Yield each generation with its model's win rate, in their order; those that are known are not played again.

        Ends early if the run is to stop.
        """
        known = self._known()
        for number in range(1, self.run.position + 1):
            found = known.get(number) or self._evaluate_model(number, target)
            if found is None:
                return
            if number not in known and self.run.ranks.rank == 0:
                with open(self.run.output / EVALUATIONS, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"generation": number, **found}) + "\n")
            yield number, found

    # The results that an interrupted run wrote; the same on every rank.
    def _known(self) -> Dict[int, Dict[str, float]]:
        path, known = self.run.output / EVALUATIONS, {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # What a killed run left of a line is cut off.
        whole = text[: text.rfind("\n") + 1]
        for line in whole.splitlines():
            found = json.loads(line)
            known[int(found.pop("generation"))] = found
        tensorflow.barrier()
        if self.run.ranks.rank == 0 and whole != text:
            path.write_text(whole, encoding="utf-8")
        return known

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
        found = None if won is None else {"win_rate": won}
        last = won is not None and (won >= config.quality_target or number == config.epochs)
        if found is not None and config.eval_first_model and last:
            first = self.run.open(lambda: load_evaluator(self._model(1), config))
            against = self.match(evaluator, first, config.eval_games, number)
            found = None if against is None else {**found, "win_rate_first": against}
        return found


def open_target(folder: Path, config: Any) -> Evaluate:
    if not (folder / TARGET).exists():
        raise Problem(f"{folder} has no {TARGET}", "a target model", "prepare the data set again")
    return load_evaluator(folder / TARGET, config)
