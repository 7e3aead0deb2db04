"""BERT's step on two ranks with recorded values, evaluation samples, and precisions."""

import dataclasses

import numpy as np
import pytest

from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import evaluation_input, part_of, training_input
from benchmarks.bert.pytorch.train import Training, train_step, warm_up
from benchmarks.common.frameworks import pytorch
from tests.in_framework.pytorch.bert_network import samples as make_samples
from tests.in_framework.splits import one_rank, share_batch
from tests.in_framework.torch_checks import (
    assert_precisions_train,
    projection,
    set_fixed_weights,
)

RANKS = (2,)
ENTRIES, LONGEST, SAMPLES, RATE = 61, 20, 37, 0.02
CONFIG = Config(
    device="cpu", precision="fp32", layers=2, width=64, heads=4, inner_width=48, positions=LONGEST, dropout=0.0,
    attention_dropout=0.0, masked_mean="global", gradient_clip=0.0, optimizer_kernel="fused", batch_size=16, seed=5,
    # Large enough that rounding does not decide the direction of a step where a gradient is near 0.
    epsilon=1e-2,
)  # fmt: skip


@pytest.fixture(scope="module")
def samples():
    return make_samples(SAMPLES, LONGEST, ENTRIES, masked=3)


@pytest.mark.parametrize("settings", [{}, {"accumulation": 8}, {"split_optimizer": True, "accumulation": 2}], ids=str)
def test_steps_do_not_depend_on_ranks_and_micro_batches(settings, ranks, samples):
    """Losses and weights after four steps of LAMB (You et al. 2020) on the global batch, computed in float64."""
    training = Training(share_batch(CONFIG, ranks, **settings), ENTRIES, ranks)
    parameters = list(training.network.parameters())
    set_fixed_weights(parameters, 0.3)
    initial = projection(*parameters)
    warm_up(training)
    assert projection(*parameters) == initial, "the warm-up changes nothing"
    batches = training_input(training.config, samples, ranks, 0)
    losses = [pytorch.total(train_step(training, next(batches), RATE)[None])[0] / ranks.size for _ in range(4)]
    batches.close()
    assert losses == pytest.approx([5.61512397, 6.30273742, 5.14521458, 4.7317593], rel=1e-5)
    assert projection(*parameters) == pytest.approx(62.8528012, rel=1e-5)


def test_every_evaluation_sample_counts_once(ranks, samples):
    training = Training(share_batch(CONFIG, ranks, eval_batch_size=3), ENTRIES, ranks)
    parts = evaluation_input(training.config, samples, ranks)
    own = sum(training.network.figures(part) for part in parts if part is not None)
    expected = sum(training.network.figures(part_of(samples, np.array([number]))) for number in range(SAMPLES))
    assert pytorch.total(own) == pytest.approx(expected.tolist(), rel=1e-6)
    assert expected[3:].tolist() == [SAMPLES, len(samples.masked_labels)]


def test_every_precision_trains(ranks, samples):
    single = one_rank(ranks)
    batches = training_input(CONFIG, samples, single, 0)
    batch = next(batches)
    batches.close()

    def losses_of(precision):
        config = dataclasses.replace(CONFIG, precision=precision, loss_scale=1024.0, epsilon=1e-6)
        training = Training(config, ENTRIES, single)
        return [float(train_step(training, batch, RATE)) for _ in range(12)]

    assert_precisions_train(losses_of, bf16=0.01, fp16=0.002)
