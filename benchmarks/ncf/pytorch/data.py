"""Training pairs with new negatives in a new order per epoch, sampled on the device without synchronization."""

import hashlib
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

import numpy as np
import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.ncf.pytorch import operators


class DataSet(NamedTuple):
    users: int
    items: int
    train_users: torch.Tensor  # (pairs,) int32, sorted by user, then item
    train_items: torch.Tensor  # (pairs,) int32
    test_items: torch.Tensor  # (users,) int32
    negatives: np.ndarray  # (users, negatives), memory map: the evaluation reads the part of the rank
    counts: Dict[str, Any]  # "facts" in dataset.json


class Batch(NamedTuple):
    users: torch.Tensor
    items: torch.Tensor
    labels: torch.Tensor  # 1 for a pair that is in the training set
    global_size: int  # pairs of all ranks together


def synthetic(content: Mapping[str, Any], device: torch.device) -> DataSet:
    """Generate pairs with a prepared data set's shapes, from the ``content`` in dataset.json.

    The clock of the submission starts before the preprocessed data are loaded (training_results_v0.5,
    v0.5.0/nvidia/submission/code/recommendation/pytorch/ncf.py): earlier steps use these pairs.
    """
    counts = content["facts"]
    pairs, users = content["splits"]["train"]["count"], counts["users"]
    of_users = torch.arange(pairs, device=device) * users // pairs
    first = torch.searchsorted(of_users, of_users)
    return DataSet(
        users=users,
        items=counts["items"],
        train_users=of_users.int(),
        train_items=(torch.arange(pairs, device=device) - first).int(),
        test_items=torch.zeros(users, dtype=torch.int32, device=device),
        negatives=np.zeros((0, 0), np.int32),
        counts=counts,
    )


def load(folder: Path, into: DataSet) -> DataSet:
    """Read a prepared folder into the tensors of ``synthetic``. The files have been verified before."""
    for name in ("train_users", "train_items", "test_items"):
        # PyTorch knows few operations on 16-bit unsigned numbers.
        getattr(into, name).copy_(torch.from_numpy(np.load(str(folder / f"{name}.npy")).astype(np.int32)))
    return into._replace(negatives=np.load(str(folder / "test_negatives.npy"), mmap_mode="r"))


def epoch_seed(seed: int, epoch: int) -> int:
    """Seed for sampling in an epoch, so that a resumed run needs no saved state."""
    digest = hashlib.sha256(f"ncf {seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class Sampler:
    """A rank's training pairs by step.

    Sample n in an epoch belongs to training pair n % pairs. The first ``pairs`` samples are the pairs, other samples
    combine the user with an item without a training pair, uniformly with replacement
    (input_hp_sample_train_replacement). A rank samples only the batch part that it trains, as a function of the
    sample positions: results do not depend on the number of ranks (operators.py).
    """

    def __init__(self, data: DataSet, batch_size: int, negatives: int, ranks: Ranks) -> None:
        self._data, self._pairs = data, len(data.train_users)
        self.samples = self._pairs * (1 + negatives)
        self.global_batch_size = batch_size * ranks.size
        # Bounds of this rank in the global batches; the last batch is smaller
        self._bounds: List[Tuple[int, int]] = []
        for start in range(0, self.samples, self.global_batch_size):
            size = min(self.global_batch_size, self.samples - start)
            first, last = (start + size * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
            self._bounds.append((first, last))
        self.steps_per_epoch = len(self._bounds)
        self.draws: Any = operators.samples  # the implementation that a run has chosen
        self._index = self._build_index()
        self._drawn = -1

    def index(self) -> None:
        """Update the index in place after the pairs have changed."""
        for current, new in zip(self._index, self._build_index()):
            if torch.is_tensor(current):
                current.copy_(new)

    def _build_index(self) -> operators.Index:
        data = self._data
        return operators.build_index(data.train_users, data.train_items, data.users, data.items)

    def draw_epoch(self, seed: int) -> None:
        if seed != self._drawn:
            self._drawn = seed
            torch.manual_seed(seed)
            self.draw()

    def draw(self) -> None:
        """Sample the pairs of this rank for a full epoch; the keys are from the device's generator."""
        device = self._data.train_users.device
        keys = torch.randint(1 << 32, (operators.ROUNDS + 1,), device=device)
        positions = torch.cat([torch.arange(first, last, device=device) for first, last in self._bounds])
        self._users, self._items, self._labels = self.draws(positions, self.samples, keys, self._index)

    def batch(self, step: int) -> Batch:
        """The pairs of ``step`` (counted from 0 in the epoch)."""
        first, last = self._bounds[step]
        # Full batches have the same size on all ranks, so the number of earlier samples is known.
        start = step * (self._bounds[0][1] - self._bounds[0][0])
        part = slice(start, start + last - first)
        total = self.seen(step + 1) - self.seen(step)
        return Batch(self._users[part], self._items[part], self._labels[part], total)

    def seen(self, step: int) -> int:
        """Number of samples on all ranks before ``step`` in an epoch."""
        return min(step * self.global_batch_size, self.samples)
