"""GNMT's network and loss against float64 equations in numpy, its decoding against itself, and its updates by hand."""

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.gnmt.pytorch import attention
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.model import GNMT, Decoding, decode
from benchmarks.gnmt.pytorch.train import build, train_step
from benchmarks.translation.pytorch.batches import Batch, SourceBatch
from benchmarks.translation.vocabulary import BOS, EOS, PAD

WORDS, WIDTH = 37, 12
CONFIG = Config(device="cpu", precision="fp32", width=WIDTH, layers=4, dropout=0.0, initial_weights=0.6,
                optimizer_kernel="fused", batch_size=3, beam_size=3, max_length_test=14, warm_up_steps=1,
                vocabulary_multiple=1)  # fmt: skip
CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
# Tokens of the sentences, marks included.
LENGTHS = (6, 4, 7), (5, 7, 3)
pytorch.start(CONFIG)


def training_of(**changes):
    return build(dataclasses.replace(CONFIG, **changes), WORDS, CPU, {})


@pytest.fixture
def network():
    torch.manual_seed(3)
    network = GNMT(CONFIG, WORDS).double().eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "bias" in name or name.endswith("scale"):
                parameter.uniform_(-0.5, 0.5)  # those that begin with a constant
    return network


@pytest.fixture
def batch():
    random = np.random.RandomState(5)
    source, target_in, target_out = (np.full((3, 7), PAD) for _ in range(3))
    for row, (of_source, of_target) in enumerate(zip(*LENGTHS, strict=True)):
        source[row, :of_source] = [BOS, *random.randint(4, WORDS, of_source - 2), EOS]
        tokens = random.randint(4, WORDS, of_target - 1)
        target_in[row, :of_target], target_out[row, :of_target] = [BOS, *tokens], [*tokens, EOS]
    rows = np.flatnonzero(target_out.reshape(-1))
    tensors = map(torch.from_numpy, (source, np.array(LENGTHS[0]), target_in, target_out, rows))
    return Batch(*tensors, len(rows), len(rows), 3)


# -- the equations, a sentence and a position at a time --------------------------------------------------


def lstm(values, name, inputs):
    # Outputs of a layer for a list of vectors.
    hidden = cell = np.zeros(WIDTH)
    outputs = []
    for x in inputs:
        gates = values[f"{name}.weight_ih_l0"] @ x + values[f"{name}.bias_ih_l0"]
        gates = gates + values[f"{name}.weight_hh_l0"] @ hidden + values[f"{name}.bias_hh_l0"]
        i, f, o = (1 / (1 + np.exp(-gates.reshape(4, WIDTH)[row])) for row in (0, 1, 3))
        cell = f * cell + i * np.tanh(gates.reshape(4, WIDTH)[2])
        hidden = o * np.tanh(cell)
        outputs.append(hidden)
    return outputs


def layers(values, side, x, context=()):
    # Layers above the first, with residuals from the second on; a decoder's have the context as well.
    for number in range(3):
        joined = [np.concatenate(pair) for pair in zip(x, context, strict=True)] if context else x
        above = lstm(values, f"{side}.layers.{number}", joined)
        x = above if number == 0 else [a + b for a, b in zip(above, x, strict=True)]
    return x


def encoder(values, tokens):
    embedded = [values["embedding.weight"][token] for token in tokens]
    forwards = lstm(values, "encoder.forwards", embedded)
    backwards = lstm(values, "encoder.backwards", embedded[::-1])[::-1]
    return layers(values, "encoder", [np.concatenate(pair) for pair in zip(forwards, backwards, strict=True)])


def decoder(values, tokens, context):
    # Log-probabilities (positions, vocabulary) and attention (positions, source).
    own = {name.rpartition(".")[0].rpartition(".")[2] + name.rpartition(".")[2]: v for name, v in values.items()}
    vector = own["attentionvector"] / np.linalg.norm(own["attentionvector"]) * own["attentionscale"]
    first = lstm(values, "decoder.first", [values["embedding.weight"][token] for token in tokens])
    weights = []
    for query in first:
        inner = [own["queryweight"] @ query + own["keyweight"] @ each + own["attentionbias"] for each in context]
        scores = np.exp(np.tanh(inner) @ vector)
        weights.append(scores / scores.sum())
    x = layers(values, "decoder", first, [each @ np.stack(context) for each in weights])
    logits = np.stack(x) @ values["classifier.weight"].T + values["classifier.bias"]
    return logits - np.log(np.exp(logits).sum(1, keepdims=True)), np.stack(weights)


def reference_loss(values, batch):
    total = 0.0
    for row in range(3):
        source = batch.source[row, : LENGTHS[0][row]].tolist()
        target, wanted = (each[row, : LENGTHS[1][row]].tolist() for each in (batch.target_in, batch.target_out))
        found, _ = decoder(values, target, encoder(values, source))
        total -= sum(0.9 * found[at, token] + 0.1 * found[at].mean() for at, token in enumerate(wanted))
    return total


# -- comparisons -----------------------------------------------------------------------------------------


