"""Training pairs with fresh negatives in a fresh order each epoch, drawn on the device without waiting for it."""

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
    negatives: np.ndarray  # (users, negatives) on the disk: the evaluation takes its share
    facts: Dict[str, Any]


class Batch(NamedTuple):
    users: torch.Tensor
    items: torch.Tensor
    labels: torch.Tensor  # 1 for a pair that is in the training set
    global_size: int  # pairs of all ranks together


def synthetic(content: Mapping[str, Any], device: torch.device) -> DataSet:
    """Generate pairs in the shapes of a prepared data set, of which only the manifest's ``content`` is known.

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
    """Read a prepared folder into the tensors of ``synthetic``; its files were compared with the manifest before."""
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
    replacement (input_hp_sample_train_replacement). A rank draws its own part of each batch alone, as a function of the
    samples' places, so that the number of ranks changes nothing (operators.py).
    """

    def __init__(self, data: DataSet, batch_size: int, negatives: int, ranks: Ranks) -> None:
        self._data, self._pairs = data, len(data.train_users)
        self.samples = self._pairs * (1 + negatives)
        self.global_batch_size = batch_size * ranks.size
        # This rank's part of each global batch, the last of which is shorter.
        self._bounds: List[Tuple[int, int]] = []
        for begin in range(0, self.samples, self.global_batch_size):
            size = min(self.global_batch_size, self.samples - begin)
            first, last = (begin + size * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
            self._bounds.append((first, last))
        self.steps_per_epoch = len(self._bounds)
        self.draws: Any = operators.samples  # the implementation that a run has chosen
        self._index = self._indexed()
        self._drawn = -1

    def index(self) -> None:
        """Take in the pairs of the data set, in place: again when they have changed."""
        for kept, new in zip(self._index, self._indexed()):
            if torch.is_tensor(kept):
                kept.copy_(new)

    def _indexed(self) -> operators.Index:
        data = self._data
        return operators.index_of(data.train_users, data.train_items, data.users, data.items)

    def draw_epoch(self, seed: int) -> None:
        if seed != self._drawn:
            self._drawn = seed
            torch.manual_seed(seed)
            self.draw()

    def draw(self) -> None:
        """Draw this rank's samples of a whole epoch, in their order; the device's generator gives the epoch's keys."""
        device = self._data.train_users.device
        keys = torch.randint(1 << 32, (operators.ROUNDS + 1,), device=device)
        places = torch.cat([torch.arange(first, last, device=device) for first, last in self._bounds])
        self._users, self._items, self._labels = self.draws(places, self.samples, keys, self._index)

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
