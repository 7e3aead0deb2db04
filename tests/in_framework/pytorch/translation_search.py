"""Beam search next to the submitted algorithms, written once more in Python for one sentence."""

import random
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import pytest
import torch

from benchmarks.translation.pytorch import beam
from benchmarks.translation.pytorch.batches import SourceBatch
from benchmarks.translation.pytorch.beam import BOS, EOS, PAD, Rules

TOKENS, SOURCE, LONGEST, SEEDS = 6, 3, 4, range(40)
CHOOSABLE = [token for token in range(TOKENS) if token not in (PAD, BOS)]
GNMT = Rules(beam.length_penalty(0.6, 6), beam.coverage_penalty(0.1), ended_stay=True)
TRANSFORMER = Rules(beam.length_penalty(0.6, 5), shortest=1)


@cache
def model(seed, prefix, equal):
    # Log-probabilities and attention after a prefix; few different values where some are to be ``equal``.
    numbers = random.Random(f"{seed} {prefix}")
    logits = torch.tensor([float(numbers.randrange(3)) if equal else numbers.gauss(0, 1.5) for _ in range(TOKENS)])
    weights = torch.tensor([numbers.gauss(0, 2) for _ in range(SOURCE)])
    return logits.log_softmax(0), weights.softmax(0)


class State:
    # The prefix of each row, the seed of its sentence, and the rows that went through the model.

    def __init__(self, seeds, equal):
        self.seeds, self.equal, self.prefixes, self.rows = seeds, equal, [()] * len(seeds), 0

    def select(self, rows):
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        self.prefixes = [self.prefixes[row] for row in rows.tolist()]

    def step(self, tokens, position, state):
        self.rows += len(tokens)
        self.prefixes = [(*prefix, token) for prefix, token in zip(self.prefixes, tokens.tolist(), strict=True)]
        assert {len(prefix) for prefix in self.prefixes} == {position + 1}
        rows = [model(seed, prefix, self.equal) for seed, prefix in zip(self.seeds, self.prefixes, strict=True)]
        return tuple(torch.stack(each) for each in zip(*rows, strict=True))


def search(seeds, width, rules, longest=LONGEST, equal=False):
    # What is found, and the rows that went through the model.
    state = State([seed for seed in seeds for _ in range(width)], equal)
    batch = SourceBatch(np.arange(len(seeds)), torch.zeros(len(seeds), 1), torch.ones(len(seeds)))
    return beam.search(state.step, state, batch, beam=width, longest=longest, rules=rules), state.rows


@dataclass
class Slot:
    # A place in the beam, as the submissions keep it.

    tokens: tuple
    total: float = 0.0
    attention: torch.Tensor = field(default_factory=partial(torch.zeros, SOURCE))

    @property
    def ended(self):
        return self.tokens[-1:] == (EOS,)


def continuations(seed, slots, equal, shortest):
    # (-sum, slot, token) of each, best first; an ended slot has itself alone, as PAD.
    found = [(-slot.total, number, PAD) for number, slot in enumerate(slots) if slot.ended]
    for number, slot in enumerate(slots):
        if not slot.ended:
            # Sums in the single precision of the search.
            sums = model(seed, (BOS, *slot.tokens), equal)[0] + torch.tensor(slot.total)
            allowed = [t for t in CHOOSABLE if t != EOS or len(slot.tokens) >= shortest]
            found += [(-sums[t].item(), number, t) for t in allowed]
    return sorted(found)


def as_gnmt(seed, width, rules, equal):
    # The algorithm of GNMT's submission for one sentence.
    slots = [Slot(())]
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
                sums[place],
            )
            for place, (cost, source, token) in enumerate(best)
        ]
        if all(slot.ended for slot in slots):
            break
    totals, lengths = torch.tensor([slot.total for slot in slots]), torch.tensor([len(slot.tokens) for slot in slots])
    finals = (rules.normalize(totals, lengths) + rules.coverage(torch.stack([s.attention for s in slots]))).tolist()
    return [token for token in slots[finals.index(max(finals))].tokens if token != EOS]


def as_transformer(seed, width, rules, equal):
    # The algorithm of Transformer's submission for one sentence.
    slots, ended = [Slot(())], []
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
        slots = [Slot((*slots[source].tokens, token), -cost) for cost, source, token in best]
    return list(max(ended, key=lambda each: each[0])[1])


@pytest.mark.parametrize(
    ("rules", "submitted"),
    [(GNMT, as_gnmt), (TRANSFORMER, as_transformer)],
)
def test_search_is_the_submitted_algorithm_in_any_batch(rules, submitted):
    for width in (1, 2, 4, 5):
        for equal in (False, True):
            found, rows = search(SEEDS, width, rules, equal=equal)
            assert found == [submitted(seed, width, rules, equal) for seed in SEEDS], (width, equal)
    whole, rows = search(SEEDS, 4, rules)
    assert (whole, rows) == (
        [search([seed], 4, rules)[0][0] for seed in SEEDS],
        sum(search([seed], 4, rules)[1] for seed in SEEDS),
    )
    # What has ended leaves the batch, whose translations are of different lengths.
    assert rows < 40 * 4 * 4 and len({len(tokens) for tokens in whole}) >= 3
    limits = [1 + max(1, seed % LONGEST) for seed in SEEDS]
    alone = [search([seed], 4, rules, limit)[0][0] for seed, limit in zip(SEEDS, limits, strict=True)]
    assert search(SEEDS, 4, rules, limits)[0] == alone
    assert search([], 4, rules) == ([], 0)


def test_equal_scores_are_in_the_order_of_their_places():
    values = torch.tensor([[float("inf"), 2.0, 0.0, -0.0, 2.0, 1e-40, 2.0, float("inf")]])
    assert beam.smallest(values, 7)[1].tolist() == [[2, 3, 5, 1, 4, 6, 0]]
