"""Beam search against translations recorded from the algorithms of the submissions."""

from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.translation.pytorch import beam
from benchmarks.translation.pytorch.batches import SourceBatch
from benchmarks.translation.pytorch.beam import Rules

TOKENS, SOURCE, LONGEST, SEEDS = 6, 3, 4, range(12)
GNMT = Rules(beam.length_penalty(0.6, 6), beam.coverage_penalty(0.1), ended_stay=True)
TRANSFORMER = Rules(beam.length_penalty(0.6, 5), shortest=1)


def model(seed, prefix, levels):
    # Scores, whose sums are exact in fp32, and attention after a prefix, from a linear congruential generator; few
    # levels give equal scores
    number, numbers = seed * 7919 + 1, []
    for token in (*prefix, *[0] * (TOKENS + SOURCE)):
        number = (number * 1103515245 + 12345 + 7 * token) % 2**31
        numbers.append(number // 2**16)
    scores, attention = torch.tensor(numbers[len(prefix) :]).split((TOKENS, SOURCE))
    return scores % levels * (-8.0 / levels), (attention % 1024 / 256).softmax(0)


class State:
    # Each row's prefix and the seed of its sentence, and the number of rows that went through the model

    def __init__(self, seeds, levels):
        self.seeds, self.levels, self.prefixes, self.rows = seeds, levels, [()] * len(seeds), 0

    def select(self, rows):
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        self.prefixes = [self.prefixes[row] for row in rows.tolist()]

    def step(self, tokens, position, state):
        self.rows += len(tokens)
        self.prefixes = [(*prefix, token) for prefix, token in zip(self.prefixes, tokens.tolist(), strict=True)]
        assert {len(prefix) for prefix in self.prefixes} == {position + 1}
        results = map(partial(model, levels=self.levels), self.seeds, self.prefixes)
        return tuple(map(torch.stack, zip(*results)))


def search(seeds, width, rules, longest=LONGEST, levels=1024):
    # Translations, and the number of rows that went through the model
    state = State([seed for seed in seeds for _ in range(width)], levels)
    batch = SourceBatch(np.arange(len(seeds)), torch.zeros(len(seeds), 1), torch.ones(len(seeds)))
    return beam.search(state.step, state, batch, beam=width, longest=longest, rules=rules), state.rows


# Tokens of each sentence, recorded from sequence_generator.py of GNMT's and fairseq's SequenceGenerator of the
# Transformer's submission, written in plain Python for one sentence
@pytest.mark.parametrize(
    ("rules", "width", "levels", "translations"),
    [
        (GNMT, 1, 1024, "15 41 5415 1451 4145 5 1445 5141 5411 1 545 4"),
        (GNMT, 1, 4, "41  4 511  1151 11 1 5141 141 11 "),
        (GNMT, 2, 1024, "15 1 54 1451  5 1445 5141 1141 1 545 "),
        (GNMT, 2, 4, "4141  4 5  1151  1 5141  11 "),
        (GNMT, 4, 1024, "15 1 54 1451  5 1445 5141 45 1 545 "),
        (GNMT, 4, 4, "4141  51 5  1151  1 5141  11 "),
        (GNMT, 5, 1024, "15 1 54 1451  5 1445 5141 45 1 545 "),
        (GNMT, 5, 4, "4141  51 5  1151  1 5141  11 "),
        (TRANSFORMER, 1, 1024, "15 41 541 145 414 5 144 514 541 1 545 4"),
        (TRANSFORMER, 1, 4, "41 1 4 511 4 115 11 1 514 141 11 514"),
        (TRANSFORMER, 2, 1024, "15 1 54 141 4 5 1 514 114 1 545 4"),
        (TRANSFORMER, 2, 4, "41 1 51 5 4 1 115 1 515 14 11 514"),
        (TRANSFORMER, 4, 1024, "15 1 54 1 4 5 1 514 45 1 545 4"),
        (TRANSFORMER, 4, 4, "41 1 555 5 4 1 115 1 515 141 11 54"),
        (TRANSFORMER, 5, 1024, "15 1 54 1 4 5 1 514 45 1 545 4"),
        (TRANSFORMER, 5, 4, "41 1 555 5 4 1 115 1 515 141 11 54"),
    ],
)
def test_search_is_the_submitted_algorithm(rules, width, levels, translations):
    tokens, _ = search(SEEDS, width, rules, levels=levels)
    assert " ".join("".join(map(str, sentence)) for sentence in tokens) == translations


@pytest.mark.parametrize("rules", [GNMT, TRANSFORMER])
def test_sentences_of_a_batch_are_translated_independently(rules):
    translations, rows = search(SEEDS, 2, rules)
    singles = [search([seed], 2, rules) for seed in SEEDS]
    assert translations == [sentences[0] for sentences, _ in singles]
    # A sentence that has ended leaves the batch, and they end at different lengths.
    assert rows == sum(count for _, count in singles) < len(SEEDS) * 2 * LONGEST
    assert len({len(tokens) for tokens in translations}) >= 2
    limits = [1 + max(1, seed % LONGEST) for seed in SEEDS]
    limited = [search([seed], 2, rules, limit)[0][0] for seed, limit in zip(SEEDS, limits, strict=True)]
    assert search(SEEDS, 2, rules, limits)[0] == limited
    assert search([], 4, rules) == ([], 0)


def test_equal_scores_are_in_the_order_of_their_positions():
    values = torch.tensor([[float("inf"), 2.0, 0.0, -0.0, 2.0, 1e-40, 2.0, float("inf")]])
    assert beam.smallest(values, 7)[1].tolist() == [[2, 3, 5, 1, 4, 6, 0]]