def test_loss_and_derivatives_are_the_equations(network, batch):
    # Derivatives along random directions, next to central differences.
    values = {name: parameter.detach().numpy().copy() for name, parameter in network.named_parameters()}
    loss = network.loss_sum(batch)
    loss.backward()
    assert loss.item() == pytest.approx(reference_loss(values, batch), rel=1e-12)
    random = np.random.RandomState(1)
    for name, parameter in network.named_parameters():
        direction = random.randn(*parameter.shape)
        moved = [reference_loss({**values, name: values[name] + side * 1e-5 * direction}, batch) for side in (1, -1)]
        slope = (moved[0] - moved[1]) / 2e-5
        assert float((parameter.grad.numpy() * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-6), name


@torch.no_grad()
def test_decoding_step_by_step_is_decoding_at_once(network, batch):
    # Two hypotheses a sentence, next to all positions at once and to the equations.
    values = {name: parameter.numpy() for name, parameter in network.named_parameters()}
    forced = torch.log_softmax(network.classifier(network(batch.source, batch.source_lengths, batch.target_in)), 2)
    state = Decoding.of(network, network.encode(batch.source, batch.source_lengths), 2)
    steps = []
    for position in range(7):
        steps.append(state.step(batch.target_in[:, position, None].expand(-1, 2)))
        state.select(torch.tensor([1, 0, 3, 3, 5, 4]))
    found, attended = (torch.stack(each, 2) for each in zip(*steps, strict=True))
    assert (found - forced[:, None]).abs().max() < 1e-12
    for row, (of_source, of_target) in enumerate(zip(*LENGTHS, strict=True)):
        context = encoder(values, batch.source[row, :of_source].tolist())
        expected, weights = decoder(values, batch.target_in[row, :of_target].tolist(), context)
        assert np.abs(found[row, 0, :of_target].numpy() - expected).max() < 1e-12
        padded = np.pad(weights, ((0, 0), (0, 7 - of_source)))
        assert np.abs(attended[row, 0, :of_target].numpy() - padded).max() < 1e-12
    state.select(torch.tensor([4, 5]))
    last = state.step(batch.target_in[2:, :1].expand(-1, 2))[0]
    assert last.shape == (1, 2, WORDS), "one sentence of the batch is left"


def test_weights_in_chunks_are_those_at_once(monkeypatch):
    torch.manual_seed(0)
    padding = torch.arange(6) >= torch.tensor([6, 1, 4, 5]).unsqueeze(1)
    sizes = (4, 9, 8), (4, 6, 8), (8,)
    inputs = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    upstream = torch.randn(4, 9, 6, dtype=torch.float64)
    plain = attention.plain(*inputs, padding)
    wanted = [plain, *torch.autograd.grad(plain, inputs, upstream)]
    for limit in (1, 4000, 1 << 20):
        monkeypatch.setitem(attention.CHUNK_BYTES, "cpu", limit)
        chunked = attention.chunked(*inputs, padding)
        found = [chunked, *torch.autograd.grad(chunked, inputs, upstream)]
        assert max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True)) < 1e-12


def test_a_batch_is_translated_as_its_sentences_are(batch):
    # After learning it: translations end by themselves, at different lengths.
    training = training_of()
    for _ in range(80):
        train_step(training, batch, 0.01)
    training.network.eval()
    together = decode(training.network, WORDS, SourceBatch(np.arange(3), batch.source, batch.source_lengths))
    assert together == [batch.target_out[row, : length - 1].tolist() for row, length in enumerate(LENGTHS[1])]
    alone = []
    for row, length in enumerate(LENGTHS[0]):
        one = SourceBatch(np.array([row]), batch.source[row : row + 1, :length], torch.tensor([length]))
        alone += decode(training.network, WORDS, one)
    assert together == alone


def test_every_precision_trains_and_overflows_are_skipped(batch):
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        training = training_of(precision=precision, learning_rate=0.01)
        found[precision] = [float(train_step(training, batch, 0.01)) for _ in range(8)]
        assert len(decode(training.network, WORDS, SourceBatch(np.arange(3), batch.source, batch.source_lengths))) == 3
    for precision, tolerance in (("bf16", 0.02), ("fp16", 0.005)):
        assert found[precision] != found["fp32"] and found[precision] == pytest.approx(found["fp32"], rel=tolerance)
    assert found["fp32"][-1] < 0.8 * found["fp32"][0]
    before = training.state_dict()["network"]["classifier.weight"].clone()
    training.optimizer.scale.value.fill_(3e38)
    train_step(training, batch, 0.01)
    assert torch.equal(before, training.network.classifier.weight)
    assert float(training.optimizer.scale.value) == pytest.approx(1.5e38)


def test_an_update_is_clipped_adam_on_the_loss_per_sentence(batch):
    training = training_of(gradient_clip=0.5)
    network = training.network
    before = [parameter.detach().double().clone() for parameter in network.parameters()]
    loss = network.loss_sum(batch) / 3
    gradients = [each.double() for each in torch.autograd.grad(loss, list(network.parameters()))]
    norm = float(torch.sqrt(sum((each**2).sum() for each in gradients)))
    assert norm > 0.5
    assert float(train_step(training, batch, 0.02)) == pytest.approx(float(loss) * 3 / batch.tokens, abs=1e-5)
    for parameter, old, gradient in zip(network.parameters(), before, gradients, strict=True):
        clipped = gradient * min(1.0, 0.5 / (norm + 1e-6))
        # After one step both moments, corrected for their start, are the gradient and its square.
        expected = old - 0.02 * clipped / (clipped.abs() + CONFIG.epsilon)
        assert ((parameter.detach() - expected).abs() * (clipped.abs() > 1e-5)).max() < 1e-5


def test_initial_weights_are_the_submitted_ones():
    network = GNMT(dataclasses.replace(CONFIG, initial_weights=0.1), WORDS)
    largest = {name: float(p.detach().abs().max()) for name, p in network.named_parameters()}
    constant = {name: p.flatten()[0].item() for name, p in network.named_parameters() if len(p.unique()) == 1}
    biases = [name for name in largest if name.endswith("bias_hh_l0") or name == "decoder.attention.bias"]
    assert constant == {**dict.fromkeys(biases, 0.0), "decoder.attention.scale": pytest.approx(12**-0.5)}
    assert max(value for name, value in largest.items() if name not in constant) <= 0.1
