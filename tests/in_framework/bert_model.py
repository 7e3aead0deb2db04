"""BERT next to a float64 reference of its equations, with Hugging Face's names; prints the largest errors.

The reference pads, has a table of heads instead of one product, and multiplies the vocabulary at every place; autograd
does the rest. With --hugging-face it is transformers.BertForPreTraining itself, where that is installed.
"""

import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from benchmarks.bert import noise
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import part_of, permuted
from benchmarks.bert.pytorch.model import Network, decay_of
from benchmarks.common.data.problem import Problem
from benchmarks.language import arrays
from benchmarks.language.pytorch import attention, checkpoint
from benchmarks.language.pytorch.encoder import Encoder, Shape

ENTRIES, LONGEST = 101, 24
SHAPE = Shape(3, 32, 4, 48, 104, LONGEST, dropout=0.0, attention_dropout=0.0, gelu="erf")


def samples(count=9):
    found = noise.sample_arrays(count, LONGEST, 4, ENTRIES)
    return arrays.Samples(*(found[name].astype(dtype) for name, dtype in arrays.ARRAYS.items()))


def drawn(shape, attention_name):
    """A network whose biases and layer norms are not those of a fresh one."""
    torch.manual_seed(4)
    network = Network(shape, attention_name).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def norm(x, w, name):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-12) * w[f"{name}.weight"] + w[f"{name}.bias"]


def product(x, w, name):
    return x @ w[f"{name}.weight"].t() + w[f"{name}.bias"]


def gelu(x, kind):
    if kind == "erf":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference(w, shape, tokens, segments, there):
    """Logits (B, length, vocabulary) and (B, 2) by the equations of arXiv 1810.04805 and 1706.03762."""
    names = "bert.embeddings."
    x = w[f"{names}word_embeddings.weight"][tokens] + w[f"{names}token_type_embeddings.weight"][segments]
    x = norm(x + w[f"{names}position_embeddings.weight"][: tokens.shape[1]], w, f"{names}LayerNorm")
    size = shape.width // shape.heads
    for number in range(shape.layers):
        layer = f"bert.encoder.layer.{number}."
        q, k, v = (product(x, w, f"{layer}attention.self.{name}") for name in ("query", "key", "value"))
        heads = []
        for head in range(shape.heads):
            part = slice(head * size, (head + 1) * size)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(size)
            scores = scores.masked_fill(~there[:, None, :], -math.inf)
            heads.append(torch.softmax(scores, -1) @ v[..., part])
        x = norm(
            x + product(torch.cat(heads, -1), w, f"{layer}attention.output.dense"),
            w,
            f"{layer}attention.output.LayerNorm",
        )
        inner = gelu(product(x, w, f"{layer}intermediate.dense"), shape.gelu)
        x = norm(x + product(inner, w, f"{layer}output.dense"), w, f"{layer}output.LayerNorm")
    head = norm(
        gelu(product(x, w, "cls.predictions.transform.dense"), shape.gelu), w, "cls.predictions.transform.LayerNorm"
    )
    words = head @ w[f"{names}word_embeddings.weight"].t() + w["cls.predictions.bias"]
    pooled = torch.tanh(product(x[:, 0], w, "bert.pooler.dense"))
    return words, product(pooled, w, "cls.seq_relationship")


def of_hugging_face(w, shape, tokens, segments, there):
    """The same of transformers' own model; its weights are those of ``w``, and its gradients go there."""
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertForPreTraining

    config = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner_width,
        hidden_act="gelu" if shape.gelu == "erf" else "gelu_new",
        max_position_embeddings=shape.positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = BertForPreTraining(config).double()
    given = {**w, "cls.predictions.decoder.weight": w["bert.embeddings.word_embeddings.weight"]}
    given["cls.predictions.decoder.bias"] = w["cls.predictions.bias"]
    known = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    found = torch.func.functional_call(
        model,
        {name: each for name, each in given.items() if name in known},
        kwargs={"input_ids": tokens, "token_type_ids": segments, "attention_mask": there.long()},
    )
    return found.prediction_logits, found.seq_relationship_logits


def compare(shape, attention_name, other):
    """The largest errors of logits, losses and gradients, as shares of the largest value."""
    network = drawn(shape, attention_name)
    part = part_of(samples(), np.arange(9))
    rows = part.rows
    lengths = (rows.offsets[1:] - rows.offsets[:-1]).tolist()
    there = torch.arange(LONGEST) < torch.tensor(lengths)[:, None]
    wide = [attention.pad(each, there) for each in (rows.tokens, rows.segments)]
    w = {name: t.clone().requires_grad_() for name, t in checkpoint.places_of(network.state_dict()).items()}
    words, follows = other(w, shape, *wide, there)
    labels = torch.full((len(rows.tokens),), -1)
    labels[part.masked] = part.labels
    chosen = words[there][labels >= 0]
    # The order of places in a row is that of the padded batch.
    losses = (
        functional.nll_loss(torch.log_softmax(chosen, -1), labels[labels >= 0], reduction="sum"),
        functional.nll_loss(torch.log_softmax(follows, -1), part.next, reduction="sum"),
    )
    ours = network(rows, part.masked)
    # losses() computes in float32, as a run does.
    mine = (
        functional.cross_entropy(ours[0], part.labels, reduction="sum"),
        functional.cross_entropy(ours[1], part.next, reduction="sum"),
    )
    (0.3 * losses[0] + 0.7 * losses[1]).backward()
    (0.3 * mine[0] + 0.7 * mine[1]).backward()
    gradients = checkpoint.places_of({name: each.grad for name, each in network.named_parameters()})
    # The gradient of the keys' bias is 0: what is there is rounding.
    least = 1e-6 * max(float(each.grad.abs().max()) for each in w.values())
    reported = network.losses(part)
    return {
        "logits": max(distance(*each) for each in zip(ours, (chosen, follows))),
        "losses": max(distance(*each) for each in zip(mine, losses)),
        "reported": max(distance(each.double(), its) for each, its in zip(reported, losses)),
        "gradients": max(distance(gradients[name], w[name].grad, least) for name in w),
        "tensors": len(w),
    }


