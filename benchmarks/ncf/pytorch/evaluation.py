"""HR@10 and NDCG@10 of each user's held-out item among its listed negatives, on the device.

An item that is listed twice counts once, as in the authors' evaluator, which keeps scores by item; a held-out
item that is listed among its own negatives does not compete with itself. Of equal scores the item that is listed first
comes first (val_epoch of ncf.py, v0.5, and the authors).
"""

import math

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.data import DataSet

TOP = 10  # length of the list of recommendations (He et al. 2017, section 4.1)


class Candidates:
    """The items that each held-out item of this rank's users is ranked among: (users, negatives + 1), itself last.

    ``parts`` of them are scored one after the other, as many on each rank.
    """

    def __init__(self, data: DataSet, config: Config, ranks: Ranks) -> None:
        first, last = (data.users * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        negatives = torch.from_numpy(data.negatives[first:last].astype("int32")).to(data.test_items.device)
        held_out = data.test_items[first:last, None]
        self.first_user = first
        self.items = torch.cat((negatives, held_out), 1)
        self.users_at_once = max(1, config.eval_batch_size // self.items.shape[1])
        # All ranks take part in as many votes as the rank with the most users needs.
        self.parts = -(-data.users // (ranks.size * self.users_at_once))
        is_held_out = negatives == held_out
        self._competes = first_occurrences(negatives) & ~is_held_out
        # The one that is listed first: until the held-out item is listed itself, which may be before the end.
        self._wins_tie = is_held_out.cumsum(1, dtype=torch.int32) == 0
        # As submitted: probabilities in fp16, of which many are equal; else logits.
        self._in_half = config.precision == "fp16"

    def part(self, number: int) -> slice:
        """This rank's users of a part, which may be empty, counted from ``first_user``."""
        begin, end = (min(each * self.users_at_once, len(self.items)) for each in (number, number + 1))
        return slice(begin, end)

    def places(self, scores: torch.Tensor, part: slice) -> torch.Tensor:
        """(users,): how many other items come before the held-out one; ``scores`` (users, negatives + 1).

        A score that is not a number never helps the held-out item.
        """
        scores = scores.half().sigmoid() if self._in_half else scores
        others, own = scores[:, :-1], scores[:, -1:]
        ahead = ~(others <= own) | ((others == own) & self._wins_tie[part])
        return (ahead & self._competes[part]).sum(1)


def first_occurrences(items: torch.Tensor) -> torch.Tensor:
    """(rows, columns) of True where an item is listed for the first time in its row."""
    found = torch.empty_like(items, dtype=torch.bool)
    for begin in range(0, len(items), 4096):
        ordered, order = torch.sort(items[begin : begin + 4096], dim=1, stable=True)
        fresh = torch.ones_like(ordered, dtype=torch.bool)
        fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        found[begin : begin + 4096].scatter_(1, order, fresh)
    return found


def gains(places: torch.Tensor) -> torch.Tensor:
    """Sums of HR@10, NDCG@10 and users over ``places`` (users,), counted from 0: (3,) float64.

    With one relevant item NDCG is log 2 / log (place + 2) within the first TOP places.
    """
    hit = places < TOP
    gain = torch.where(hit, math.log(2) / torch.log(places.double() + 2), 0.0)
    return torch.stack((hit.double().sum(), gain.sum(), hit.new_ones((), dtype=torch.float64) * len(places)))
