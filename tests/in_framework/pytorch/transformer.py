"""The Transformer with values of PyTorch's modules, and decoding with a cache and in batches."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.common.frameworks import pytorch
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.model import Network, State, decode, packed_rows
from benchmarks.translation.pytorch.batches import Batch, SourceBatch
from benchmarks.translation.vocabulary import BOS, EOS, PAD
from tests.in_framework.torch_checks import projection, set_fixed_weights

NONE = {"dropout": 0.0, "attention_dropout": 0.0, "relu_dropout": 0.0}
CONFIG = Config(device="cpu", precision="fp32", layers=3, width=48, heads=4, inner_width=80, attention_bias=True,
                longest_offset=6, beam=3, **NONE)  # fmt: skip
WORDS, LONGEST = 61, 24


def network_of(**changes):
    network = Network(dataclasses.replace(CONFIG, **changes), WORDS).eval()
    set_fixed_weights(network.parameters(), 0.5)
    return network


def sentences(*lengths):
    # int64 (sentences, longest): words, EOS, then PAD
    rows = [[4 + (7 * row + 5 * place) % (WORDS - 4) for place in range(length - 1)] + [EOS] * (length > 0)
            for row, length in enumerate(lengths)]  # fmt: skip
    return torch.tensor([row + [PAD] * (max(lengths) - len(row)) for row in rows])


# nn.TransformerEncoder and nn.TransformerDecoder of PyTorch 2.13 in training mode and in float64, without dropout
@pytest.mark.parametrize("attention", ["fused", "plain"])
@pytest.mark.parametrize(
    ("norm", "expected"),
    [("pre", [48.90078302, 82.46612695, -34.67946504]), ("post", [-30.21321049, 123.3287405, -152.1774832])],
)
def test_logits_loss_and_gradients_match_pytorchs_modules(norm, attention, expected):
    network = network_of(norm=norm, attention=attention).double()
    network.dtype = torch.float64
    target = sentences(5, 8, 2)
    logits = network(sentences(9, 4, 7), target) @ network.table.weight.t()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    loss.backward()
    values = [projection(logits), loss.item(), projection(network.table.weight.grad)]
    assert values == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_packed_rows_have_no_padding_and_the_same_results(norm):
    network, sizes, results = network_of(norm=norm).double(), set(), []
    network.dtype = torch.float64
    source, target = sentences(9, 4, 7, 1), sentences(5, 8, 2, 8)
    rows = [(ids != PAD).flatten().nonzero().squeeze(1) for ids in (source, target)]
    plain = network(source, target).flatten(0, 1)[rows[1]]
    for module in filter(lambda module: isinstance(module, nn.Linear), network.modules()):
        module.register_forward_hook(lambda _, inputs, output: sizes.add(output.shape[:-1].numel()))
    packed = network(source, target, rows=rows)
    assert sizes == {21, 23}, "tokens of source and target"
    for hidden in (packed, plain):
        results.append([hidden.detach(), *torch.autograd.grad(hidden.square().sum(), list(network.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.2)])
@torch.no_grad()
def test_decoding_with_a_cache(precision, tolerance):
    # Against the network on all tokens, also after the rows were reordered and a sentence has left
    network, source = network_of(precision=precision), sentences(9, 4, 7, 9)
    with pytorch.autocast(source.device, precision):
        state = State.of(network, source, 3)
    tokens, present = torch.full((12, 1), BOS), torch.arange(4)
    for position in range(LONGEST - 1):
        with pytorch.autocast(source.device, precision):
            log_probabilities = network.next(tokens[:, -1], position, state)
            hidden = network(source[present].repeat_interleave(3, 0), tokens)[:, -1]
            expected = torch.log_softmax((hidden @ network.table.weight.t().to(hidden.dtype)).float(), 1)
        assert (log_probabilities - expected).abs().max() < tolerance
        remaining = torch.arange(len(present)) if position != 5 else torch.tensor([0, 2, 3])
        numbers = torch.arange(3 * len(remaining)).view(-1, 3)
        rows = (remaining[:, None] * 3 + numbers * (position + 1) % 3).reshape(-1)
        state.select(rows)
        present = present[remaining]
        tokens = torch.cat((tokens[rows], 4 + (numbers.reshape(-1, 1) * 11 + position) % (WORDS - 4)), 1)


def batch_of(*lengths):
    ids = sentences(*lengths)
    rows = (ids != PAD).flatten().nonzero().squeeze(1)
    return Batch(ids, torch.tensor(lengths), ids, ids, rows, len(rows), len(rows), len(ids), source_rows=rows)


def test_a_batch_without_much_padding_is_not_packed():
    padded = batch_of(9, 4, 7)
    assert packed_rows(batch_of(9, 9, 9, 6)) is None
    assert [len(rows) for rows in packed_rows(padded)] == [20, 20]
    packed, plain = (float(network_of(packed=is_packed).loss_sum(padded)) for is_packed in (True, False))
    assert packed == pytest.approx(plain, rel=1e-6) and packed > 0


def test_a_batch_is_translated_as_its_sentences_are():
    network, source = network_of(), sentences(9, 4, 7, 1, 12)
    lengths = (source != PAD).sum(1)
    translations = decode(network, WORDS, SourceBatch(np.arange(5), source, lengths))
    singles = [decode(network, WORDS, SourceBatch(np.arange(1), row[None, :length], length[None]))
               for row, length in zip(source, lengths, strict=True)]  # fmt: skip
    assert [[translation] for translation in translations] == singles
    assert len({len(translation) for translation in translations}) > 1
