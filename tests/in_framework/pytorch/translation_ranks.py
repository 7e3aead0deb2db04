"""Translations on one and three ranks: batches against their definition, resumed at any step, evaluations, steps."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.common.data.arrays import Sequences
from benchmarks.common.frameworks import pytorch
from benchmarks.transformer.pytorch import train
from benchmarks.transformer.pytorch.config import Config
from benchmarks.translation import arrays, orders
from benchmarks.translation.pytorch import batches, evaluation
from benchmarks.translation.vocabulary import BOS, EOS, PAD, SPECIAL, SUBTOKENS, UNK, Vocabulary
from tests.in_framework.torch_checks import projection, set_fixed_weights

LONG = True
RANKS = (1, 3)
WORDS = 20


def sentences(lengths, seed):
    tokens = np.random.default_rng(seed).integers(4, WORDS, int(lengths.sum())).astype(np.uint16)
    return Sequences(tokens, np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))


def batches_from(data, ranks, order_of, count, *shape, position=0):
    stream = batches.training_input(data, order_of, ranks, position, *shape, ahead=4 if position == 0 else 0)
    found = [next(stream) for _ in range(count)]
    stream.close()
    return found


def fields(batch):
    # All fields of a batch, sentences without their padding; the padded widths
    values = {**batch._asdict(), "source_lengths": batch.source_lengths.tolist()}
    for name in ("source", "target_in", "target_out"):
        values[name] = [[token for token in row if token != PAD] for row in getattr(batch, name).tolist()]
    values["rows"] = batch.target_out.flatten()[batch.rows].tolist()
    values["source_rows"] = batch.source.flatten()[batch.source_rows].tolist()
    return values, tuple(ids.shape[1] for ids in (batch.source, batch.target_in, batch.target_out))


def expected_fields(order, step, ranks, shape):
    # The same by definition
    parts = [order.batch(step, rank, ranks.size).tolist() for rank in range(ranks.size)]
    source = [[BOS] * shape.source_bos + DATA.source[index].tolist() + [EOS] for index in parts[ranks.rank]]
    targets = [[*DATA.target[index].tolist(), EOS] for index in parts[ranks.rank]]
    everything = [index for part in parts for index in part]
    widths = [-(-max(map(len, rows)) // shape.multiple) * shape.multiple for rows in (source, targets)]
    return {
        "source": source,
        "source_lengths": list(map(len, source)),
        "target_in": [[BOS, *row[:-1]] for row in targets],
        "target_out": targets,
        "rows": [token for row in targets for token in row],
        "tokens": sum(map(len, targets)),
        "all_tokens": sum(len(DATA.target[index]) + 1 for index in everything),
        "sentences": len(everything),
        "source_rows": [token for row in source for token in row],
        "all_source_tokens": sum(len(DATA.source[index]) + 1 + shape.source_bos for index in everything),
    }, (widths[0], widths[1], widths[1])


LENGTHS = [np.random.default_rng(seed).integers(1, 14, 300) for seed in (5, 6)]
DATA = arrays.Pairs(*(sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)))


@pytest.mark.parametrize("shape", [batches.Shape(), batches.Shape(source_bos=True, multiple=8)])
@pytest.mark.parametrize("rule", [orders.by_sentences, orders.by_tokens])
def test_batches_are_those_of_the_order_from_any_position(rule, shape, ranks):
    limits = {"batch_size": 4, "longest": 14} if rule is orders.by_sentences else {"tokens": 80, "longest": 16}

    def order_of(epoch):
        return rule(*LENGTHS, ranks=ranks.size, seed=9, epoch=epoch, **limits)

    steps = order_of(0).steps
    stream = [fields(batch) for batch in batches_from(DATA, ranks, order_of, 2 * steps + 1, shape)]
    for number, batch in enumerate(stream):
        assert batch == expected_fields(order_of(number // steps), number % steps, ranks, shape), number
    for position in (1, steps - 1, steps, steps + 2):
        resumed = [fields(batch) for batch in batches_from(DATA, ranks, order_of, 3, shape, position=position)]
        assert resumed == stream[position : position + 3]


@pytest.mark.parametrize("count", [1, 2, 7, 12, 13])
def test_each_sentence_is_translated_once(count, ranks):
    part = sentences(np.arange(count) % 5, 3)
    order = orders.for_evaluation(part.lengths, batch_size=2, ranks=ranks.size)

    def without_eos(batch):
        return [row[: length - 1].tolist() for row, length in zip(batch.source, batch.source_lengths, strict=True)]

    for interrupted, expected in ((False, [part[index].tolist() for index in range(count)]), (True, None)):
        run = SimpleNamespace(interruptible=iter, interrupted=interrupted)
        some = batches.evaluation_batches(part, order, ranks)
        assert evaluation.translate(some, count, without_eos, ranks, run) == expected
    with pytest.raises(RuntimeError, match=f"translated {3 * ranks.size} sentences, of them 2 different, of 3"):
        evaluation._of_all_ranks([0, 1, 1], [[1], [2], [3]], 3, ranks)


def test_bleu_of_the_transformer_is_that_of_the_round():
    # Over tokens of both sides; v0.5 matches no unknown word: 5 of 6 words, 4 of 5 pairs, 3 of 4, 2 of 3.
    vocabulary = Vocabulary((*SPECIAL, "the_", "Haus_", "-_", "boot_", "\\u_"), SUBTOKENS)
    target = Sequences(np.array([4, 5, 6, 7, 8, 4, 5, UNK], np.uint16), np.array([0, 8]))
    data = SimpleNamespace(vocabulary=vocabulary, references=["another text"], test=SimpleNamespace(target=target))
    configs = (Config(round="v0.5"), Config(round="v0.6"), Config(round="v0.7"), Config(bleu="plain"))
    scores = [train.score_of(config)([target[0].tolist()], data) for config in configs]
    assert scores[:3] == pytest.approx([100 * 3**-0.25, 100, 100]) and scores[3] < 30


# With an epsilon so large that no gradient near 0 makes a step of the full rate in a direction of rounding.
STEP_CONFIG = Config(device="cpu", precision="fp32", layers=2, width=32, heads=4, inner_width=48, batch_size=256,
                dropout=0.0, attention_dropout=0.0, relu_dropout=0.0, max_length=40, seed=5, optimizer_kernel="fused",
                epsilon=1e-3)  # fmt: skip
# -- steps ---------------------------------------------------------------------------------------------------

STEP_WORDS, STEPS, PAIRS, RATE = 57, 4, 24, 0.02


def made_sentences(factor, count=STEPS * PAIRS):
    # Lengths 1 to 11, and all tokens that are words
    offsets = np.concatenate(([0], np.cumsum(1 + np.arange(count) * factor % 11)))
    return Sequences((4 + np.arange(offsets[-1]) ** 2 % (STEP_WORDS - 4)).astype(np.uint16), offsets)


def step_batches(ranks):
    # The same steps for any number of ranks; the last one has the fewest pairs
    size = ranks.size
    cuts = [step * PAIRS + (PAIRS * rank + size - 1) // size for step in range(STEPS) for rank in range(size)]
    order = orders.Order(np.arange(STEPS * PAIRS), np.array([*cuts, STEPS * PAIRS]), STEPS)
    return batches_from(arrays.Pairs(made_sentences(3), made_sentences(7)), ranks, lambda _: order, STEPS)


# Losses and weights of torch.optim.Adam, with clip_grad_norm_, on the padded global batch in float64
@pytest.mark.parametrize(
    ("changes", "losses", "weights"),
    [
        *((changes, [4.041992446, 3.837933754, 3.705685471, 3.631343347], -222.4820746)
          for changes in ({}, {"packed": False}, {"split_optimizer": True, "loss_chunk": 7}, {"precision": "fp16"},
                          {"precision": "bf16"})),
        ({"gradient_clip": 0.5, "norm": "post"}, [4.168516683, 3.926682231, 3.797839656, 3.730710376], -221.9168473),
    ],
    ids=str,
)  # fmt: skip
def test_steps_match_adam_on_the_global_batch(changes, losses, weights, ranks):
    config = dataclasses.replace(STEP_CONFIG, vocabulary_multiple=1, **changes)
    cold, training = (train.build(dataclasses.replace(config, warm_up_steps=n), STEP_WORDS, ranks, {}) for n in (0, 3))
    parameters = list(training.network.parameters())
    assert all(map(torch.equal, parameters, cold.network.parameters())), "a warm-up changes nothing"
    set_fixed_weights(parameters, 0.3)
    steps = [pytorch.total(train.train_step(training, batch, RATE)[None])[0] / ranks.size
             for batch in step_batches(ranks)]  # fmt: skip
    assert steps == pytest.approx(losses, abs=0.02 if "precision" in changes else 1e-5)
    assert "precision" in changes or projection(*parameters) == pytest.approx(weights, rel=1e-6)
