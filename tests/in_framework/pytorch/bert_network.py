"""BERT next to a float64 reference of its equations: network, loss, rows of certain lengths, graphs, FP8, weights.

The reference pads, has a table of heads instead of one product, and multiplies the vocabulary at every place; autograd
does the rest.
"""

import contextlib
import dataclasses
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.bert import noise
from benchmarks.bert.pytorch import data
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import filled, part_of, permuted, shares, weighted
from benchmarks.bert.pytorch.model import Network, decay_of
from benchmarks.bert.pytorch.train import Training, flat_optimizer, train_step
from benchmarks.common.data.problem import Problem
from benchmarks.common.run.ranks import Ranks
from benchmarks.language import ARRAYS, arrays
from benchmarks.language.pytorch import checkpoint, fp8
from benchmarks.language.pytorch.encoder import Encoder, Shape
from benchmarks.language.pytorch.graphs import captured
from benchmarks.language.tensorflow_files import Bundle
from tests.in_framework.held import Held

ENTRIES, LONGEST = 101, 24
SHAPE = Shape(3, 32, 4, 48, 104, LONGEST, dropout=0.0, attention_dropout=0.0, gelu="erf")
CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
CONFIG = Config(
    device="cpu", precision="fp32", layers=2, width=64, heads=4, inner_width=48, positions=20, dropout=0.0,
    attention_dropout=0.0, gradient_clip=0.0, optimizer_kernel="fused", batch_size=8, accumulation=2, seed=5,
    token_bucket=16,
)  # fmt: skip
CHECKPOINT = Path(__file__).parents[2] / "samples" / "bert_checkpoint"


def samples(count=9, longest=LONGEST, entries=ENTRIES):
    found = noise.sample_arrays(count, longest, 4, entries)
    return arrays.Samples(*(found[name].astype(dtype) for name, dtype in ARRAYS.items()))


def initialized(shape, attention_name="grouped"):
    # A network whose biases and layer norms are not those of a fresh one.
    torch.manual_seed(4)
    network = Network(shape, attention_name).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def norm(x, w, name):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-12)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x, kind):
    # arXiv 1606.08415: x times the normal distribution's function, and its approximation.
    if kind == "erf":
        return x / 2 * (1 + torch.erf(x / math.sqrt(2)))
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def product(x, w, name):
    return x @ w[f"{name}.weight"].t() + w[f"{name}.bias"]


def reference(w, shape, tokens, segments, there):
    # Logits (B, length, vocabulary) and (B, 2) by the equations of arXiv 1810.04805 and 1706.03762.
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
            heads.append(torch.softmax(scores.masked_fill(~there[:, None, :], -math.inf), -1) @ v[..., part])
        attended = product(torch.cat(heads, -1), w, f"{layer}attention.output.dense")
        x = norm(x + attended, w, f"{layer}attention.output.LayerNorm")
        inner = gelu(product(x, w, f"{layer}intermediate.dense"), shape.gelu)
        x = norm(x + product(inner, w, f"{layer}output.dense"), w, f"{layer}output.LayerNorm")
    head = gelu(product(x, w, "cls.predictions.transform.dense"), shape.gelu)
    head = norm(head, w, "cls.predictions.transform.LayerNorm")
    words = head @ w[f"{names}word_embeddings.weight"].t() + w["cls.predictions.bias"]
    pooled = torch.tanh(product(x[:, 0], w, "bert.pooler.dense"))
    return words, product(pooled, w, "cls.seq_relationship")


def hugging_face(w, shape, tokens, segments, there):
    # The same of transformers' own model, where that is installed; its gradients go to ``w``.
    bert = pytest.importorskip("transformers.models.bert")
    config = bert.BertConfig(
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
    model = bert.BertForPreTraining(config).double()
    given = {**w, "cls.predictions.decoder.weight": w["bert.embeddings.word_embeddings.weight"]}
    given["cls.predictions.decoder.bias"] = w["cls.predictions.bias"]
    known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    found = torch.func.functional_call(
        model,
        {name: each for name, each in given.items() if name in known},
        kwargs={"input_ids": tokens, "token_type_ids": segments, "attention_mask": there.long()},
    )
    return found.prediction_logits, found.seq_relationship_logits


def distance(ours, theirs, least=0.0):
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(least))


