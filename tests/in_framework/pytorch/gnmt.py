"""GNMT: its network with values of the submitted code, decoding, attention in chunks, updates and precisions."""

import dataclasses

import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.gnmt.pytorch import attention
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.model import GNMT, Decoding, decode
from benchmarks.gnmt.pytorch.train import build, train_step
from benchmarks.translation.pytorch.batches import Batch, SourceBatch
from benchmarks.translation.vocabulary import BOS, EOS
from tests.in_framework.torch_checks import (
    assert_overflow_is_skipped,
    assert_precisions_train,
    gradient_projection,
    projection,
    set_fixed_weights,
)

WORDS = 37
CONFIG = Config(device="cpu", precision="fp32", width=12, layers=4, dropout=0.0, initial_weights=0.6,
                optimizer_kernel="fused", batch_size=3, beam_size=3, max_length_test=14, warm_up_steps=1,
                vocabulary_multiple=1)  # fmt: skip
CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
SOURCE_LENGTHS, TARGET_LENGTHS = (7, 6, 4), (3, 5, 7)  # tokens of each sentence, with BOS or EOS
pytorch.start(CONFIG)


def make_training(**settings):
    training = build(dataclasses.replace(CONFIG, **settings), WORDS, CPU, {})
    set_fixed_weights(training.network.parameters(), 0.6)
    return training


@pytest.fixture
def network():
    network = GNMT(CONFIG, WORDS).double().eval()
    set_fixed_weights(network.parameters(), 0.6)
    return network


@pytest.fixture
def batch():
    source, target_in, target_out = (torch.zeros(3, 7, dtype=torch.int64) for _ in range(3))
    for row, (source_length, length) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)):
        words = [(5 * row + 7 * place) % 33 + 4 for place in range(source_length - 2)]
        source[row, :source_length] = torch.tensor([BOS, *words, EOS])
        words = [(11 * row + 3 * place) % 33 + 4 for place in range(length - 1)]
        target_in[row, :length], target_out[row, :length] = torch.tensor([BOS, *words]), torch.tensor([*words, EOS])
    rows = target_out.flatten().nonzero().flatten()
    return Batch(source, torch.tensor(SOURCE_LENGTHS), target_in, target_out, rows, len(rows), len(rows), 3)


def log_probabilities(network, batch):
    outputs = network(batch.source, batch.source_lengths, batch.target_in)
    return torch.log_softmax(network.classifier(outputs), 2)


def test_outputs_loss_and_gradients_match_the_submitted_network(network, batch):
    """GNMT and LabelSmoothing of NVIDIA's v0.7 submission (seq2seq/models, without fusion) in float64."""
    loss = network.loss_sum(batch)
    loss.backward()
    outputs = projection(log_probabilities(network, batch)[batch.target_out > 0])
    values = [outputs, loss.item(), gradient_projection(network.parameters())]
    assert values == pytest.approx([59.45216166, 58.02505087, 6.355842092], rel=1e-8)


@torch.no_grad()
def test_decoding_step_by_step_matches_all_positions_at_once(network, batch):
    """With two hypotheses for each sentence, which are reordered after each step."""
    expected = log_probabilities(network, batch)
    state = Decoding.of(network, network.encode(batch.source, batch.source_lengths), 2)
    steps = []
    for position in range(7):
        steps.append(state.step(batch.target_in[:, position, None].expand(-1, 2)))
        state.select(torch.tensor([1, 0, 3, 3, 5, 4]))
    outputs, weights = (torch.stack(tensors, 2) for tensors in zip(*steps, strict=True))
    torch.testing.assert_close(outputs, expected[:, None].expand_as(outputs), rtol=0, atol=1e-12)
    padding = torch.arange(7) >= batch.source_lengths[:, None]
    assert not weights.masked_select(padding[:, None, None]).any()
    torch.testing.assert_close(weights.sum(3), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-12)
    state.select(torch.tensor([4, 5]))
    remaining = state.step(batch.target_in[2:, :1].expand(-1, 2))[0]
    assert remaining.shape == (1, 2, WORDS), "one sentence of the batch remains"


def test_attention_in_chunks_matches_plain_attention(monkeypatch):
    torch.manual_seed(0)
    padding = torch.arange(6) >= torch.tensor([6, 1, 4, 5]).unsqueeze(1)
    sizes = (4, 9, 8), (4, 6, 8), (8,)
    inputs = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    upstream = torch.randn(4, 9, 6, dtype=torch.float64)

    def with_gradients(weights):
        return weights, *torch.autograd.grad(weights, inputs, upstream)

    expected = with_gradients(attention.plain(*inputs, padding))
    for limit in (1, 4000, 1 << 20):
        monkeypatch.setitem(attention.CHUNK_BYTES, "cpu", limit)
        chunked = with_gradients(attention.chunked(*inputs, padding))
        torch.testing.assert_close(chunked, expected, rtol=0, atol=1e-12)


def test_translations_do_not_depend_on_the_batch(batch):
    """After training on these sentences translations end by themselves, at different lengths."""
    training = make_training()
    for _ in range(80):
        train_step(training, batch, 0.01)
    training.network.eval()
    translations = decode(training.network, WORDS, SourceBatch(torch.arange(3), batch.source, batch.source_lengths))
    assert translations == [batch.target_out[row, : length - 1].tolist() for row, length in enumerate(TARGET_LENGTHS)]
    for row, length in enumerate(SOURCE_LENGTHS):
        sentence = SourceBatch(torch.tensor([row]), batch.source[row : row + 1, :length], torch.tensor([length]))
        assert decode(training.network, WORDS, sentence) == [translations[row]]


def test_every_precision_trains_and_an_overflow_is_skipped(batch):
    def losses_of(precision):
        training = make_training(precision=precision)
        losses = [float(train_step(training, batch, 0.01)) for _ in range(8)]
        sources = SourceBatch(torch.arange(3), batch.source, batch.source_lengths)
        assert len(decode(training.network, WORDS, sources)) == 3
        return losses

    assert_precisions_train(losses_of, bf16=0.02, fp16=0.005)
    training = make_training(precision="fp16")
    assert_overflow_is_skipped(training, lambda: train_step(training, batch, 0.01))


def test_updates_are_clipped_adam_on_the_loss_per_sentence(batch):
    """Losses and weights of torch.optim.Adam and clip_grad_norm_ in float64; the norm of the gradients is 3.5."""
    training = make_training(gradient_clip=0.5, epsilon=1e-3)
    losses = [float(train_step(training, batch, 0.02)) for _ in range(2)]
    assert losses == pytest.approx([3.868336724, 3.576230241], abs=1e-5)
    assert projection(*training.network.parameters()) == pytest.approx(-103.829138, rel=1e-6)


def test_initial_weights_match_the_submitted_ones():
    torch.manual_seed(0)
    network = GNMT(dataclasses.replace(CONFIG, initial_weights=0.1), WORDS)
    constants = {name: p.flatten()[0].item() for name, p in network.named_parameters() if len(p.unique()) == 1}
    biases = [n for n, _ in network.named_parameters() if n.endswith("bias_hh_l0") or n == "decoder.attention.bias"]
    assert constants == {**dict.fromkeys(biases, 0.0), "decoder.attention.scale": pytest.approx(12**-0.5)}
    limits = [float(p.detach().abs().max()) for name, p in network.named_parameters() if name not in constants]
    assert min(limits) > 0.05 and max(limits) <= 0.1
