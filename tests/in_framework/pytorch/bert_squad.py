"""BERT on SQuAD: loss and update next to float64, filled rows, graphs, pretrained weights."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.bert_squad.arrays import Windows
from benchmarks.bert_squad.events import learning_rate
from benchmarks.bert_squad.pytorch import train
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import chosen, filled, gathered, synthetic_batch
from benchmarks.bert_squad.pytorch.model import Network
from benchmarks.bert_squad.pytorch.train import Training, train_step
from benchmarks.common.data.problem import Problem
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch.generators import drawn_from
from benchmarks.language.pytorch.checkpoint import places_of
from benchmarks.language.pytorch.graphs import captured
from tests.in_framework.held import Held

CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
VOCABULARY = 48
CONFIG = Config(
    device="cpu", precision="fp32", layers=2, width=16, heads=2, inner_width=32, positions=40, sequence_length=40,
    dropout=0.0, attention_dropout=0.0, batch_size=6, initializer_range=0.2, seed=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def windows(count=30):
    # Windows of random tokens of all lengths.
    random = np.random.RandomState(0)
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


def plain_loss(logits, batch):
    # The loss window by window.
    found = []
    for row, (begin, end) in enumerate(itertools.pairwise(batch.rows.offsets.tolist())):
        shares = logits[begin:end].log_softmax(0)
        found.append(-(shares[batch.start[row], 0] + shares[batch.end[row], 1]) / 2)
    return torch.stack(found).sum()


@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_update_is_adam_without_correction(windows, kernel):
    # The bias of the keys changes no softmax: its gradient is rounding, which a smaller epsilon would blow up.
    config = dataclasses.replace(CONFIG, gradient_clip=0.5, weight_decay=0.1, learning_rate=0.01, epsilon=1e-4)
    ours = Training(config, VOCABULARY, CPU, kernel, None)
    with drawn_from(config.seed):
        plain = Network(config, VOCABULARY, "padded").double()
    moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in plain.parameters()]
    for step in range(5):
        batch = gathered(windows, chosen(config, windows, step, 5, CPU))
        rate = learning_rate(config, step, 5)
        loss = plain_loss(plain.span(plain.encoder(batch.rows)), batch) / len(batch.start)
        assert float(train_step(ours, batch, rate)) == pytest.approx(float(loss.detach()), abs=1e-5)
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        norm = float(torch.stack([each.norm() for each in gradients]).norm())
        assert norm > 0.5, "or nothing is clipped"
        with torch.no_grad():
            for weight, gradient, (m, v) in zip(plain.parameters(), gradients, moments):
                gradient = gradient * min(1.0, config.gradient_clip / (norm + 1e-6))
                m.mul_(config.beta1).add_(gradient, alpha=1 - config.beta1)
                v.mul_(config.beta2).add_(gradient**2, alpha=1 - config.beta2)
                decay = config.weight_decay if weight.dim() > 1 else 0.0
                weight -= rate * (m / (v.sqrt() + config.epsilon) + decay * weight)
    for a, b in zip(ours.network.parameters(), plain.parameters()):
        assert float((a.double() - b).abs().max()) < 1e-5


def test_pretrained_weights_are_read_or_refused(tmp_path):
    first = Training(CONFIG, VOCABULARY, CPU, "plain", None)
    named = {f"encoder.{name}": each for name, each in first.network.encoder.state_dict().items()}
    published = {name: each.clone() for name, each in places_of(named).items()}
    path = tmp_path / "weights.pt"
    torch.save({**published, "qa_outputs.weight": torch.zeros(2, 16)}, str(path))
    other = dataclasses.replace(CONFIG, seed=5, checkpoint="weights.pt")
    second = Training(other, VOCABULARY, CPU, "plain", train.weights_file(other, tmp_path))
    assert all(map(torch.equal, first.network.encoder.parameters(), second.network.encoder.parameters()))
    assert not torch.equal(first.network.span.weight, second.network.span.weight)
    lacking = min(published)
    torch.save({name: each for name, each in published.items() if name != lacking}, str(path))
    with pytest.raises(Problem, match=lacking):
        Training(other, VOCABULARY, CPU, "plain", path)
    with pytest.raises(Problem, match=r"is not there(.|\n)*--set checkpoint=FILE"):
        train.weights_file(other, tmp_path / "nowhere")


def test_filled_rows_and_graphs_train_like_rows_without_padding(windows):
    Held.made.clear()
    config = SimpleNamespace(**{**dataclasses.asdict(CONFIG), "token_bucket": 32, "cuda_graph": True})
    training = Training(CONFIG, VOCABULARY, CPU, "plain", None)
    eager = training.forward_and_backward
    graphs = captured(eager, lambda tokens: synthetic_batch(config, VOCABULARY, CPU, tokens), 6 * 40, 32, 1, Held)

    def gradients(step, batch):
        training.optimizer.gradients.zero_()
        return [step(batch).clone(), training.optimizer.gradients.clone()]

    added = set()
    for number in range(5):
        batch = gathered(windows, chosen(CONFIG, windows, number, 5, CPU))
        full = filled(batch, config)
        added.add(len(full.rows.tokens) - len(batch.rows.tokens))
        expected = gradients(eager, batch)
        for step in (eager, graphs):
            for ours, its in zip(gradients(step, full), expected):
                assert float((ours - its).abs().max() / its.abs().max()) < 1e-6
    assert 0 < max(added) < 32
    assert [len(graph.held[0]) for graph in Held.made] == [256, 224, 192, 160, 128, 96, 64], "down to a quarter"
    assert sum(graph.replays for graph in Held.made) == 5
