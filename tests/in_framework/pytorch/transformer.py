"""The Transformer against torch.nn.Transformer's parts with the same weights, and its decoding against itself."""

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

NONE = {"dropout": 0.0, "attention_dropout": 0.0, "relu_dropout": 0.0}
CONFIG = Config(device="cpu", precision="fp32", layers=3, width=48, heads=4, inner_width=80, attention_bias=True,
                longest_offset=6, beam=3, **NONE)  # fmt: skip
WORDS, LONGEST = 61, 24


def network_of(**changes):
    # A network whose weights are all random, norms and biases too.
    torch.manual_seed(11)
    network = Network(dataclasses.replace(CONFIG, **changes), WORDS).eval()
    for parameter in network.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
    return network


def sentences(*lengths):
    # int64 (sentences, longest): random tokens with EOS, then PAD.
    found = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(found, lengths, strict=True):
        row[: length - 1] = torch.randint(4, WORDS, (length - 1,))
        row[length - 1] = EOS
    return found


@torch.no_grad()
def reference(network):
    # PyTorch's own encoder and decoder with the network's weights.
    config = network.config
    sizes = (config.width, config.heads, config.inner_width)
    same = {"dropout": 0.0, "batch_first": True, "norm_first": config.norm == "pre"}
    ends = [end if isinstance(end, nn.LayerNorm) else None for end in (network.encoder_norm, network.decoder_norm)]
    first = nn.TransformerEncoderLayer(*sizes, **same)
    encoder = nn.TransformerEncoder(first, config.layers, ends[0], enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*sizes, **same), config.layers, ends[1])
    for stack, layers in ((encoder, network.encoder), (decoder, network.decoder)):
        for theirs, ours in zip(stack.layers, layers, strict=True):
            copied = {"linear1": ours.inner, "linear2": ours.outer, "self_attn.out_proj": ours.own.output}
            joined = {"self_attn": [ours.own.joint]}
            if ours.across is not None:
                copied["multihead_attn.out_proj"] = ours.across.output
                joined["multihead_attn"] = [ours.across.query, ours.across.memory]
            copied.update({f"norm{number}": norm for number, norm in enumerate(ours.norms, 1)})
            for name, layer in copied.items():
                theirs.get_submodule(name).load_state_dict(layer.state_dict())
            for name, parts in joined.items():
                theirs.get_submodule(name).in_proj_weight.copy_(torch.cat([each.weight for each in parts]))
                theirs.get_submodule(name).in_proj_bias.copy_(torch.cat([each.bias for each in parts]))
    # Their fast path for inference is another one than what trains.
    return encoder.train(), decoder.train()


@pytest.mark.parametrize("attention", ["fused", "plain"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_logits_and_gradients_are_those_of_pytorchs_modules(norm, attention):
    network = network_of(norm=norm, attention=attention)
    encoder, decoder = reference(network)
    source, target = sentences(9, 4, 7), sentences(5, 8, 2)
    absent = source == PAD
    future = torch.triu(torch.ones(target.shape[1], target.shape[1], dtype=torch.bool), 1)
    memory = encoder(network.embed(source), src_key_padding_mask=absent)
    expected = decoder(network.embed(target), memory, tgt_mask=future, memory_key_padding_mask=absent)
    gradients = []
    for hidden in (expected, network(source, target)):
        logits = hidden @ network.table.weight.t()
        network.zero_grad()
        logits.square().mean().backward()
        gradients.append((logits.detach(), network.table.weight.grad.clone()))
    for theirs, ours in zip(*gradients, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_packed_rows_give_what_padded_ones_do_and_take_no_padding(norm):
    network = network_of(norm=norm).double()
    network.dtype = torch.float64
    source, target = sentences(9, 4, 7, 1), sentences(5, 8, 2, 8)
    rows = [(ids != PAD).flatten().nonzero().squeeze(1) for ids in (source, target)]
    sizes = set()
    hooks = [
        module.register_forward_hook(lambda _, inputs, found: sizes.add(found.shape[:-1].numel()))
        for module in network.modules()
        if isinstance(module, nn.Linear)
    ]
    packed = network(source, target, rows=rows)
    assert sizes == {21, 23}, "tokens of source and target"
    for hook in hooks:
        hook.remove()
    results = []
    for hidden in (packed, network(source, target).flatten(0, 1)[rows[1]]):
        gradients = torch.autograd.grad(hidden.square().sum(), list(network.parameters()))
        results.append([hidden.detach(), *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max()


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-4), ("bf16", 0.2)])
@torch.no_grad()
def test_decoding_with_a_cache_is_decoding_from_the_start(precision, most):
    # Over reorderings of the rows, and after a sentence has left.
    network, source = network_of(precision=precision), sentences(9, 4, 7, 9)
    with pytorch.autocast(source.device, precision):
        state = State.of(network, source, 3)
    tokens, places = torch.full((12, 1), BOS), torch.arange(4)
    for position in range(LONGEST - 1):
        with pytorch.autocast(source.device, precision):
            found = network.next(tokens[:, -1], position, state)
            hidden = network(source[places].repeat_interleave(3, 0), tokens)[:, -1]
            expected = torch.log_softmax((hidden @ network.table.weight.t().to(hidden.dtype)).float(), 1)
        assert (found - expected).abs().max() < most
        kept = torch.arange(len(places)) if position != 5 else torch.tensor([0, 2, 3])
        rows = (kept[:, None] * 3 + torch.randint(3, (len(kept), 3))).reshape(-1)
        state.select(rows)
        places = places[kept]
        tokens = torch.cat((tokens[rows], torch.randint(4, WORDS, (len(rows), 1))), 1)


def test_a_batch_without_much_padding_is_not_packed():
    def batch(*lengths):
        ids = sentences(*lengths)
        rows = (ids != PAD).flatten().nonzero().squeeze(1)
        return Batch(ids, torch.tensor(lengths), ids, ids, rows, len(rows), len(rows), len(ids), source_rows=rows)

    assert packed_rows(batch(9, 9, 9, 6)) is None
    padded = batch(9, 4, 7)
    assert [len(rows) for rows in packed_rows(padded)] == [20, 20]
    network = network_of(precision="fp32")
    other = Network(dataclasses.replace(network.config, packed=False), WORDS).eval()
    other.load_state_dict(network.state_dict())
    losses = [float(each.loss_sum(padded)) for each in (network, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] > 0


def test_a_batch_is_translated_as_its_sentences_are():
    network, source = network_of(), sentences(9, 4, 7, 1, 12)
    lengths = (source != PAD).sum(1)
    together = decode(network, WORDS, SourceBatch(np.arange(5), source, lengths))
    alone = []
    for row, length in zip(source, lengths, strict=True):
        alone += decode(network, WORDS, SourceBatch(np.arange(1), row[None, :length], length[None]))
    assert together == alone and len({len(each) for each in together}) > 1
