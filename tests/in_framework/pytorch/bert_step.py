"""BERT's step on two ranks with recorded values, evaluation samples, precisions and overflows."""

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks.bert import noise
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import evaluation_input, part_of, training_input
from benchmarks.bert.pytorch.train import Training, train_step, warm_up
from benchmarks.common.frameworks import pytorch
from benchmarks.language import ARRAYS, arrays
from tests.in_framework.fixed_weights import projection, set_fixed_weights
from tests.in_framework.splits import one_rank, share_batch

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
    content = noise.sample_arrays(SAMPLES, LONGEST, 3, ENTRIES)
    return arrays.Samples(*(content[name].astype(dtype) for name, dtype in ARRAYS.items()))


def make_training(config, ranks):
    training = Training(config, ENTRIES, ranks)
    set_fixed_weights(training.network.parameters(), 0.3)
    return training


def weights(training):
    return torch.nn.utils.parameters_to_vector(training.network.parameters()).detach().clone()


@pytest.mark.parametrize("settings", [{}, {"accumulation": 8}, {"split_optimizer": True, "accumulation": 2}], ids=str)
def test_steps_do_not_depend_on_ranks_and_micro_batches(settings, ranks, samples):
    """Losses and weights after four steps of LAMB (You et al. 2020) on the global batch, computed in float64."""
    training = make_training(share_batch(CONFIG, ranks, **settings), ranks)
    initial = weights(training)
    warm_up(training)
    assert torch.equal(weights(training), initial), "the warm-up changes nothing"
    batches = training_input(training.config, samples, ranks, 0)
    losses = [pytorch.total(train_step(training, next(batches), RATE)[None])[0] / ranks.size for _ in range(4)]
    batches.close()
    assert losses == pytest.approx([5.61512397, 6.30273742, 5.14521458, 4.7317593], rel=1e-5)
    assert projection(*training.network.parameters()) == pytest.approx(62.8528012, rel=1e-5)
    share = training.optimizer.inner.flat.numel() / training.optimizer.gradients.numel()
    assert share == (1 / ranks.size if "split_optimizer" in settings else 1), "share of the optimizer's state"


def test_every_evaluation_sample_counts_once(ranks, samples):
    training = make_training(share_batch(CONFIG, ranks, eval_batch_size=3), ranks)
    parts = evaluation_input(training.config, samples, ranks)
    own = sum(training.network.figures(part) for part in parts if part is not None)
    expected = sum(training.network.figures(part_of(samples, np.array([number]))) for number in range(SAMPLES))
    assert pytorch.total(own) == pytest.approx(expected.tolist(), rel=1e-6)
    assert expected[3:].tolist() == [SAMPLES, len(samples.masked_labels)]


def test_every_precision_trains_and_an_overflow_changes_nothing(ranks, samples):
    ranks = one_rank(ranks)
    batches = training_input(CONFIG, samples, ranks, 0)
    batch, losses = next(batches), {}
    batches.close()
    for precision in ("fp32", "bf16", "fp16"):
        config = dataclasses.replace(CONFIG, precision=precision, loss_scale=1024.0, epsilon=1e-6)
        training = Training(config, ENTRIES, ranks)
        losses[precision] = [float(train_step(training, batch, RATE)) for _ in range(12)]
    for precision, tolerance in (("bf16", 0.01), ("fp16", 0.002)):
        assert losses[precision] == pytest.approx(losses["fp32"], rel=tolerance)
        assert losses[precision] != losses["fp32"]
    assert losses["fp32"][-1] < 0.8 * losses["fp32"][0]
    training = Training(dataclasses.replace(CONFIG, precision="fp16", loss_scale=3e38), ENTRIES, ranks)
    initial = weights(training)
    train_step(training, batch, RATE)
    assert torch.equal(weights(training), initial)
    assert float(training.optimizer.scale.value) == pytest.approx(1.5e38)
