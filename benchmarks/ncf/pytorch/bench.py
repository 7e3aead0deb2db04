"""Speed of an epoch including sampling, compared with plain PyTorch for the same model and batch, in one process.

    $ python -m benchmarks.ncf.pytorch.bench --config config.json --data DATA

The plain epoch is a straightforward version: negatives by rejection sampling in numpy, torch.nn layers,
torch.optim.Adam. A measurement is a complete epoch. The last line of the output is the result as JSON.
"""

from pathlib import Path
from typing import Callable

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.common.checks import bench
from benchmarks.common.data import manifest
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.ncf.flops import training_flops
from benchmarks.ncf.pytorch import data
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.data import DataSet, Sampler
from benchmarks.ncf.pytorch.train import Training, build, evaluation_step, train_step, users_per_part

TITLES = {
    "bare": "plain PyTorch epoch, negatives drawn by numpy",
    "real": "training epoch",
    "input": "drawing the samples of an epoch alone",
    "evaluation": "evaluation step, users/s",
}


class PlainNeuMF(torch.nn.Module):
    """NeuMF with torch.nn layers."""

    def __init__(self, config: Config, users: int, items: int) -> None:
        super().__init__()
        width = config.layers[0] // 2
        self.gmf_users = torch.nn.Embedding(users, config.factors)
        self.gmf_items = torch.nn.Embedding(items, config.factors)
        self.mlp_users = torch.nn.Embedding(users, width)
        self.mlp_items = torch.nn.Embedding(items, width)
        linear = map(torch.nn.Linear, config.layers, config.layers[1:])
        self.mlp = torch.nn.Sequential(*(layer for module in linear for layer in (module, torch.nn.ReLU())))
        self.out = torch.nn.Linear(config.factors + config.layers[-1], 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        product = self.gmf_users(users) * self.gmf_items(items)
        hidden = self.mlp(torch.cat((self.mlp_users(users), self.mlp_items(items)), 1))
        return self.out(torch.cat((product, hidden), 1)).squeeze(1)


def plain_epoch(config: Config, data_set: DataSet, device: torch.device) -> Callable[[], None]:
    network = PlainNeuMF(config, data_set.users, data_set.items).to(device)
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.Adam(network.parameters(), config.learning_rate, betas, config.epsilon)
    users = data_set.train_users.cpu().numpy().astype(np.int64)
    items = data_set.train_items.cpu().numpy().astype(np.int64)
    known_keys = users * data_set.items + items

    def epoch() -> None:
        drawn_users = np.tile(users, config.negatives)
        drawn_items = np.random.randint(data_set.items, size=len(drawn_users))
        again = np.arange(len(drawn_items))
        while len(again):
            keys = drawn_users[again] * data_set.items + drawn_items[again]
            index = np.searchsorted(known_keys, keys)
            again = again[known_keys[np.minimum(index, len(known_keys) - 1)] == keys]
            drawn_items[again] = np.random.randint(data_set.items, size=len(again))
        all_users = torch.from_numpy(np.concatenate((users, drawn_users))).to(device)
        all_items = torch.from_numpy(np.concatenate((items, drawn_items))).to(device)
        labels = (torch.arange(len(all_users), device=device) < len(users)).float()
        for part in torch.randperm(len(all_users), device=device).split(config.batch_size):
            optimizer.zero_grad()
            with pytorch.autocast(device, config.precision):
                scores = network(all_users[part], all_items[part])
            binary_cross_entropy_with_logits(scores.float(), labels[part]).backward()
            optimizer.step()

    return epoch


def training_epoch(training: Training) -> Callable[[], None]:
    def epoch() -> None:
        if training.graph is not None:
            training.graph()
            return
        training.sampler.draw()
        for step_in_epoch in range(training.sampler.steps_per_epoch):
            train_step(training, step_in_epoch)

    return epoch


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    data_set = data.load(folder, data.synthetic(manifest.read(folder), ranks.context))
    sampler = Sampler(data_set, config.batch_size, config.negatives, ranks)
    training = build(config, data_set.users, data_set.items, sampler, ranks, {})
    loops = {
        "bare": bench.repeated(plain_epoch(config, data_set, ranks.context)),
        "real": bench.repeated(training_epoch(training)),
        "input": bench.repeated(sampler.draw),
        bench.EVALUATION: bench.repeated(evaluation_step(training, data_set, ranks)),
    }
    title = (
        f"NeuMF {config.factors} + {'-'.join(map(str, config.layers))}, {data_set.users:,} users, "
        f"{data_set.items:,} items, batch {config.batch_size}, {config.precision}, one {config.device}"
    )
    flops = dict.fromkeys(("bare", "real"), sampler.samples * training_flops(config))
    return bench.Subject(title, sampler.samples, loops, TITLES, {bench.EVALUATION: users_per_part(config)}, flops=flops)


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare, epochs=True)
