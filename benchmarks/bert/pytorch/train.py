"""Train BERT in PyTorch: rows of tokens without padding in, masked words judged, MLPerf events out.

    $ python -m benchmarks.bert.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.bert.pytorch.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint there
resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional

import torch

from benchmarks.bert import events
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import Batch, EvaluationInput, Part, TrainingInput, noise
from benchmarks.bert.pytorch.model import Network
from benchmarks.bert.pytorch.optimizer import updates_of
from benchmarks.bert.schedule import learning_rate
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import stopping
from benchmarks.common.run.mllog import samples
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.torch import abilities, kernels
from benchmarks.common.torch.generators import drawn_from, seed_dropout, without_trace
from benchmarks.common.torch.updates import Rate, Rates
from benchmarks.language.arrays import DataSet, open_data
from benchmarks.language.pytorch import attention, checkpoint, fp8, operators
from benchmarks.language.pytorch.encoder import shape_of
from benchmarks.language.pytorch.graphs import captured

MANY_PARTS = 8
"""In which a batch may take long enough to be stopped within it; the ranks then agree once a part."""


class Done:
    """What is done of a step: how many parts of its batch, and their losses; their gradients are those of Updates."""

    def __init__(self, device: torch.device) -> None:
        self.parts, self.loss = 0, torch.zeros((), device=device)

    def add(self, loss: torch.Tensor) -> None:
        """Count a part."""
        self.parts += 1
        self.loss += loss

    def take(self) -> torch.Tensor:
        """Return the loss of all parts, and begin anew."""
        found = self.loss.clone()
        self.parts = 0
        self.loss.zero_()
        return found


class Training:
    """The network on this rank's device, and its optimizer."""

    def __init__(
        self,
        config: Config,
        vocabulary: int,
        ranks: Ranks,
        saved: Mapping[str, Any] = MappingProxyType({}),
        weights: Optional[Path] = None,
    ) -> None:
        """Draw the weights, the same on all ranks, or read them from a file.

        Args:
            config: of the run.
            vocabulary: rows of the table of words, padding included.
            ranks: of the job.
            saved: a checkpoint, of which only the names of kernels are taken.
            weights: file to begin with.
        """
        self.config, self.ranks, self.vocabulary = config, ranks, vocabulary
        dtype, size = pytorch.DTYPES[config.precision], config.width // config.heads
        chosen = attention.choose(config.attention, ranks.context, dtype, size, ranks.rank)
        with drawn_from(config.seed):
            network = Network(shape_of(config, vocabulary), chosen, config.compile)
        if weights is not None:
            checkpoint.fill(checkpoint.places_of(network.state_dict()), checkpoint.read(weights), weights)
        self.network = network.to(ranks.context)
        self._choose_kernels(saved.get("kernels", {}))
        self.done = Done(ranks.context)
        self.run_part: Callable[[Part], torch.Tensor] = partial(train_part, self)
        """The step of a part: by a CUDA graph where there is one."""
        self._in_fp8 = fp8.use(network.encoder, fp8.find()) if config.fp8 else nullcontext
        self.updates = updates_of(self.network, config, ranks, saved.get("kernel", config.optimizer_kernel))

    def _choose_kernels(self, saved: Mapping[str, str]) -> None:
        """Choose how what is between the products is computed, on rows about as long as those of a step."""
        config = self.config
        rows = config.batch_size // config.accumulation * config.positions // 2
        dtype = pytorch.DTYPES[config.precision]
        # Rows of thousands of tokens keep a GPU busy longer than their launches take.
        time = kernels.seconds_on_device
        self.kernels, pieces = operators.choose(config, rows, self.ranks, dtype, saved, time)
        self.network.encoder.use(pieces)

    def loss(self, part: Part) -> torch.Tensor:
        """This part's share of the loss: both means, so weighted that the ranks' and parts' shares sum to the loss."""
        with pytorch.autocast(self.ranks.context, self.config.precision), self._in_fp8():
            words, follows = self.network.losses(part)
        return words * part.weights[0] + follows * part.weights[1]

    def judge(self, part: Part) -> torch.Tensor:
        """What the network makes of a part of the evaluation set; see Network.judge."""
        with pytorch.autocast(self.ranks.context, self.config.precision), self._in_fp8():
            return self.network.judge(part)

    def content(self) -> Dict[str, Any]:
        """What all ranks have in common, for a checkpoint."""
        return {"network": self.network.state_dict(), "kernels": self.kernels, **self.updates.content()}

    def own_content(self) -> Dict[str, Any]:
        """What this rank alone has, for a checkpoint: also in the middle of a step."""
        found = self.updates.own_content()
        if self.done.parts:
            found["done"] = {"parts": self.done.parts, "loss": self.done.loss, "gradients": self.updates.gradients}
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from both contents together."""
        self.network.load_state_dict(saved["network"])
        self.updates.restore(saved)
        if "done" in saved:
            self.done.parts = saved["done"]["parts"]
            self.done.loss.copy_(saved["done"]["loss"])
            self.updates.gradients.copy_(saved["done"]["gradients"])


def build(
    config: Config,
    data: DataSet,
    ranks: Ranks,
    saved: Mapping[str, Any],
    weights: Optional[Path] = None,
) -> Training:
    """Build with a checkpoint, given or fresh weights, ready: warmed up and captured on noise, before the clock.

    Raises Problem where a file of weights does not fit.
    """
    multiple = config.vocabulary_multiple
    vocabulary = -(-data.vocabulary.size // multiple) * multiple
    training = Training(config, vocabulary, ranks, saved, None if saved else weights)
    if not saved:
        # Behind the choice of kernels, which draws numbers too.
        seed_dropout(config.seed, ranks)
    pytorch.broadcast(training.network.parameters())
    warm_up(training)
    if saved:
        training.restore(saved)
    return training


def train_step(
    training: Training, batch: Batch, rate: Rate, watch: Callable[[List[Part]], Iterable[Part]] = iter
) -> Optional[torch.Tensor]:
    """Forward and backward on each part of a batch that is not done yet, and one update.

    Returns this rank's part of the mean loss over all ranks, times the number of ranks, on the device; None where
    ``watch`` ended in the middle, from where a checkpoint of ``training`` continues.
    """
    done = training.done
    for part in watch(batch[done.parts :]):
        done.add(training.run_part(part))
    if done.parts < len(batch):
        return None
    training.updates.step(rate, 1.0)
    return done.take() * training.ranks.size


def train_part(training: Training, part: Part) -> torch.Tensor:
    """Forward and backward on one part of a batch; return its share of the mean loss over all ranks."""
    loss = training.loss(part)
    training.updates.scaled(loss).backward()
    return loss.detach()


def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Dict[str, float]]:
    """Share of the masked words of all ranks that are predicted, and further figures; None if the run is to stop."""
    sums = torch.zeros(5, dtype=torch.float64, device=run.ranks.context)
    training.network.eval()
    with closing(evaluation.one_pass()) as parts:
        for part in run.watch(parts):
            if part is not None:
                sums += training.judge(part)
    training.network.train()
    if run.interrupted:
        return None
    right, loss, follows, count = run.total(sums, evaluation.masked)
    return {
        "masked_accuracy": right / evaluation.masked,
        "masked_loss": loss / evaluation.masked,
        "next_accuracy": follows / count,
    }


def warm_up(training: Training) -> None:
    """Connect the ranks, compile and capture, by noise at rate 0; weights, optimizer and generators are as before."""
    config = training.config
    with without_trace(training.updates, training.ranks):
        if config.compile and (config.cuda_graph or config.warm_up_steps):
            part = noise(config, training.vocabulary, training.ranks)[0]
            abilities.compile_in_turns(lambda: training.run_part(part), training.ranks)
            training.updates.gradients.zero_()
        if config.cuda_graph:
            training.run_part = captured(
                training.run_part,
                lambda tokens: noise(config, training.vocabulary, training.ranks, tokens)[0],
                config.batch_size // config.accumulation * config.positions,
                config.token_bucket,
                config.warm_up_steps,
            )
            training.updates.gradients.zero_()
        if config.warm_up_steps:
            batch = noise(config, training.vocabulary, training.ranks)
            for _ in range(config.warm_up_steps):
                train_step(training, batch, 0.0)
                stopping.progress()


def weights_file(config: Config, data: Path) -> Optional[Path]:
    """Return the file of weights to begin with, None where there is none."""
    return data / config.checkpoint if config.checkpoint else None


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks, saved = run.config, run.ranks, run.saved
    data = run.open(lambda: open_data(run.data))
    with run.initialization():
        training = run.open(lambda: build(config, data, ranks, saved, weights_file(config, run.data)))
    run.log(events.hyperparameters(config, ranks.size, data.max_predictions))
    # No sample is read before run_start.
    with run.timed(events.timeline(config, ranks.size)) as timeline:
        updates = training.updates
        batches = TrainingInput(config, data.train, ranks, run.position + updates.uncounted)
        evaluation = EvaluationInput(config, data.test, ranks)
        run.keep(training.content, training.own_content)
        # As submitted: neither the rate nor the samples trained on advance with a step that is skipped.
        rates = Rates(updates, partial(learning_rate, config), timeline.steps)
        run.leave_out(updates.skipped_since)
        watch = run.watch if config.accumulation >= MANY_PARTS else iter
        with closing(batches):
            for _ in run.blocks():
                for number in run.steps():
                    rate = rates.of(number)
                    run.report(train_step(training, run.wait_for(batches.next), rate, watch), rate)
                if run.evaluates():
                    run.evaluated(evaluate(training, evaluation, run))
        if not run.interrupted:
            # As submitted: of the samples that the run trained on.
            run.log(samples(run.position * config.batch_size * ranks.size, len(data.test)))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
