"""Helpers for tests of Llama's parallelism: a split training is compared with the same training on one rank."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.common.export.torch import inferring
from benchmarks.common.frameworks import pytorch
from benchmarks.llama.generate import POSITIONS, empty_cache
from benchmarks.llama.pytorch import data, parallel, serving
from benchmarks.llama.pytorch.network import rope_cos_sin
from tests.in_framework.torch_checks import saved_bytes


def one_rank(ranks):
    """This process as the only rank of a job."""
    return dataclasses.replace(ranks, rank=0, size=1)


def share_batch(config, ranks, **settings):
    """A configuration with the same global batch on all ranks. Only Llama's configurations have groups of ranks."""
    shared = dataclasses.replace(config, **settings)
    return dataclasses.replace(shared, batch_size=config.batch_size * getattr(shared, "group", 1) // ranks.size)


def random_batch(config, vocabulary, ranks, step):
    """Draw this rank's micro-batches. The global batch depends only on the step."""
    place, generator = data.mesh_position(config, ranks), torch.Generator().manual_seed(step)
    tokens = torch.randint(
        vocabulary, (config.global_batch(ranks.size), config.sequence_length + 1), generator=generator
    )
    tokens = tokens[place.group * config.batch_size : (place.group + 1) * config.batch_size]
    positions = place.positions(config.sequence_length)
    example = data.synthetic_batch(config, vocabulary, ranks)[0]
    return [
        example._replace(tokens=part[:, positions], labels=part[:, positions + 1], positions=positions)
        for part in tokens.split(config.micro_batch_size)
    ]


def full_weights(training):
    """Weights by name, gathered from all ranks."""
    return {name: parallel.full_tensor(weight.detach()).clone() for name, weight in training.network.named_parameters()}


def full_state(training):
    """Weights, moments and step counts by name, gathered from all ranks."""
    moments = {
        f"{name} {key}": parallel.full_tensor(value).clone()
        for name, weight in training.network.named_parameters()
        for key, value in training.optimizer.state.get(weight, {}).items()
    }
    return {**full_weights(training), **moments}


def first_moments(training):
    return {name.split()[0]: value for name, value in full_state(training).items() if name.endswith(" exp_avg")}


def assert_equal(tensors, expected, note):
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == [], note
    assert tensors.keys() == expected.keys(), note


class Trainer(NamedTuple):
    """The training of one benchmark, on any ranks; ``settings`` change its configuration."""

    config: Any  # of one rank
    build: Callable[..., Any]  # (config, ranks) -> training
    batch: Callable[..., Any]  # (config, ranks, step) -> micro-batches of this rank
    train_step: Callable[..., Any]

    def new(self, ranks, **settings):
        return self.build(share_batch(self.config, ranks, **settings), ranks)

    def advance(self, training, steps):
        """Train and return the losses, each the mean over the ranks."""
        losses, ranks = [], training.ranks
        for step in steps:
            loss = self.train_step(training, self.batch(training.config, ranks, step), 0.01)
            losses.append(pytorch.total(loss)[0] / ranks.size if ranks.size > 1 else float(loss))
        return losses

    def train(self, ranks, steps=3, **settings):
        training = self.new(ranks, **settings)
        return training, self.advance(training, range(steps))

    def assert_splits_train_alike(self, splits, ranks, rtol=1e-4, atol=1e-6):
        """Compare initial weights, losses and final weights of each split with those of one rank."""
        initial = full_weights(self.new(one_rank(ranks)))
        single, expected = self.train(one_rank(ranks))
        for split in splits:
            training = self.new(ranks, **split)
            assert_equal(full_weights(training), initial, split)
            assert self.advance(training, range(3)) == pytest.approx(expected, rel=2e-6), split
            torch.testing.assert_close(full_weights(training), full_weights(single), rtol=rtol, atol=atol)

    def assert_splits_resume(self, splits, ranks, folder, **settings):
        """Restore the checkpoint of each split in every split and on one rank; the same split continues bit for bit."""
        for split in splits:
            training, _ = self.train(ranks, steps=2, **settings, **split)
            saved, paths = full_state(training), [folder / f"{split}-{rank}" for rank in range(ranks.size)]
            pytorch.save(paths[ranks.rank], training.state_dict())
            pytorch.barrier()
            # FSDP, which casts, needs all ranks of the job.
            single = [(one_rank(ranks), {})] if training.config.precision == "fp32" else []
            for job, other in (*single, *((ranks, other) for other in (*splits, split))):
                resumed = self.new(job, **settings, **other)
                resumed.restore(map(pytorch.load, paths))
                assert_equal(full_state(resumed), saved, (split, other))
            assert self.advance(resumed, [7]) == self.advance(training, [7]), split
            assert_equal(full_state(resumed), full_state(training), split)


def assert_steps_match(network, tokens, tolerance=1e-12):
    """Compare the logits of a cache filled at once, in parts and token by token with the network."""
    step, shape = inferring(serving.Step(network)), network.shape
    cache_shape = (shape.layers, 2, shape.key_value_heads, 0, shape.size)
    dtype, expected = network.embed_tokens.weight.dtype, network(tokens).detach()
    for cuts in ((), (1, 2, 6), range(1, tokens.shape[1])):
        cache, outputs = torch.from_numpy(empty_cache(cache_shape, len(tokens))).to(dtype), []
        for part in torch.tensor_split(tokens, list(cuts), dim=1):
            logits, new_entries = map(torch.from_numpy, step(part.numpy(), cache.numpy()))
            cache = torch.cat((cache, new_entries), POSITIONS)
            outputs.append(logits)
        torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=tolerance, atol=tolerance)


def saved_by_layers(network, tokens, positions):
    """Return the bytes that Llama's layers save, without the head."""

    def forward():
        hidden, rope = network.embed_tokens(tokens), rope_cos_sin(positions, network.shape)
        for layer in network.layers:
            hidden = layer(hidden, rope)

    return saved_bytes(forward, network.parameters())
