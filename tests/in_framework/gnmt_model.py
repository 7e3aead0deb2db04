"""GNMT's network and loss against float64 equations in numpy, its decoding against itself, and its updates by hand."""

import dataclasses
import json

import numpy as np
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.gnmt.pytorch import attention
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.data import synthetic_batch
from benchmarks.gnmt.pytorch.model import GNMT, Decoding
from benchmarks.gnmt.pytorch.train import build, content, train_step
from benchmarks.translation.pytorch.batches import Batch, SourceBatch
from benchmarks.translation.pytorch.loss import smoothed_loss
from benchmarks.translation.vocabulary import BOS, EOS, PAD

WORDS, WIDTH = 37, 12
CONFIG = Config(device="cpu", precision="fp32", width=WIDTH, layers=4, dropout=0.0, initial_weights=0.6,
                optimizer_kernel="fused", batch_size=3, beam_size=3, max_length_test=14, warm_up_steps=0)  # fmt: skip
CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
LENGTHS = (6, 4, 7), (5, 7, 3)
"""Tokens of the sentences, marks included."""


def network_of(**changes) -> GNMT:
    torch.manual_seed(3)
    network = GNMT(dataclasses.replace(CONFIG, **changes), WORDS).double().eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "bias" in name or name.endswith("scale"):
                parameter.uniform_(-0.5, 0.5)  # those that begin with a constant
    return network


def batch_of() -> Batch:
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


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(values, name, inputs):
    """Outputs of a layer for a list of vectors."""
    hidden = cell = np.zeros(WIDTH)
    outputs = []
    for x in inputs:
        gates = values[f"{name}.weight_ih_l0"] @ x + values[f"{name}.bias_ih_l0"]
        gates = gates + values[f"{name}.weight_hh_l0"] @ hidden + values[f"{name}.bias_hh_l0"]
        i, f, g, o = gates.reshape(4, WIDTH)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        outputs.append(hidden)
    return outputs


def encoder(values, tokens):
    embedded = [values["embedding.weight"][token] for token in tokens]
    forwards = lstm(values, "encoder.forwards", embedded)
    backwards = lstm(values, "encoder.backwards", embedded[::-1])[::-1]
    x = [np.concatenate(pair) for pair in zip(forwards, backwards, strict=True)]
    x = lstm(values, "encoder.layers.0", x)
    for number in (1, 2):
        x = [a + b for a, b in zip(lstm(values, f"encoder.layers.{number}", x), x, strict=True)]
    return x


def attend(values, query, context):
    prefix = "decoder.attention."
    vector = values[prefix + "vector"] / np.sqrt((values[prefix + "vector"] ** 2).sum()) * values[prefix + "scale"]
    scores = []
    for each in context:
        inner = values[prefix + "query.weight"] @ query + values[prefix + "key.weight"] @ each + values[prefix + "bias"]
        scores.append(vector @ np.tanh(inner))
    weights = np.exp(scores) / np.exp(scores).sum()
    return sum(weight * each for weight, each in zip(weights, context, strict=True)), weights


def decoder(values, tokens, context):
    """Log-probabilities (positions, vocabulary) and attention (positions, source)."""
    first = lstm(values, "decoder.first", [values["embedding.weight"][token] for token in tokens])
    attended = [attend(values, query, context) for query in first]
    contexts = [each for each, _ in attended]
    x = lstm(values, "decoder.layers.0", [np.concatenate(pair) for pair in zip(first, contexts, strict=True)])
    for number in (1, 2):
        joined = [np.concatenate(pair) for pair in zip(x, contexts, strict=True)]
        x = [a + b for a, b in zip(lstm(values, f"decoder.layers.{number}", joined), x, strict=True)]
    logits = np.stack(x) @ values["classifier.weight"].T + values["classifier.bias"]
    return logits - np.log(np.exp(logits).sum(1, keepdims=True)), np.stack([weights for _, weights in attended])