@pytest.mark.parametrize("kind", ["erf", "tanh"])
@pytest.mark.parametrize("implementation", ["grouped", "padded"])
@pytest.mark.parametrize("other", [reference, hugging_face])
def test_network_and_loss_are_the_equations(other, implementation, kind):
    shape = dataclasses.replace(SHAPE, gelu=kind)
    network = initialized(shape, implementation)
    batch = part_of(samples(), np.arange(9))._replace(weights=torch.tensor([0.3, 0.7], dtype=torch.float64))
    rows = batch.rows
    there = torch.arange(LONGEST) < (rows.offsets[1:] - rows.offsets[:-1])[:, None]
    wide = [torch.zeros(there.shape, dtype=each.dtype) for each in (rows.tokens, rows.segments)]
    for table, each in zip(wide, (rows.tokens, rows.segments)):
        table[there] = each
    w = {name: t.clone().requires_grad_() for name, t in checkpoint.places_of(network.state_dict()).items()}
    words, follows = other(w, shape, *wide, there)
    labels = torch.full((len(rows.tokens),), -1)
    labels[batch.masked] = batch.labels
    # The order of places in a row is that of the padded batch.
    chosen = words[there][labels >= 0]
    masked = functional.nll_loss(torch.log_softmax(chosen, -1), labels[labels >= 0], reduction="sum")
    loss = 0.3 * masked + 0.7 * functional.nll_loss(torch.log_softmax(follows, -1), batch.next, reduction="sum")
    loss.backward()
    ours = network(rows, batch.masked)
    assert max(distance(*each) for each in zip(ours, (chosen, follows))) < 1e-12
    mine = network.loss(batch)
    assert distance(mine, loss) < 1e-6, "in float32, as a run"
    # The gradients of the loss in float64: a run's are those of float32.
    sums = [functional.cross_entropy(a, b, reduction="sum") for a, b in zip(ours, (batch.labels, batch.next))]
    (0.3 * sums[0] + 0.7 * sums[1]).backward()
    gradients = checkpoint.places_of({name: each.grad for name, each in network.named_parameters()})
    # The gradient of the keys' bias is 0: what is there is rounding.
    least = 1e-6 * max(float(each.grad.abs().max()) for each in w.values())
    assert len(w) == 5 + 16 * 3 + 9
    assert max(distance(gradients[name], each.grad, least) for name, each in w.items()) < 1e-9


# -- weights -----------------------------------------------------------------------------------------------


def renamed(names, *pairs):
    for old, new in pairs:
        names = {name.replace(old, new): each for name, each in names.items()}
    return names


def published(network):
    # Weights by the names of Hugging Face's files, and by those of NVIDIA's submission with fused_mha.
    theirs = {name: each.clone() for name, each in checkpoint.places_of(network.state_dict()).items()}
    theirs["bert.embeddings.position_ids"] = torch.arange(LONGEST)[None]
    theirs["cls.predictions.decoder.weight"] = theirs["bert.embeddings.word_embeddings.weight"]
    own = [(f".self.{name}.", f".multi_head_attention.{name[0]}_") for name in ("query", "key", "value")]
    out = ("attention.output.dense.", "attention.multi_head_attention.out_proj_")
    return theirs, renamed(theirs, *own, out, ("attention.output.LayerNorm.", "attention.layer_norm."))


