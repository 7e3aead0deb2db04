"""Training pairs with fresh negatives in a fresh order each epoch, drawn on the device without waiting for it."""

import hashlib
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

import numpy as np
import torch

from benchmarks.common.run.ranks import Ranks


class DataSet(NamedTuple):
    users: int
    items: int
    train_users: torch.Tensor  # (pairs,) int32, sorted by user, then item
    train_items: torch.Tensor  # (pairs,) int32
    test_items: torch.Tensor  # (users,) int32
    negatives: np.ndarray  # (users, negatives) on the disk: the evaluation takes its share
    facts: Dict[str, Any]


class Batch(NamedTuple):
    users: torch.Tensor
    items: torch.Tensor
    labels: torch.Tensor  # 1 for a pair that is in the training set
    global_size: int  # pairs of all ranks together


def synthetic(content: Mapping[str, Any], device: torch.device) -> DataSet:
    """Generate pairs in the shapes of a prepared data set, of which only the passport's ``content`` is known.

    The submission's clock starts with loading the preprocessed data (training_results_v0.5,
    v0.5.0/nvidia/submission/code/recommendation/pytorch/ncf.py): what comes before it works on these.
    """
    facts = content["facts"]
    pairs, users = content["splits"]["train"]["count"], facts["users"]
    of_users = torch.arange(pairs, device=device) * users // pairs
    first = torch.searchsorted(of_users, of_users)
    return DataSet(
        users=users,
        items=facts["items"],
        train_users=of_users.int(),
        train_items=(torch.arange(pairs, device=device) - first).int(),
        test_items=torch.zeros(users, dtype=torch.int32, device=device),
        negatives=np.zeros((0, 0), np.int32),
        facts=facts,
    )


def load(folder: Path, into: DataSet) -> DataSet:
    """Read a prepared folder into the tensors of ``synthetic``; its files were compared with the passport before."""
    for name in ("train_users", "train_items", "test_items"):
        # PyTorch knows few operations on 16-bit unsigned numbers.
        getattr(into, name).copy_(torch.from_numpy(np.load(str(folder / f"{name}.npy")).astype(np.int32)))
    return into._replace(negatives=np.load(str(folder / "test_negatives.npy"), mmap_mode="r"))


def epoch_seed(seed: int, epoch: int) -> int:
    """Seed of everything drawn in an epoch: a resumed run draws the same without keeping any state."""
    digest = hashlib.sha256(f"ncf {seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class Sampler:
    """The training pairs of one rank, step by step.

    Sample number n of an epoch belongs to training pair n % pairs; the first ``pairs`` samples are the pairs
    themselves, the others pair their user with an item that the user does not train on, drawn evenly and with
    replacement (input_hp_sample_train_replacement). All ranks draw the same numbers and take their own part
    of each batch, so that the number of ranks changes nothing.
    """

    def __init__(self, data: DataSet, batch_size: int, negatives: int, ranks: Ranks) -> None:
        self._data, self._negatives, self._pairs = data, negatives, len(data.train_users)
        self.samples = self._pairs * (1 + negatives)
        self.global_batch_size = batch_size * ranks.size
        # This rank's part of each global batch, the last of which is shorter.
        self._bounds: List[Tuple[int, int]] = []
        for begin in range(0, self.samples, self.global_batch_size):
            size = min(self.global_batch_size, self.samples - begin)
            first, last = (begin + size * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
            self._bounds.append((first, last))
        self.steps_per_epoch = len(self._bounds)
        device = data.train_users.device
        self._first = torch.zeros(data.users, dtype=torch.int64, device=device)
        self._not_met = torch.zeros(data.users, dtype=torch.float64, device=device)
        self._keys = torch.zeros(self._pairs, dtype=torch.int64, device=device)
        self._drawn = -1
        self.index()

    def index(self) -> None:
        """Take in the pairs of the data set, in place: again when they have changed."""
        users, items = self._data.train_users.long(), self._data.items
        met = torch.bincount(users, minlength=self._data.users)
        self._first.copy_(torch.cumsum(met, 0) - met)
        self._not_met.copy_(items - met)
        # Of n items met, sorted as p_0 < p_1 ..., the r-th item not met is r plus the number of j with
        # p_j - j <= r: no draw is thrown away, so nothing depends on what was drawn.
        place = torch.arange(self._pairs, device=users.device) - self._first[users]
        self._keys.copy_(users * items + self._data.train_items - place)

    def draw_epoch(self, seed: int) -> None:
        if seed != self._drawn:
            self._drawn = seed
            torch.manual_seed(seed)
            self.draw()

    def draw(self) -> None:
        """Draw order and negatives of a whole epoch and put this rank's samples in their order."""
        device = self._data.train_users.device
        order = torch.randperm(self.samples, device=device)
        mine = torch.cat([order[first:last] for first, last in self._bounds])
        draws = torch.rand(self._pairs * self._negatives, device=device)
        pair = mine % self._pairs
        users = self._data.train_users[pair].long()
        is_positive = mine < self._pairs
        # For each user an item that the user does not train on, by a number uniform in [0, 1). In fp64: 24 bits of a
        # draw times the number of items must not round up to all of them.
        number = (draws[(mine - self._pairs).clamp_(min=0)].double() * self._not_met[users]).long()
        below = torch.searchsorted(self._keys, users * self._data.items + number, right=True)
        drawn = number + below - self._first[users]
        self._users = users
        self._items = torch.where(is_positive, self._data.train_items[pair].long(), drawn)
        self._labels = is_positive.float()

    def batch(self, step: int) -> Batch:
        """The pairs of ``step`` (counted from 0 in the epoch)."""
        first, last = self._bounds[step]
        # Each full batch gives every rank the same number, so the samples of earlier steps are known.
        begin = step * (self._bounds[0][1] - self._bounds[0][0])
        part = slice(begin, begin + last - first)
        total = self.seen(step + 1) - self.seen(step)
        return Batch(self._users[part], self._items[part], self._labels[part], total)

    def seen(self, step: int) -> int:
        """Samples of all ranks in the steps of an epoch before ``step``."""
        return min(step * self.global_batch_size, self.samples)
