"""Beam search next to a search of every hypothesis and next to the submitted algorithms, written once more in Python.

Prints what it found as JSON.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.translation.pytorch import beam
from benchmarks.translation.pytorch.beam import BOS, EOS, PAD, Rules

TOKENS, SOURCE, LONGEST = 6, 3, 4
CHOOSABLE = [token for token in range(TOKENS) if token not in (PAD, BOS)]
GNMT = Rules(beam.length_penalty(0.6, 6), beam.coverage_penalty(0.1), ended_stay=True)
AS_SUBMITTED = GNMT._replace(attention_stays=True)
TRANSFORMER = Rules(beam.length_penalty(0.6, 5), shortest=1)


@cache
def model(seed: int, prefix: tuple[int, ...], equal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and attention after a prefix; few different values where some are to be ``equal``."""
    numbers = random.Random(f"{seed} {prefix}")
    logits = torch.tensor([float(numbers.randrange(3)) if equal else numbers.gauss(0, 1.5) for _ in range(TOKENS)])
    weights = torch.tensor([numbers.gauss(0, 2) for _ in range(SOURCE)])
    return logits.log_softmax(0), weights.softmax(0)


@dataclass
class State:
    """The prefix of each row, and the seed of its sentence."""

    seeds: list[int]
    equal: bool
    prefixes: list[tuple[int, ...]]
    rows: int = 0

    def select(self, rows: torch.Tensor) -> None:
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        self.prefixes = [self.prefixes[row] for row in rows.tolist()]

    def step(self, tokens: torch.Tensor, position: int, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        assert state is self
        self.rows += len(tokens)
        self.prefixes = [(*prefix, token) for prefix, token in zip(self.prefixes, tokens.tolist(), strict=True)]
        assert {len(prefix) for prefix in self.prefixes} == {position + 1}
        rows = [model(seed, prefix, self.equal) for seed, prefix in zip(self.seeds, self.prefixes, strict=True)]
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def search(
    seeds: list[int], width: int, rules: Rules, longest: int | list[int] = LONGEST, equal: bool = False
) -> tuple[list[list[int]], int]:
    """What is found, and the rows that went through the model."""
    state = State([seed for seed in seeds for _ in range(width)], equal, [()] * (len(seeds) * width))
    device = torch.device("cpu")
    found = beam.search(state.step, state, len(seeds), beam=width, longest=longest, rules=rules, device=device)
    return found, state.rows


def score(seed: int, tokens: tuple[int, ...], rules: Rules) -> float:
    """The final score of a whole hypothesis."""
    total, attention = 0.0, torch.zeros(SOURCE)
    for number, token in enumerate(tokens):
        probabilities, weights = model(seed, (BOS, *tokens[:number]), False)
        total += probabilities[token].item()
        attention = attention + weights
    final = rules.normalize(torch.tensor(total), torch.tensor(len(tokens)))
    return float(final + rules.coverage(attention) if rules.coverage else final)


def best_of_all(seed: int, rules: Rules) -> list[int]:
    """The best of every hypothesis there is."""
    words = [token for token in CHOOSABLE if token != EOS]
    everything: list[tuple[int, ...]] = []
    for length in range(rules.shortest, LONGEST):
        everything += [(*start, EOS) for start in itertools.product(words, repeat=length)]
    if rules.ended_stay:
        everything += itertools.product(words, repeat=LONGEST)
    best = max(everything, key=lambda tokens: score(seed, tokens, rules))
    return [token for token in best if token != EOS]


def greedy(seed: int, rules: Rules) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < LONGEST:
        probabilities, _ = model(seed, (BOS, *tokens), False)
        allowed = [t for t in CHOOSABLE if t != EOS or len(tokens) >= rules.shortest]
        if not rules.ended_stay and len(tokens) == LONGEST - 1:
            allowed = [EOS]
        token = max(allowed, key=lambda t: probabilities[t].item())
        if token == EOS:
            return tokens
        tokens.append(token)
    return tokens


@dataclass
class Slot:
    """A place in the beam, as the submissions keep it."""

    tokens: tuple[int, ...]
    total: float
    attention: torch.Tensor

    @property
    def ended(self) -> bool:
        return self.tokens[-1:] == (EOS,)


def continuations(seed: int, slots: list[Slot], equal: bool, shortest: int) -> list[tuple[float, int, int]]:
    """(-sum, slot, token) of each, best first; an ended slot has itself alone, as PAD."""
    found = []
    for number, slot in enumerate(slots):
        if slot.ended:
            found.append((-slot.total, number, PAD))
            continue
        probabilities, _ = model(seed, (BOS, *slot.tokens), equal)
        allowed = [t for t in CHOOSABLE if t != EOS or len(slot.tokens) >= shortest]
        # Sums in the single precision of the search.
        sums = probabilities + torch.tensor(slot.total)
        found += [(-sums[t].item(), number, t) for t in allowed]
    return sorted(found)


def as_gnmt(seed: int, width: int, rules: Rules, equal: bool) -> list[int]:
    """The algorithm of GNMT's submission for one sentence."""
    slots = [Slot((), 0.0, torch.zeros(SOURCE))]
    for _ in range(LONGEST):
        for slot in slots:
            if not slot.ended:
                slot.attention = slot.attention + model(seed, (BOS, *slot.tokens), equal)[1]
        sums = [slot.attention for slot in slots] + [slots[0].attention] * (width - len(slots))
        best = continuations(seed, slots, equal, 0)[:width]
        slots = [
            Slot(
                slots[source].tokens + ((token,) if token != PAD else ()),
                -cost,
                sums[place] if rules.attention_stays else slots[source].attention,
            )
            for place, (cost, source, token) in enumerate(best)
        ]
        if all(slot.ended for slot in slots):
            break
    finals = [
        rules.normalize(torch.tensor(slot.total), torch.tensor(len(slot.tokens))) + rules.coverage(slot.attention)
        for slot in slots
    ]
    best_place = max(range(len(finals)), key=lambda place: (finals[place].item(), -place))
    return [token for token in slots[best_place].tokens if token != EOS]


def as_transformer(seed: int, width: int, rules: Rules, equal: bool) -> list[int]:
    """The algorithm of Transformer's submission for one sentence."""
    slots, ended = [Slot((), 0.0, torch.zeros(SOURCE))], []
    for position in range(LONGEST):
        found = continuations(seed, slots, equal, rules.shortest)
        if position == LONGEST - 1:
            found = [each for each in found if each[2] == EOS]
        for cost, source, token in found[:width]:
            if token == EOS:
                final = rules.normalize(torch.tensor(-cost), torch.tensor(position + 1)).item()
                ended.append((final, slots[source].tokens))
        if len(ended) >= width:
            break
        best = [each for each in found[: 2 * width] if each[2] != EOS][:width]
        slots = [Slot((*slots[source].tokens, token), -cost, slots[0].attention) for cost, source, token in best]
    return list(max(ended, key=lambda each: each[0])[1])


def main() -> None:
    seeds, found = list(range(40)), {}
    for name, rules, submitted in (
        ("gnmt", GNMT, as_gnmt),
        ("gnmt as submitted", AS_SUBMITTED, as_gnmt),
        ("transformer", TRANSFORMER, as_transformer),
    ):
        widest = len(CHOOSABLE) ** LONGEST
        whole, rows = search(seeds, 4, rules)
        limits = [1 + max(1, seed % LONGEST) for seed in seeds]
        varied, fewer_rows = search(seeds, 4, rules, limits)
        found[name] = {
            # Where the attention stays, a score depends on the other hypotheses.
            "all hypotheses": rules.attention_stays
            or search(seeds, widest, rules)[0] == [best_of_all(seed, rules) for seed in seeds],
            "greedy": search(seeds, 1, rules)[0] == [greedy(seed, rules) for seed in seeds],
            "as the algorithm": [
                search(seeds, width, rules, equal=equal)[0] == [submitted(seed, width, rules, equal) for seed in seeds]
                for width in (1, 2, 3, 4, 5)
                for equal in (False, True)
            ],
            "one by one": whole == [search([seed], 4, rules)[0][0] for seed in seeds]
            and rows == sum(search([seed], 4, rules)[1] for seed in seeds),
            "own limits": varied
            == [search([seed], 4, rules, limit)[0][0] for seed, limit in zip(seeds, limits, strict=True)],
            "rows": [rows, fewer_rows],
            "different": len({tuple(tokens) for tokens in whole}),
            "lengths": sorted({len(tokens) for tokens in whole}),
        }
    values = torch.tensor([[math.inf, 2.0, 0.0, -0.0, 2.0, 1e-40, 2.0, math.inf]])
    smallest = beam.smallest(values, 7)[1].tolist()
    print(json.dumps({"searches": found, "smallest": smallest, "none": search([], 4, GNMT)[0]}))


if __name__ == "__main__":
    main()
