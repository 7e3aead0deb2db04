"""HR@10 and NDCG@10 of each user's held-out item among its listed negatives, on the device.

An item that is listed twice counts once, as in the authors' evaluator, which keeps scores by item; a held-out
item that is listed among its own negatives does not compete with itself. Of equal scores the item that is listed first
comes first (val_epoch of ncf.py, v0.5, and the authors).
"""

from __future__ import annotations

import math
from typing import Tuple

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.data import DataSet
from benchmarks.ncf.pytorch.model import NeuMF

TOP = 10  # length of the list of recommendations (He et al. 2017, section 4.1).


class Candidates:
    """The items that each held-out item of this rank's users is ranked among: (users, negatives + 1), itself last."""

    def __init__(self, data: DataSet, ranks: Ranks) -> None:
        first, last = (data.users * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        self.first_user = first
        self.users = last - first
        device = data.test_items.device
        negatives = torch.from_numpy(data.negatives[first:last].astype("int32")).to(device)
        held_out = data.test_items[first:last, None]
        self.items = torch.cat((negatives, held_out), 1)
        is_held_out = negatives == held_out
        self.competes = first_occurrences(negatives) & ~is_held_out
        # The one that is listed first: until the held-out item is listed itself, which may be before the end.
        self.wins_tie = is_held_out.cumsum(1, dtype=torch.int32) == 0

    def ranks(self, scores: torch.Tensor, part: slice) -> torch.Tensor:
        """(users,): how many other items come before the held-out one; ``scores`` (users, negatives + 1).

        A score that is not a number never helps the held-out item.
        """
        others, own = scores[:, :-1], scores[:, -1:]
        ahead = ~(others <= own) | ((others == own) & self.wins_tie[part])
        return (ahead & self.competes[part]).sum(1)


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


def part_count(candidates: Candidates, config: Config, users: int) -> int:
    """Parts in which the candidates of ``users`` users are scored."""
    return -(-users // _users_at_once(candidates, config))


def score_part(
    network: NeuMF, candidates: Candidates, config: Config, number: int, tables: Tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The sums of ``gains`` over the users of part ``number``, which may be empty."""
    size = _users_at_once(candidates, config)
    part = slice(min(number * size, candidates.users), min((number + 1) * size, candidates.users))
    users = slice(candidates.first_user + part.start, candidates.first_user + part.stop)
    scores = network.score_candidates(users, candidates.items[part], tables)
    return gains(candidates.ranks(compared(scores, config), part))


def compared(scores: torch.Tensor, config: Config) -> torch.Tensor:
    """Return what is compared: in fp16 probabilities in fp16, as submitted, of which many are equal; else logits."""
    return scores.half().sigmoid() if config.precision == "fp16" else scores


def _users_at_once(candidates: Candidates, config: Config) -> int:
    return max(1, config.eval_batch_size // candidates.items.shape[1])