def reference_loss(values, batch) -> float:
    total = 0.0
    for row in range(3):
        source = batch.source[row, : LENGTHS[0][row]].tolist()
        target, wanted = (each[row, : LENGTHS[1][row]].tolist() for each in (batch.target_in, batch.target_out))
        found, _ = decoder(values, target, encoder(values, source))
        for at, token in enumerate(wanted):
            total -= 0.9 * found[at, token] + 0.1 * found[at].mean()
    return total


# -- comparisons -----------------------------------------------------------------------------------------


def loss_of(network, batch):
    hidden = network(batch.source, batch.source_lengths, batch.target_in).reshape(-1, WIDTH)
    classifier = network.classifier
    return smoothed_loss(hidden, classifier.weight, classifier.bias, batch.target_out.reshape(-1), 0.1)


def against_equations() -> dict:
    """Errors of the loss and of its derivative along random directions, next to central differences."""
    network, batch = network_of(), batch_of()
    values = {name: parameter.detach().numpy().copy() for name, parameter in network.named_parameters()}
    loss = loss_of(network, batch)
    loss.backward()
    expected = reference_loss(values, batch)
    errors = {}
    random = np.random.RandomState(1)
    for name, parameter in network.named_parameters():
        direction = random.randn(*parameter.shape)
        moved = [reference_loss({**values, name: values[name] + side * 1e-5 * direction}, batch) for side in (1, -1)]
        slope = (moved[0] - moved[1]) / 2e-5
        ours = float((parameter.grad.numpy() * direction).sum())
        errors[name] = abs(ours - slope) / max(1.0, abs(slope))
    return {"loss": abs(float(loss.detach()) - expected) / expected, "derivative": max(errors.values())}


def stepwise() -> dict:
    """Decoding token by token, two hypotheses a sentence, next to all positions at once and to the equations."""
    network, batch = network_of(), batch_of()
    values = {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}
    with torch.no_grad():
        hidden = network(batch.source, batch.source_lengths, batch.target_in)
        forced = torch.log_softmax(network.classifier(hidden), 2)
        state = Decoding(network, network.encode(batch.source, batch.source_lengths), 2)
        found, attended = [], []
        for position in range(7):
            log_probabilities, weights = state.step(batch.target_in[:, position].repeat_interleave(2))
            found.append(log_probabilities)
            attended.append(weights)
            state.select(torch.tensor([1, 0, 3, 3, 5, 4]))
        # Row 2 of the batch alone goes on.
        state.select(torch.tensor([4, 5]))
        alone = state.step(batch.target_in[2:, 0].repeat(2))[0]
    found, attended = torch.stack(found, 1), torch.stack(attended, 1)
    errors = [float((found[2 * row + k] - forced[row]).abs().max()) for row in range(3) for k in range(2)]
    equations = []
    for row in range(3):
        context = encoder(values, batch.source[row, : LENGTHS[0][row]].tolist())
        expected, weights = decoder(values, batch.target_in[row, : LENGTHS[1][row]].tolist(), context)
        equations.append(np.abs(found[2 * row, : LENGTHS[1][row]].numpy() - expected).max())
        ours = attended[2 * row, : LENGTHS[1][row]].numpy()
        equations.append(np.abs(ours[:, : LENGTHS[0][row]] - weights).max())
        equations.append(np.abs(ours[:, LENGTHS[0][row] :]).max(initial=0))
    return {"forced": max(errors), "equations": float(max(equations)), "rows": list(alone.shape)}


def scores() -> dict:
    """The attention's scores and gradients, in chunks and at once."""
    torch.manual_seed(0)
    sizes = (4, 9, 8), (4, 6, 8), (8,)
    inputs = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    upstream = torch.randn(4, 9, 6, dtype=torch.float64)
    found = []
    kept = dict(attention.CHUNK_BYTES)
    for kind, limit in (
        (attention.plain, 0),
        (attention.chunked, 1),
        (attention.chunked, 4000),
        (attention.chunked, 1 << 20),
    ):
        attention.CHUNK_BYTES["cpu"] = limit
        result = kind(*inputs)
        found.append([result.detach(), *torch.autograd.grad(result, inputs, upstream)])
    attention.CHUNK_BYTES.update(kept)
    return {
        "largest error": max(
            float((a - b).abs().max()) for other in found[1:] for a, b in zip(other, found[0], strict=True)
        )
    }


