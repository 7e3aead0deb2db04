"""HR@10 and NDCG@10 of the held-out items among the listed negatives, on the device.

Repeated negatives count only one time, as in the authors' evaluator, which stores scores by item. A held-out item in
its negatives does not compete with itself. Ties are resolved by position (val_epoch of ncf.py, v0.5, and the
authors).
"""

import math

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.data import DataSet

TOP = 10  # length of the list of recommendations (He et al. 2017, section 4.1)


class Candidates:
    """Candidates for the users of this rank: (users, negatives + 1), the held-out item is last.

    They are scored in ``parts``, the same number on all ranks.
    """

    def __init__(self, data: DataSet, config: Config, ranks: Ranks) -> None:
        first, last = (data.users * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        negatives = torch.from_numpy(data.negatives[first:last].astype("int32")).to(data.test_items.device)
        held_out = data.test_items[first:last, None]
        self.first_user = first
        self.items = torch.cat((negatives, held_out), 1)
        self.users_at_once = max(1, config.eval_batch_size // self.items.shape[1])
        # All ranks take part in the number of stop votes of the rank with the most users.
        self.parts = -(-data.users // (ranks.size * self.users_at_once))
        is_held_out = negatives == held_out
        self._competes = first_occurrences(negatives) & ~is_held_out
        # Negatives win ties if they are listed before the held-out item, which may itself be among the negatives.
        self._wins_tie = is_held_out.cumsum(1, dtype=torch.int32) == 0
        # As submitted: probabilities in fp16, with many ties; otherwise logits.
        self._in_half = config.precision == "fp16"

    def part(self, number: int) -> slice:
        """This rank's users in a part, relative to ``first_user``; may be empty."""
        start, end = (min(index * self.users_at_once, len(self.items)) for index in (number, number + 1))
        return slice(start, end)

    def ranks_of_held_out(self, scores: torch.Tensor, part: slice) -> torch.Tensor:
        """Return the rank (users,) of the held-out item, counted from 0; ``scores`` (users, negatives + 1).

        NaN scores do not improve the rank.
        """
        scores = scores.half().sigmoid() if self._in_half else scores
        negatives, held_out = scores[:, :-1], scores[:, -1:]
        ahead = ~(negatives <= held_out) | ((negatives == held_out) & self._wins_tie[part])
        return (ahead & self._competes[part]).sum(1)


def first_occurrences(items: torch.Tensor) -> torch.Tensor:
    """Return a mask (rows, columns) of the first occurrence of items in a row."""
    is_first = torch.empty_like(items, dtype=torch.bool)
    for start in range(0, len(items), 4096):
        ordered, order = torch.sort(items[start : start + 4096], dim=1, stable=True)
        fresh = torch.ones_like(ordered, dtype=torch.bool)
        fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        is_first[start : start + 4096].scatter_(1, order, fresh)
    return is_first


def gains(ranks: torch.Tensor) -> torch.Tensor:
    """Return sums of HR@10, NDCG@10 and users for the ranks (users,), counted from 0: (3,) float64.

    With one relevant item NDCG is log 2 / log (rank + 2) for ranks below TOP.
    """
    hit = ranks < TOP
    gain = torch.where(hit, math.log(2) / torch.log(ranks.double() + 2), 0.0)
    return torch.stack((hit.double().sum(), gain.sum(), hit.new_ones((), dtype=torch.float64) * len(ranks)))
