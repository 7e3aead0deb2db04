"""How fast an epoch is, sampling included, beside a plain PyTorch one of the same model and batch, in one run.

    $ python -m benchmarks.ncf.pytorch.bench --config config.json --data DATA

The plain epoch is what one would write first: numpy draws the negatives and draws again where the user knows
the item, torch.nn layers, torch.optim.Adam. The kinds are measured in turn, several times; the median counts.
A measurement is one whole epoch. The last line of the output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import torch

from benchmarks.common import configuration, torch_precision, torch_ranks
from benchmarks.common.ranks import Ranks
from benchmarks.ncf.pytorch import data, model, steps
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.data import DataSet, Sampler
from benchmarks.ncf.pytorch.train import train_step

TITLES = {
    "bare": "plain PyTorch epoch, negatives drawn by numpy",
    "real": "training epoch",
    "input": "drawing the samples of an epoch alone",
}


class PlainNeuMF(torch.nn.Module):
    """NeuMF of torch.nn's own layers."""

    def __init__(self, config: Config, users: int, items: int) -> None:
        super().__init__()
        width = config.layers[0] // 2
        self.gmf_users = torch.nn.Embedding(users, config.factors)
        self.gmf_items = torch.nn.Embedding(items, config.factors)
        self.mlp_users = torch.nn.Embedding(users, width)
        self.mlp_items = torch.nn.Embedding(items, width)
        layers: List[torch.nn.Module] = []
        for number in range(len(config.layers) - 1):
            layers += [torch.nn.Linear(config.layers[number], config.layers[number + 1]), torch.nn.ReLU()]
        self.mlp = torch.nn.Sequential(*layers)
        self.out = torch.nn.Linear(config.factors + config.layers[-1], 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """(n,) scores before the sigmoid."""
        product = self.gmf_users(users) * self.gmf_items(items)
        hidden = self.mlp(torch.cat((self.mlp_users(users), self.mlp_items(items)), 1))
        return self.out(torch.cat((product, hidden), 1)).squeeze(1)


def plain_epoch(config: Config, data_set: DataSet, device: torch.device) -> Callable[[], None]:
    """A whole epoch of the plain version."""
    network = PlainNeuMF(config, data_set.users, data_set.items).to(device)
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.Adam(network.parameters(), config.learning_rate, betas, config.epsilon)
    loss_function = torch.nn.BCEWithLogitsLoss()
    users = data_set.train_users.cpu().numpy().astype(np.int64)
    items = data_set.train_items.cpu().numpy().astype(np.int64)
    known = users * data_set.items + items

    def epoch() -> None:
        drawn_users = np.tile(users, config.negatives)
        drawn = np.random.randint(data_set.items, size=len(drawn_users))
        again = np.arange(len(drawn))
        while len(again):
            keys = drawn_users[again] * data_set.items + drawn[again]
            place = np.searchsorted(known, keys)
            again = again[known[np.minimum(place, len(known) - 1)] == keys]
            drawn[again] = np.random.randint(data_set.items, size=len(again))
        all_users = torch.from_numpy(np.concatenate((users, drawn_users))).to(device)
        all_items = torch.from_numpy(np.concatenate((items, drawn))).to(device)
        labels = (torch.arange(len(all_users), device=device) < len(users)).float()
        for part in torch.randperm(len(all_users), device=device).split(config.batch_size):
            optimizer.zero_grad()
            with torch_precision.autocast(device, config.precision):
                scores = network(all_users[part], all_items[part])
            loss_function(scores.float(), labels[part]).backward()
            optimizer.step()

    return epoch


def training_epoch(config: Config, sampler: Sampler, data_set: DataSet, ranks: Ranks) -> Callable[[], None]:
    """The epoch of train.py."""
    network = model.build(config, data_set.users, data_set.items).to(ranks.context)
    training = steps.build(config, network, sampler, ranks, None)
    graph = (
        steps.capture_epoch(training, train_step) if config.cuda_graph and config.device == "gpu" else None
    )

    def epoch() -> None:
        if graph is not None:
            graph.replay()
            return
        sampler.draw()
        for step_in_epoch in range(sampler.steps_per_epoch):
            train_step(training, step_in_epoch)

    return epoch


def measure(
    epochs: Dict[str, Callable[[], None]], samples: int, repeats: int
) -> Tuple[Dict[str, Any], float]:
    """Samples per second of each kind, measured in turn, and the share of an epoch that sampling takes."""
    seconds: Dict[str, List[float]] = {name: [] for name in epochs}
    for number in range(repeats + 1):
        for name, epoch in epochs.items():
            _wait()
            started = time.perf_counter()
            epoch()
            _wait()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
        print(f"measurement {number} of {repeats} done", file=sys.stderr)
    measured = {}
    for name, values in seconds.items():
        # Each against the plain epoch of its own turn: the machine's speed drifts.
        ratios = [bare / value for value, bare in zip(values, seconds["bare"])]
        measured[name] = {
            "title": TITLES[name],
            "median": samples / statistics.median(values),
            "least": samples / max(values),
            "most": samples / min(values),
            "ratio": statistics.median(ratios),
        }
    return measured, statistics.median(seconds["input"]) / statistics.median(seconds["real"])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (JSON)")
    parser.add_argument("--data", type=Path, required=True, help="folder of the arrays and dataset.json")
    parser.add_argument("--steps", type=int, default=0, help="accepted and not used: an epoch is measured")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind")
    arguments = parser.parse_args()
    config = configuration.load(Config, arguments.config)
    ranks = torch_ranks.start(config.device)
    torch_precision.set_matmul(config.precision)
    data_set = data.load(arguments.data, ranks.context)
    sampler = Sampler(data_set, config.batch_size, config.negatives, ranks)
    epochs = {
        "bare": plain_epoch(config, data_set, ranks.context),
        "real": training_epoch(config, sampler, data_set, ranks),
        "input": sampler.draw,
    }
    measured, input_share = measure(epochs, sampler.samples, arguments.repeats)
    title = (
        f"NeuMF {config.factors} + {'-'.join(map(str, config.layers))}, {data_set.users:,} users, "
        f"{data_set.items:,} items, batch {config.batch_size}, {config.precision}, one {config.device}"
    )
    result = {"title": title, "measured": measured, "input_share": input_share, "device": config.device}
    torch_ranks.finish()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