def batched_is_single() -> dict:
    """Translations of a batch with padding after learning it, next to one sentence at a time."""
    training, batch = build(CONFIG, WORDS, CPU, {}), batch_of()
    for _ in range(80):
        train_step(training, batch, 0.01)
    training.network.eval()
    together = training.decode(SourceBatch(np.arange(3), batch.source, batch.source_lengths))
    wanted = [batch.target_out[row, : length - 1].tolist() for row, length in enumerate(LENGTHS[1])]
    alone = []
    for row, length in enumerate(LENGTHS[0]):
        one = SourceBatch(np.array([row]), batch.source[row : row + 1, :length], torch.tensor([length]))
        alone += training.decode(one)
    return {"same": together == alone, "learnt": together == wanted}


def precisions() -> dict:
    """Losses of some steps in each precision on this CPU, and what skipping an overflow leaves as it was."""
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        training = build(dataclasses.replace(CONFIG, precision=precision, learning_rate=0.01), WORDS, CPU, {})
        found[precision] = [float(train_step(training, batch_of(), 0.01)) for _ in range(8)]
        decoded = training.decode(SourceBatch(np.arange(3), batch_of().source, batch_of().source_lengths))
        found[precision + " decodes"] = len(decoded) == 3
    before = content(training)["network"]["classifier.weight"].clone()
    training.updates.scale.value.fill_(3e38)
    loss = float(train_step(training, batch_of(), 0.01))
    after = content(training)["network"]["classifier.weight"]
    found["overflow"] = {
        "unchanged": bool((before == after).all()),
        "loss": loss,
        "scale": float(training.updates.scale.value),
    }
    return found


def update() -> dict:
    """One step next to clipped Adam by the equations; the loss is divided by sentences."""
    config = dataclasses.replace(CONFIG, gradient_clip=0.5)
    training, batch = build(config, WORDS, CPU, {}), batch_of()
    network = training.network
    before = [parameter.detach().double().clone() for parameter in network.parameters()]
    loss = training.loss(batch) / 3
    gradients = [each.double() for each in torch.autograd.grad(loss, list(network.parameters()))]
    norm = torch.sqrt(sum((each**2).sum() for each in gradients))
    reported = float(train_step(training, batch, 0.02))
    errors = []
    for parameter, old, gradient in zip(network.parameters(), before, gradients, strict=True):
        clipped = gradient * min(1.0, 0.5 / float(norm + 1e-6))
        # After one step both moments, corrected for their start, are the gradient and its square.
        expected = old - 0.02 * clipped / (clipped.abs() + config.epsilon)
        known = clipped.abs() > 1e-5
        errors.append(float(((parameter.detach() - expected).abs() * known).max()))
    return {"norm": float(norm), "error": max(errors), "reported": abs(reported - float(loss) * 3 / batch.tokens)}


def initial() -> dict:
    """Largest weights at the beginning, and what begins with a constant."""
    network = GNMT(dataclasses.replace(CONFIG, initial_weights=0.1), WORDS)
    largest = {name: float(p.detach().abs().max()) for name, p in network.named_parameters()}
    constant = {n for n, p in network.named_parameters() if bool((p == p.flatten()[0]).all())}
    return {"most": max(v for n, v in largest.items() if n not in constant), "constant": sorted(constant),
            "of scale": largest["decoder.attention.scale"]}  # fmt: skip


pytorch.start(CONFIG)
noise = synthetic_batch(CONFIG, WORDS, torch.device("cpu"), 5)
print(
    json.dumps(
        {
            "equations": against_equations(),
            "stepwise": stepwise(),
            "scores": scores(),
            "batched": batched_is_single(),
            "precisions": precisions(),
            "update": update(),
            "initial": initial(),
            "noise": [list(each.shape) for each in noise[:5]],
        }
    )
)