def test_weights_of_every_origin_are_read(tmp_path):
    network = initialized(SHAPE).float()
    theirs, nvidia = published(network)
    old = renamed(theirs, ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    path = tmp_path / "weights.pt"
    for content in (theirs, old, {"model": nvidia}, {"content": {"network": network.state_dict()}}):
        torch.save(content, str(path))
        other, encoder = Network(SHAPE, "grouped"), Encoder(SHAPE)
        checkpoint.fill(checkpoint.places_of(other.state_dict()), checkpoint.read(path), path)
        checkpoint.load_weights(encoder, path)
        assert all(map(torch.equal, network.state_dict().values(), other.state_dict().values()))
        assert all(map(torch.equal, network.encoder.state_dict().values(), encoder.state_dict().values()))
    # Published tables of words have no padding.
    torch.save({**theirs, checkpoint.WORDS: theirs[checkpoint.WORDS][:ENTRIES]}, str(path))
    checkpoint.load_weights(encoder, path)
    assert not encoder.words.weight[ENTRIES:].any()


def test_weights_decay_as_submitted():
    # With fused_mha the attentions' layer norms have a name that the submitted grouping misses: their scales decay.
    network = initialized(SHAPE)
    found = {}
    for kind, named in zip(("unpad", "fused_mha"), published(network)):
        config = Config(attention_norm_decay=kind == "fused_mha")
        found[kind] = sum(each.numel() for name, each in network.named_parameters() if decay_of(name, config))
        skipped = ("bias", "gamma", "beta", "LayerNorm", "position_ids", "decoder.weight")
        assert found[kind] == sum(each.numel() for n, each in named.items() if not any(no in n for no in skipped))
    assert found["fused_mha"] - found["unpad"] == 3 * 32, "a scale a layer"


def test_weights_that_do_not_fit_are_named(tmp_path):
    theirs, _ = published(initialized(SHAPE).float())
    torch.save(theirs, str(tmp_path / "whole.pt"))
    torch.save({name: each for name, each in theirs.items() if ".layer.2." not in name}, str(tmp_path / "two.pt"))
    (tmp_path / "text.pt").write_text("no weights")
    for file, sizes, words in (
        ("two.pt", {}, "bert.encoder.layer.2.attention.self.key.weight is missing"),
        ("whole.pt", {"layers": 2}, "bert.encoder.layer.2.attention.self.key.weight is unexpected"),
        ("whole.pt", {"inner_width": 64}, "0.intermediate.dense.weight has [48, 32] instead of [64, 32]"),
        ("whole.pt", {"vocabulary": 120}, "word_embeddings.weight has [104, 32] instead of [120, 32]"),
        ("text.pt", {}, "cannot be read as weights"),
    ):
        with pytest.raises(Problem) as found:
            checkpoint.load_weights(Encoder(dataclasses.replace(SHAPE, **sizes)), tmp_path / file)
        counted = [str(found.value).count(each) for each in ("is missing", "is unexpected", " instead of ")]
        assert words in str(found.value) and found.value.hint
        assert counted in ([16, 0, 0], [0, 16, 0], [0, 0, 9], [0, 0, 1], [0, 0, 0])


def written(name, shape):
    # What the Saver of TensorFlow 1's interface wrote for a name.
    return np.asarray(np.random.RandomState(sum(name.encode())).randn(*shape), np.float32)


def test_tensorflows_checkpoint_is_read_without_tensorflow():
    index = CHECKPOINT / "model.ckpt-3.index"
    bundle = Bundle(index)
    assert len(bundle.entries) == 48
    for name, entry in bundle.entries.items():
        assert np.array_equal(bundle.read(name), written(name, entry.shape)), name
    network = Network(Shape(2, 8, 2, 16, 24, 8), "grouped")
    checkpoint.fill(checkpoint.places_of(network.state_dict()), checkpoint.read(index), index)
    query = written("bert/encoder/layer_1/attention/self/query/kernel", (8, 8))
    assert np.array_equal(network.encoder.layers[1].qkv.weight[:8].detach().numpy(), query.T)


@pytest.mark.parametrize("damage", ["data", "index", "short", "gone"])
def test_damaged_checkpoint_of_tensorflow_is_refused(damage, tmp_path):
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "copy"))
    path = folder / ("model.ckpt-3.index" if damage in ("index", "short") else "model.ckpt-3.data-00000-of-00001")
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(b"none" if damage == "short" else bytes(content))
    if damage == "gone":
        path.unlink()
    with pytest.raises(Problem) as found:
        checkpoint.read(folder / "model.ckpt-3.index")
    assert found.value.hint == "copy all files of the checkpoint again"
    assert ("differs from its checksum" in found.value.found) == (damage in ("data", "index"))


# -- order, shares, rows -----------------------------------------------------------------------------------


def test_every_sample_comes_once_in_each_epoch_in_another_order():
    for size in (1, 2, 3, 63, 64, 65, 1000):
        assert sorted(permuted(np.arange(size), size, 1, 0).tolist()) == list(range(size))
    first, second = (permuted(np.arange(1000), 1000, 1, epoch) for epoch in (0, 1))
    parts = np.concatenate([permuted(np.arange(a, a + 100), 1000, 1, 0) for a in range(0, 1000, 100)])
    assert (parts == first).all()
    assert (first == np.arange(1000)).sum() + (first == second).sum() < 10
    assert 250 < np.abs(np.diff(first)).mean() < 420, "a third of 1,000 in a random order"


def test_samples_are_dealt_out_evenly():
    lengths = np.diff(noise.sample_arrays(4096, 512, 76, 1000)["offsets"])[:256]
    dealt, unsorted = shares(lengths, 8), np.arange(256).reshape(8, -1)
    assert sorted(dealt.flatten().tolist()) == list(range(256))
    most = [lengths[each].sum(1).max() / lengths[each].sum(1).mean() for each in (dealt, unsorted)]
    assert most[0] < 1.005 and most[1] > 1.05


def micro_batch(number=0):
    chosen = part_of(samples(64, 20, 61), np.arange(4 * number, 4 * number + 4))
    return weighted(chosen, CONFIG, CPU, len(chosen.labels))


def gradients(training, given, step=None):
    # Loss and gradients of a micro-batch.
    training.optimizer.gradients.zero_()
    loss = (step or training.micro_step)(given)
    return [loss.clone(), training.optimizer.gradients.clone()]


