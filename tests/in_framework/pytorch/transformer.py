"""The Transformer against PyTorch's modules with the same weights, and decoding with a cache and in batches."""

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
from tests.in_framework.waves import waves

NONE = {"dropout": 0.0, "attention_dropout": 0.0, "relu_dropout": 0.0}
CONFIG = Config(device="cpu", precision="fp32", layers=3, width=48, heads=4, inner_width=80, attention_bias=True,
                longest_offset=6, beam=3, **NONE)  # fmt: skip
WORDS, LONGEST = 61, 24


@torch.no_grad()
def network_of(**changes):
    # Weights, norms and biases are all different from 0 and 1
    torch.manual_seed(11)
    network = Network(dataclasses.replace(CONFIG, **changes), WORDS).eval()
    for phase, parameter in enumerate(network.parameters()):
        if parameter.dim() == 1:
            parameter.copy_(torch.from_numpy(0.5 + 0.3 * waves(len(parameter), phase=phase)))
    return network


def sentences(*lengths):
    # int64 (sentences, longest): words, EOS, then PAD
    rows = [[4 + (7 * row + 5 * place) % (WORDS - 4) for place in range(length - 1)] + [EOS] * (length > 0)
            for row, length in enumerate(lengths)]  # fmt: skip
    return torch.tensor([row + [PAD] * (max(lengths) - len(row)) for row in rows])


@torch.no_grad()
def pytorch_modules(network):
    # nn.TransformerEncoder and nn.TransformerDecoder with the network's weights
    config = network.config
    options = {"d_model": config.width, "nhead": config.heads, "dim_feedforward": config.inner_width, "dropout": 0.0,
               "batch_first": True, "norm_first": config.norm == "pre"}  # fmt: skip
    ends = [end if isinstance(end, nn.LayerNorm) else None for end in (network.encoder_norm, network.decoder_norm)]
    encoder_layer, decoder_layer = nn.TransformerEncoderLayer(**options), nn.TransformerDecoderLayer(**options)
    encoder = nn.TransformerEncoder(encoder_layer, config.layers, ends[0], enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(decoder_layer, config.layers, ends[1])
    for theirs, ours in zip((*encoder.layers, *decoder.layers), (*network.encoder, *network.decoder), strict=True):
        copies = {"linear1": [ours.inner], "linear2": [ours.outer], "self_attn.out_proj": [ours.own.output]}
        copies |= {f"norm{number}": [norm] for number, norm in enumerate(ours.norms, 1)} | {
            "self_attn": [ours.own.joint]
        }
        if ours.across is not None:
            copies["multihead_attn.out_proj"] = [ours.across.output]
            copies["multihead_attn"] = [ours.across.query, ours.across.memory]
        for name, parts in copies.items():
            module, prefix = theirs.get_submodule(name), "in_proj_" if name.endswith("_attn") else ""
            for kind in ("weight", "bias"):
                getattr(module, prefix + kind).copy_(torch.cat([getattr(part, kind) for part in parts]))
    # Training mode: the fast path for inference differs.
    return encoder.train(), decoder.train()


@pytest.mark.parametrize("attention", ["fused", "plain"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_logits_and_gradients_are_those_of_pytorchs_modules(norm, attention):
    network = network_of(norm=norm, attention=attention)
    encoder, decoder = pytorch_modules(network)
    source, target = sentences(9, 4, 7), sentences(5, 8, 2)
    padding = source == PAD
    future = torch.triu(torch.ones(target.shape[1], target.shape[1], dtype=torch.bool), 1)
    memory = encoder(network.embed(source), src_key_padding_mask=padding)
    expected = decoder(network.embed(target), memory, tgt_mask=future, memory_key_padding_mask=padding)
    gradients = []
    for hidden in (expected, network(source, target)):
        logits = hidden @ network.table.weight.t()
        network.zero_grad()
        logits.square().mean().backward()
        gradients.append((logits.detach(), network.table.weight.grad.clone()))
    for theirs, ours in zip(*gradients, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_packed_rows_have_no_padding_and_the_same_results(norm):
    network, sizes, results = network_of(norm=norm).double(), set(), []
    network.dtype = torch.float64
    source, target = sentences(9, 4, 7, 1), sentences(5, 8, 2, 8)
    rows = [(ids != PAD).flatten().nonzero().squeeze(1) for ids in (source, target)]
    hooks = [module.register_forward_hook(lambda _, inputs, output: sizes.add(output.shape[:-1].numel()))
             for module in network.modules() if isinstance(module, nn.Linear)]  # fmt: skip
    packed = network(source, target, rows=rows)
    assert sizes == {21, 23}, "tokens of source and target"
    for hook in hooks:
        hook.remove()
    for hidden in (packed, network(source, target).flatten(0, 1)[rows[1]]):
        results.append([hidden.detach(), *torch.autograd.grad(hidden.square().sum(), list(network.parameters()))])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max()


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
