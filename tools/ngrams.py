"""Measure the loss of an n-gram model on a Llama data set, as a lower bound for a trained network.

    python -m tools.ngrams ~/.local/share/encore/llama31-8b --order 2 --length 128 --samples 100

Interpolated modified Kneser-Ney smoothing (Chen and Goodman 1998, TR-10-98, section 3): three discounts per order
from the counts of counts, lower orders from the number of distinct preceding tokens, and finally the uniform
distribution. Only the training split is counted. Each evaluation token is predicted from the preceding tokens,
across samples; a network sees only its sample, but all of it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.llama.dataset import open_data
from tools import run

Gram = tuple[int, ...]
Order = tuple[dict[Gram, int], dict[Gram, int], dict[Gram, float], tuple[float, float, float]]


def discounts(counts: dict[Gram, int]) -> tuple[float, float, float]:
    """Return the discounts of counts 1, 2, and 3 or more (equation 26).

    If they are undefined, as for single tokens, use the defaults in KenLM's lmplz (--discount_fallback).
    """
    of = Counter(counts.values())
    if all(of[count] for count in range(1, 4)):
        share = of[1] / (of[1] + 2 * of[2])
        d1, d2, d3 = (count - (count + 1) * share * of[count + 1] / of[count] for count in range(1, 4))
        if 0 < d1 < 1 and 0 < d2 < 2 and 0 < d3 < 3:
            return d1, d2, d3
    return 0.5, 1.0, 1.5


def orders(tokens: Sequence[int], highest: int) -> list[Order]:
    """Return per order, from 1: counts of grams and contexts, weight of the lower order, and discounts."""
    counts: dict[Gram, int] = Counter(zip(*(tokens[offset:] for offset in range(highest)), strict=False))
    model: list[Order] = []
    while counts:
        discount = discounts(counts)
        total: dict[Gram, int] = defaultdict(int)
        freed: dict[Gram, float] = defaultdict(float)
        for gram, count in counts.items():
            total[gram[:-1]] += count
            freed[gram[:-1]] += discount[min(count, 3) - 1]
        model.append((counts, dict(total), {context: freed[context] / total[context] for context in total}, discount))
        counts = Counter(gram[1:] for gram in counts) if len(model) < highest else {}
    return model[::-1]


def probability(model: Sequence[Order], context: Gram, token: int, entries: int) -> float:
    """Return the token's probability after ``context``, from the last context tokens."""
    p = 1.0 / entries
    for number, (counts, total, freed, discount) in enumerate(model):
        history = context[len(context) - number :]
        if history not in total:
            break
        count = counts.get((*history, token), 0)
        p = freed[history] * p + (max(count - discount[min(count, 3) - 1], 0) / total[history] if count else 0.0)
    return p


def loss(train: Sequence[int], tokens: Sequence[int], order: int, entries: int) -> float:
    """Return the mean loss of ``tokens`` after the first one, in nats."""
    model = orders(train, order)
    chances = (
        probability(model, tuple(tokens[max(0, position - order + 1) : position]), tokens[position], entries)
        for position in range(1, len(tokens))
    )
    return -sum(map(math.log, chances)) / (len(tokens) - 1)


def main(
    data: Annotated[Path, typer.Argument(help="A prepared data set.")],
    order: Annotated[int, typer.Option(min=1, help="Highest order of the model.")] = 5,
    length: Annotated[int, typer.Option(help="sequence_length of the network.")] = 128,
    samples: Annotated[int, typer.Option(help="eval_samples of the network.")] = 1024,
) -> None:
    """Print the log perplexity per order on the evaluation samples."""
    data_set = open_data(data)
    train, tokens = (part.tokens.tolist() for part in (data_set.train, data_set.test))
    tokens = tokens[: min(samples, (len(tokens) - 1) // length) * length + 1]
    for n in range(1, order + 1):
        print(f"{n}-gram: {loss(train, tokens, n, data_set.vocabulary):.4f} on {len(tokens) - 1:,} tokens")


if __name__ == "__main__":
    run(main, __doc__)
