"""gpt-oss on four ranks against one: all with all experts, two copies of each, and none twice; its state read again."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.gpt_oss_20b.pytorch.config import Config
from benchmarks.gpt_oss_20b.pytorch.model import Training
from benchmarks.gpt_oss_20b.pytorch.train import train_step
from tests.in_framework.splits import assert_same_weights, batch_of, moments_of, whole

RANKS = (4,)
VOCABULARY = 96
CONFIG = Config(
    device="cpu", precision="fp32", max_steps=20, sequence_length=32, layers=2, width=32, heads=4, key_value_heads=2,
    head_size=12, window=9, sinks=True, experts=4, chosen_experts=2, inner_width=24, gate="gpt_oss", rope_base=10000.0,
    initial_weights=0.3, batch_size=4, micro_batch=1, expert_parallelism=1, learning_rate=0.01,
    end_learning_rate=0.001, warmup_steps=2, epsilon=1e-3, loss_rows=24,
)  # fmt: skip
SPLITS = ({"expert_parallelism": 1}, {"expert_parallelism": 2}, {"expert_parallelism": 4})


@pytest.fixture(scope="session")
def ranks():
    found = pytorch.start(CONFIG)
    yield found
    pytorch.finish()


@pytest.fixture
def alone(ranks):
    """The same process as the only rank."""
    return dataclasses.replace(ranks, rank=0, size=1)


def trained(config, ranks, steps=3):
    training = Training(config, VOCABULARY, ranks)
    initial, losses = whole(training), []
    for step in range(steps):
        loss = train_step(training, batch_of(config, VOCABULARY, ranks, step), 0.01)
        losses.append(pytorch.total(loss)[0] / ranks.size if ranks.size > 1 else float(loss))
    return training, initial, losses


def test_any_split_trains_as_one_rank(ranks, alone):
    training, wanted, expected = trained(CONFIG, alone)
    for how in (*SPLITS, {"expert_parallelism": 2, "recompute": True}):
        split, initial, losses = trained(dataclasses.replace(CONFIG, batch_size=4 // ranks.size, **how), ranks)
        assert all(torch.equal(initial[name], each) for name, each in wanted.items()), how
        assert losses == pytest.approx(expected, rel=2e-6), how
        assert_same_weights(split, training, how)


def test_the_norm_of_the_gradient_is_that_of_all_ranks(ranks, alone):
    """Clipped to a thousandth, AdamW moves as far; the first moment shows what it was given."""
    norms = []
    clipped = dataclasses.replace(CONFIG, gradient_clip=1e-3)
    split = {"batch_size": 4 // ranks.size, "expert_parallelism": 2}
    for config, by in ((dataclasses.replace(clipped, **split), ranks), (clipped, alone)):
        training, _, _ = trained(config, by, steps=1)
        found = [moments_of(training.optimizer, name, training)[0] for name in training.parameters]
        norms.append(float(torch.stack([each.square().sum() for each in found]).sum().sqrt()))
    assert norms == pytest.approx([1e-3 * (1 - CONFIG.beta1)] * 2, rel=1e-3)


def test_state_of_a_checkpoint_continues_in_every_split(ranks, alone, tmp_path):
    for how in SPLITS[1:]:
        config = dataclasses.replace(CONFIG, batch_size=4 // ranks.size, **how)
        training, _, _ = trained(config, ranks, steps=2)
        theirs, folder = whole(training), Path(os.environ.get("TOGETHER", tmp_path))
        paths = [folder / f"{how}-{rank}" for rank in range(ranks.size)]
        pytorch.save(paths[ranks.rank], training.state_dict())
        pytorch.barrier()
        for other, by in (*((each, ranks) for each in SPLITS), ({}, alone)):
            again = Training(dataclasses.replace(CONFIG, seed=9, batch_size=4 // by.size, **other), VOCABULARY, by)
            again.restore(map(pytorch.load, paths))
            ours = whole(again)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs), (how, other)
            moments = [[moments_of(each.optimizer, name, each) for name in theirs] for each in (again, training)]
            assert all(torch.equal(one, two) for one, two in zip(*moments)), (how, other)
            if other == how and by is ranks:
                same = again
        for each in (training, same):
            train_step(each, batch_of(config, VOCABULARY, ranks, 7), 0.01)
        ours, theirs = whole(same), whole(training)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), how


def test_bf16_is_close_to_fp32_with_shared_experts(ranks, alone):
    split = {"batch_size": 4 // ranks.size, "expert_parallelism": ranks.size}
    config = dataclasses.replace(CONFIG, precision="bf16", gradient_reduction="bf16", initial_weights=0.1)
    _, _, losses = trained(dataclasses.replace(config, **split), ranks)
    _, _, expected = trained(dataclasses.replace(config, precision="fp32"), alone)
    assert losses == pytest.approx(expected, rel=0.03) and losses != expected
