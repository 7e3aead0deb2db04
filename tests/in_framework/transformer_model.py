"""The Transformer against torch.nn.Transformer's parts with the same weights, and its decoding against itself."""

import dataclasses
import json

import torch
from torch import nn

from benchmarks.common.frameworks import pytorch
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.model import Network, State
from benchmarks.transformer.pytorch.search import translate_batch
from benchmarks.translation.vocabulary import BOS, EOS, PAD

CONFIG = Config(
    device="cpu",
    precision="fp32",
    layers=3,
    width=48,
    heads=4,
    inner_width=80,
    attention_bias=True,
    dropout=0.0,
    attention_dropout=0.0,
    relu_dropout=0.0,
)
WORDS, LONGEST, BEAM = 61, 24, 3


def network_of(**changes):
    """A network whose weights are all drawn, norms and biases too."""
    torch.manual_seed(11)
    network = Network(dataclasses.replace(CONFIG, **changes), WORDS).eval()
    for parameter in network.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
    return network


def sentences(*lengths):
    """int64 (sentences, longest): drawn tokens with EOS, then PAD."""
    found = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(found, lengths):
        row[: length - 1] = torch.randint(4, WORDS, (length - 1,))
        row[length - 1] = EOS
    return found


def copy_attention(attention, other):
    """Give ``other``, an nn.MultiheadAttention, the weights of ours."""
    joined = (attention.query, attention.memory) if attention.across else (attention.joint,)
    other.in_proj_weight.copy_(torch.cat([each.weight for each in joined]))
    other.in_proj_bias.copy_(torch.cat([each.bias for each in joined]))
    other.out_proj.load_state_dict(attention.output.state_dict())


@torch.no_grad()
def reference(network):
    """PyTorch's own encoder and decoder with the network's weights."""
    config = network.config
    same = {"dropout": 0.0, "batch_first": True, "norm_first": config.norm == "pre"}
    sizes = (config.width, config.heads, config.inner_width)
    ends = network.encoder_norm, network.decoder_norm
    ends = [end if isinstance(end, nn.LayerNorm) else None for end in ends]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(*sizes, **same), config.layers, ends[0], enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*sizes, **same), config.layers, ends[1])
    for stack, layers in ((encoder, network.encoder), (decoder, network.decoder)):
        for theirs, ours in zip(stack.layers, layers):
            copy_attention(ours.own, theirs.self_attn)
            if ours.across is not None:
                copy_attention(ours.across, theirs.multihead_attn)
            for name, layer in (("linear1", ours.inner), ("linear2", ours.outer)):
                getattr(theirs, name).load_state_dict(layer.state_dict())
            for number, norm in enumerate(ours.norms, 1):
                getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())
    # Their fast path for inference is another one than what trains.
    return encoder.train(), decoder.train()


def parity(norm, attention):
    """Largest difference of logits and of the table's gradient."""
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
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*gradients)]


@torch.no_grad()
def cached(precision):
    """Largest difference between log-probabilities with and without the cache, over some reorderings of the rows."""
    network = network_of(precision=precision)
    source = sentences(9, 4, 7, 9)
    with pytorch.autocast(source.device, precision):
        state = State.of(network, source, BEAM)
    tokens, most = torch.full((len(source) * BEAM, 1), BOS), 0.0
    places = torch.arange(len(source))
    for position in range(LONGEST - 1):
        with pytorch.autocast(source.device, precision):
            found = network.next(tokens[:, -1], position, state)
            hidden = network(source[places].repeat_interleave(BEAM, 0), tokens)[:, -1]
            expected = torch.log_softmax((hidden @ network.table.weight.t().to(hidden.dtype)).float(), 1)
        most = max(most, float((found - expected).abs().max()))
        kept = torch.arange(len(places)) if position != 5 else torch.tensor([0, 2, 3])
        rows = (kept[:, None] * BEAM + torch.randint(BEAM, (len(kept), BEAM))).reshape(-1)
        state.select(rows)
        places = places[kept]
        tokens = torch.cat((tokens[rows], torch.randint(4, WORDS, (len(rows), 1))), 1)
    return most


def batched():
    """Whether sentences translate alike in one batch and alone."""
    network = network_of(beam=BEAM, longest_offset=6)
    source = sentences(9, 4, 7, 1, 12)
    lengths = (source != PAD).sum(1)
    together = translate_batch(network, source, lengths, WORDS)
    alone = []
    for row, length in zip(source, lengths):
        alone += translate_batch(network, row[None, :length], length[None], WORDS)
    return together == alone and len({len(each) for each in together}) > 1


def main():
    found = {
        "logits and gradient": {
            f"{norm} {attention}": parity(norm, attention)
            for norm in ("pre", "post")
            for attention in ("fused", "plain")
        },
        "cached": {precision: cached(precision) for precision in ("fp32", "bf16")},
        "batched is single": batched(),
    }
    print(json.dumps(found))


main()
