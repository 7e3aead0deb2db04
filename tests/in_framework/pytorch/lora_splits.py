"""LoRA on Llama on two ranks: each split trains like one rank, resumes, reads its part of published weights, in FP8."""

import pytest
import torch

from tests.in_framework.pytorch.lora import (
    CONFIG,
    TRAINER,
    check_fp8_base_trains,
    check_published_weights_are_read,
    check_published_weights_in_fp8,
)
from tests.in_framework.splits import one_rank, share_batch

LONG = True
RANKS = (2,)
SPLITS = ({}, {"tensor_parallelism": 2}, {"context_parallelism": 2})


def test_every_split_trains_like_one_rank(ranks):
    TRAINER.assert_splits_train_alike(CONFIG, (*SPLITS, {"recompute": True}), ranks, atol=5e-6)


def test_checkpoints_resume_in_every_split(ranks, together):
    TRAINER.assert_splits_resume(CONFIG, SPLITS, ranks, together)


@pytest.mark.parametrize(("fused", "dtype"), [(False, "F32"), (True, "BF16")])
@pytest.mark.parametrize("split", SPLITS[:2])
def test_each_rank_reads_its_part_of_published_weights(fused, dtype, split, ranks, tmp_path):
    check_published_weights_are_read(ranks, tmp_path, fused, dtype, **split)


def test_bf16_training_with_fp32_adapters_is_close_to_fp32(ranks):
    training, losses = TRAINER.train(share_batch(CONFIG, ranks, precision="bf16"), ranks)
    _, expected = TRAINER.train(CONFIG, one_rank(ranks))
    assert losses == pytest.approx(expected, rel=0.02) and losses != expected
    dtypes = {("lora" in name, weight.dtype) for name, weight in training.network.named_parameters()}
    assert dtypes == {(False, torch.bfloat16), (True, torch.float32)}


@pytest.mark.parametrize("split", SPLITS)
def test_training_with_a_base_in_fp8_is_close_to_fp32(split, ranks):
    check_fp8_base_trains(ranks, **split)


def test_published_weights_are_stored_in_fp8(ranks, tmp_path):
    check_published_weights_in_fp8(ranks, tmp_path)
