"""BERT on SQuAD: updates with recorded values, padded rows in graphs, pretrained weights."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.bert_squad.arrays import Windows
from benchmarks.bert_squad.pytorch import train
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import batch_indices, filled, gathered, synthetic_batch
from benchmarks.bert_squad.pytorch.train import Training, train_step
from benchmarks.bert_squad.schedule import learning_rate
from benchmarks.common.data.problem import Problem
from benchmarks.common.run.ranks import Ranks
from benchmarks.language.pytorch.checkpoint import places_of
from benchmarks.language.pytorch.graphs import captured
from tests.in_framework.fixed_weights import projection, set_fixed_weights
from tests.in_framework.held import GraphStub, compute_gradients

CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
VOCABULARY = 48
CONFIG = Config(
    device="cpu", precision="fp32", layers=2, width=16, heads=2, inner_width=32, positions=40, sequence_length=40,
    dropout=0.0, attention_dropout=0.0, batch_size=6, initializer_range=0.2, seed=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def windows():
    """30 windows of random tokens and of 10 to 40 tokens."""
    random, count = np.random.RandomState(0), 30
    lengths = random.randint(10, 41, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    starts = random.randint(0, 5, count)
    return Windows(
        tokens=random.randint(0, VOCABULARY, total).astype(np.uint16),
        begins=np.zeros(total, np.uint16),
        ends=np.zeros(total, np.uint16),
        best=np.zeros(total, np.uint8),
        offsets=offsets,
        second=np.full(count, 4, np.uint16),
        start=starts.astype(np.uint16),
        end=(starts + random.randint(0, 5, count)).astype(np.uint16),
        question=np.arange(count, dtype=np.int32),
    )


@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_updates_match_adam_without_bias_correction(windows, kernel):
    """Losses and weights of five steps in float64: loss of each window, clipping, Adam as in run_squad.py of BERT."""
    # The gradient of the key biases is rounding, which a smaller epsilon would amplify.
    config = dataclasses.replace(CONFIG, gradient_clip=0.5, weight_decay=0.1, learning_rate=0.01, epsilon=1e-4)
    training = Training(config, VOCABULARY, CPU, kernel, None)
    set_fixed_weights(training.network.parameters(), 0.3)
    batches = [gathered(windows, batch_indices(config, windows, step, 5, CPU)) for step in range(5)]
    rates = [learning_rate(config, step, 5) for step in range(5)]
    losses = [float(train_step(training, batch, rate)) for batch, rate in zip(batches, rates, strict=True)]
    assert losses == pytest.approx([3.03069323, 3.12961443, 3.05951067, 2.99248771, 2.90341786], abs=1e-5)
    assert projection(*training.network.parameters()) == pytest.approx(-98.4718295, rel=1e-5)


def test_pretrained_weights_are_read_or_rejected(tmp_path):
    first, path = Training(CONFIG, VOCABULARY, CPU, "plain", None), tmp_path / "weights.pt"
    names = {f"encoder.{name}": tensor for name, tensor in first.network.encoder.state_dict().items()}
    published = {name: tensor.clone() for name, tensor in places_of(names).items()}
    torch.save({**published, "qa_outputs.weight": torch.zeros(2, 16)}, str(path))
    config = dataclasses.replace(CONFIG, seed=5, checkpoint="weights.pt")
    second = Training(config, VOCABULARY, CPU, "plain", train.weights_file(config, tmp_path))
    assert all(map(torch.equal, first.network.encoder.parameters(), second.network.encoder.parameters()))
    assert not torch.equal(first.network.span.weight, second.network.span.weight)
    missing = min(published)
    del published[missing]
    torch.save(published, str(path))
    with pytest.raises(Problem, match=missing):
        Training(config, VOCABULARY, CPU, "plain", path)
    with pytest.raises(Problem, match=r"is not there(.|\n)*--set checkpoint=FILE"):
        train.weights_file(config, tmp_path / "missing")


def test_padded_rows_train_like_rows_without_padding(windows):
    config = SimpleNamespace(**{**dataclasses.asdict(CONFIG), "token_bucket": 32})
    training, padding = Training(CONFIG, VOCABULARY, CPU, "plain", None), set()
    for number in range(5):
        batch = gathered(windows, batch_indices(CONFIG, windows, number, 5, CPU))
        padded = filled(batch, config)
        padding.add(len(padded.rows.tokens) - len(batch.rows.tokens))
        gradients, expected = (compute_gradients(training, training.forward_and_backward, b) for b in (padded, batch))
        for tensor, reference in zip(gradients, expected, strict=True):
            assert float((tensor - reference).abs().max() / reference.abs().max()) < 1e-6
    assert 0 < max(padding) < 32


def test_graphs_have_sizes_down_to_a_quarter():
    GraphStub.instances.clear()
    config = SimpleNamespace(**{**dataclasses.asdict(CONFIG), "token_bucket": 32, "cuda_graph": True})
    step = Training(CONFIG, VOCABULARY, CPU, "plain", None).forward_and_backward
    captured(step, lambda tokens: synthetic_batch(config, VOCABULARY, CPU, tokens), 6 * 40, 32, 1, GraphStub)
    assert [len(graph.tensors[0]) for graph in GraphStub.instances] == [256, 224, 192, 160, 128, 96, 64]