def distance(ours, theirs, least=0.0):
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(least))


def refused(call):
    try:
        call()
    except Problem as problem:
        return str(problem)
    return ""


def decayed(network, kinds):
    """Elements with weight decay: ours, and by the grouping of v0.7's run_pretraining.py of the names of each kind."""
    found = {}
    for kind, named in kinds.items():
        config = Config(attention_norm_decay=kind == "fused_mha")
        ours = sum(each.numel() for name, each in network.named_parameters() if decay_of(name, config))
        once = {
            name: each for name, each in named.items() if "position_ids" not in name and "decoder.weight" not in name
        }
        without = ("bias", "gamma", "beta", "LayerNorm")
        found[kind] = [ours, sum(each.numel() for name, each in once.items() if not any(no in name for no in without))]
    return found


def files(folder):
    """What reads back from files of each kind, and what is said of those that do not fit."""
    network = drawn(SHAPE, "grouped").float()
    weights = checkpoint.places_of(network.state_dict())
    theirs = {name: each.clone() for name, each in weights.items()}
    theirs["bert.embeddings.position_ids"] = torch.arange(LONGEST)[None]
    theirs["cls.predictions.decoder.weight"] = theirs["bert.embeddings.word_embeddings.weight"]
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): each for name, each in theirs.items()}
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): each for name, each in old.items()}
    nvidia = {
        name.replace(".self.query.", ".multi_head_attention.q_")
        .replace(".self.key.", ".multi_head_attention.k_")
        .replace(".self.value.", ".multi_head_attention.v_")
        .replace("attention.output.dense.", "attention.multi_head_attention.out_proj_")
        .replace("attention.output.LayerNorm.", "attention.layer_norm."): each
        for name, each in theirs.items()
    }
    found = {"decayed": decayed(network, {"unpad": theirs, "fused_mha": nvidia})}
    kinds = {
        "hugging face": theirs,
        "old names": old,
        "nvidia": {"model": nvidia},
        "own": {"content": {"network": network.state_dict()}},
    }
    for kind, content in kinds.items():
        path = folder / "weights.pt"
        torch.save(content, str(path))
        other = Network(SHAPE, "grouped")
        checkpoint.fill(checkpoint.places_of(other.state_dict()), checkpoint.read(path), path)
        encoder = Encoder(SHAPE)
        checkpoint.load_weights(encoder, path)
        found[kind] = all(map(torch.equal, network.state_dict().values(), other.state_dict().values())) and all(
            map(torch.equal, network.encoder.state_dict().values(), encoder.state_dict().values())
        )
    torch.save({name: each for name, each in theirs.items() if ".layer.2." not in name}, str(folder / "two.pt"))
    (folder / "text.pt").write_text("no weights")
    wider, larger = (dataclasses.replace(SHAPE, **size) for size in ({"inner_width": 64}, {"vocabulary": 120}))
    found["missing"] = refused(lambda: checkpoint.load_weights(Encoder(SHAPE), folder / "two.pt"))
    fewer = dataclasses.replace(SHAPE, layers=2)
    found["unexpected"] = refused(lambda: checkpoint.load_weights(Encoder(fewer), folder / "weights.pt"))
    found["shapes"] = refused(lambda: checkpoint.load_weights(Encoder(wider), folder / "weights.pt"))
    found["vocabulary"] = refused(lambda: checkpoint.load_weights(Encoder(larger), folder / "weights.pt"))
    found["text"] = refused(lambda: checkpoint.read(folder / "text.pt"))
    # Published tables of words have no padding.
    short = {**theirs, checkpoint.WORDS: theirs[checkpoint.WORDS][:ENTRIES]}
    torch.save(short, str(folder / "short.pt"))
    encoder = Encoder(SHAPE)
    checkpoint.load_weights(encoder, folder / "short.pt")
    found["padding"] = float(encoder.words.weight.detach()[ENTRIES:].abs().max())
    return found


def orders():
    """The random order of an epoch for sizes around powers of two."""
    sizes = (1, 2, 3, 63, 64, 65, 1000)
    whole = [sorted(permuted(np.arange(size), size, 1, 0).tolist()) == list(range(size)) for size in sizes]
    first, second = (permuted(np.arange(1000), 1000, 1, epoch) for epoch in (0, 1))
    parts = np.concatenate([permuted(np.arange(a, a + 100), 1000, 1, 0) for a in range(0, 1000, 100)])
    return {
        "permutations": all(whole),
        "fixed": int((first == np.arange(1000)).sum() + (first == second).sum()),
        "by parts": bool((parts == first).all()),
        "neighbours": float(np.abs(np.diff(first)).mean()),
    }


def main():
    other = of_hugging_face if "--hugging-face" in sys.argv else reference
    found = {
        f"{name} {kind}": compare(dataclasses.replace(SHAPE, gelu=kind), name, other)
        for name in ("grouped", "padded")
        for kind in ("erf", "tanh")
    }
    right = attention.difference(attention.grouped, torch.device("cpu"), torch.float64, 16)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"errors": found, "files": files(Path(folder)), "orders": orders(), "grouped": right}))


if __name__ == "__main__":
    main()