def largest(ours, theirs):
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("implementation", ["grouped", "padded"])
def test_filled_rows_train_like_those_without_padding(implementation):
    training = Training(dataclasses.replace(CONFIG, attention=implementation), 61, CPU)
    plain = [micro_batch(number) for number in range(16)]
    full = [filled(each, CONFIG) for each in plain]
    for a, b in zip(plain, full):
        assert largest(gradients(training, b), gradients(training, a)) < 1e-6
        # A CPU's product of more rows may add in another order.
        assert training.network.figures(a).tolist() == pytest.approx(training.network.figures(b).tolist(), rel=1e-6)
    assert sorted({len(each.rows.tokens) for each in full}) == [48, 64, 80]
    assert 0 < max(len(b.rows.tokens) - len(a.rows.tokens) for a, b in zip(plain, full)) < 16
    nothing_missing = data.filled_to(plain[0], len(plain[0].rows.tokens), CONFIG)
    assert largest(gradients(training, nothing_missing), gradients(training, plain[0])) < 1e-6


def test_a_step_by_graphs_is_the_plain_one():
    Held.made.clear()
    config = SimpleNamespace(**{**dataclasses.asdict(CONFIG), "fills_rows": True, "warm_up_steps": 1})
    training = Training(CONFIG, 61, CPU)
    step = captured(
        training.micro_step, lambda tokens: data.synthetic_batch(config, 61, CPU, tokens)[0], 80, 16, 1, Held
    )
    for number in range(16):
        given = filled(micro_batch(number), CONFIG)
        assert largest(gradients(training, given, step), gradients(training, given)) == 0.0
    assert [len(graph.held[0]) for graph in Held.made] == [80, 64, 48, 32], "the longest first, down to a quarter"
    assert [graph.pool_of is Held.made[0] for graph in Held.made] == [False, True, True, True]
    assert sum(graph.replays for graph in Held.made) == 16
    crowded = micro_batch()._replace(masked=torch.zeros(40, dtype=torch.int64), labels=torch.ones(40, dtype=torch.long))
    gradients(training, filled(crowded, CONFIG), step)
    assert sum(graph.replays for graph in Held.made) == 16, "what has too many masked words goes without a graph"


# -- FP8 ---------------------------------------------------------------------------------------------------


class FakeLinear(nn.Linear):
    # What transformer_engine.pytorch.Linear is asked for; its GEMMs are rounded to FP8.

    inside = False

    def __init__(self, inputs, outputs, *, bias, params_dtype, device, return_bias):
        super().__init__(inputs, outputs, bias=bias, dtype=params_dtype, device=device)
        self.return_bias = return_bias

    def forward(self, hidden):
        assert FakeLinear.inside, "no FP8 outside of fp8_autocast"
        assert hidden.shape[0] % 16 == 0, "FP8 takes rows of a multiple of 16"
        rounded = [
            (each + (each.to(torch.float8_e4m3fn).to(each.dtype) - each).detach()) for each in (hidden, self.weight)
        ]
        found = nn.functional.linear(*rounded)
        return (found, self.bias) if self.return_bias else found + self.bias


@contextlib.contextmanager
def fp8_autocast(enabled, fp8_recipe):
    FakeLinear.inside = enabled and fp8_recipe["fp8_format"] == "E4M3 and E5M2"
    yield
    FakeLinear.inside = False


def test_fp8_is_used_where_it_is_found_and_refused_elsewhere(monkeypatch):
    recipes = SimpleNamespace(DelayedScaling=dict, Format=SimpleNamespace(HYBRID="E4M3 and E5M2"))
    engine = SimpleNamespace(Linear=FakeLinear, fp8_autocast=fp8_autocast)
    config = SimpleNamespace(
        **{**dataclasses.asdict(CONFIG), "fp8": "transformer_engine", "fills_rows": True, "token_bucket": 32}
    )
    batch = [data.ready(micro_batch(number), config, CPU, 10) for number in range(2)]
    plain, rounded = (Training(CONFIG, 61, CPU) for _ in range(2))
    rounded.in_fp8 = fp8.use(rounded.network.encoder, (engine, recipes))
    rounded.optimizer = flat_optimizer(rounded.network, rounded.config, CPU, "fused")
    names = [[name for name, _ in each.network.named_parameters()] for each in (plain, rounded)]
    assert names[0] == names[1], "a checkpoint fits with and without"
    losses = [[float(train_step(each, batch, 0.01)) for _ in range(10)] for each in (plain, rounded)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3) and losses[1] != losses[0]
    assert losses[1][-1] < 0.9 * losses[1][0]
    with pytest.raises(Problem, match=r"no TransformerEngine in this Python(.|\n)*hint: set fp8=none"):
        fp8.find("nowhere.pytorch")
    engine.fp8 = SimpleNamespace(check_fp8_support=lambda: (False, "compute capability 9.x is needed"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)
    with pytest.raises(Problem, match=r"compute capability 9.x is needed(.|\n)*hint: set fp8=none"):
        fp8.find()
