"""gpt-oss on four ranks: experts on all ranks, in two copies and in one train like one rank, and resume."""

import dataclasses

import pytest
import torch

from benchmarks.gpt_oss_20b.pytorch.train import train_step
from benchmarks.llama.pytorch.model import Training
from tests.in_framework.pytorch.experts import CONFIG, VOCABULARY
from tests.in_framework.splits import Trainer, first_moments, one_rank, random_batch, share_batch

LONG = True
RANKS = (4,)
SPLITS = ({"expert_parallelism": 1}, {"expert_parallelism": 2}, {"expert_parallelism": 4})
TRAINER = Trainer(
    lambda config, ranks: Training(config, VOCABULARY, ranks),
    lambda config, ranks, step: random_batch(config, VOCABULARY, ranks, step),
    train_step,
)


def test_every_split_trains_like_one_rank(ranks):
    config = dataclasses.replace(CONFIG, qk_norm=True)
    TRAINER.assert_splits_train_alike(config, (*SPLITS, {"expert_parallelism": 2, "recompute": True}), ranks)


def test_gradients_are_clipped_by_the_norm_of_all_ranks(ranks):
    """The first moments after one step show the clipped gradients: AdamW itself cancels their scale."""
    config = share_batch(CONFIG, ranks, gradient_clip=1e-3, expert_parallelism=2)
    training, _ = TRAINER.train(config, ranks, steps=1)
    norm = torch.stack([moment.norm() for moment in first_moments(training).values()]).norm()
    assert float(norm) == pytest.approx(1e-3 * (1 - CONFIG.beta1), rel=1e-3)


def test_checkpoints_resume_in_every_split(ranks, together):
    TRAINER.assert_splits_resume(CONFIG, SPLITS, ranks, together)


def test_bf16_training_with_shared_experts_is_close_to_fp32(ranks):
    config = dataclasses.replace(CONFIG, precision="bf16", gradient_reduction="bf16", initial_weights=0.1)
    _, losses = TRAINER.train(share_batch(config, ranks, expert_parallelism=4), ranks)
    _, expected = TRAINER.train(dataclasses.replace(config, precision="fp32"), one_rank(ranks))
    assert losses == pytest.approx(expected, rel=0.03) and losses != expected
