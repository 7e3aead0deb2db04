"""BERT and BERT on SQuAD on one rank: recorded values, weights, input order, padded rows, graphs, LAMB, attention."""

import copy
import dataclasses
import math
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from benchmarks.bert import noise
from benchmarks.bert.pytorch import data, model, train
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert_squad.arrays import Windows
from benchmarks.bert_squad.pytorch import data as squad_data
from benchmarks.bert_squad.pytorch import train as squad
from benchmarks.bert_squad.pytorch.config import Config as SquadConfig
from benchmarks.bert_squad.schedule import learning_rate
from benchmarks.common.data.problem import Problem
from benchmarks.common.run import choices
from benchmarks.common.torch import flat_optimizer, lamb
from benchmarks.language import ARRAYS, arrays, tensorflow_files
from benchmarks.language.pytorch import attention, checkpoint
from benchmarks.language.pytorch.encoder import Encoder, Shape
from benchmarks.language.pytorch.graphs import captured
from tests.in_framework.torch_checks import (
    CPU,
    GraphStub,
    compute_gradients,
    gradient_projection,
    projection,
    set_fixed_weights,
)

ENTRIES, LONGEST = 101, 24
SHAPE = Shape(3, 32, 4, 48, 104, LONGEST, dropout=0.0, attention_dropout=0.0, gelu="erf")
CONFIG = Config(
    device="cpu", precision="fp32", layers=2, width=64, heads=4, inner_width=48, positions=20, dropout=0.0,
    attention_dropout=0.0, gradient_clip=0.0, optimizer_kernel="fused", batch_size=8, accumulation=2, seed=5,
    token_bucket=16,
)  # fmt: skip
SQUAD_VOCABULARY = 48
SQUAD = SquadConfig(
    device="cpu", precision="fp32", layers=2, width=16, heads=2, inner_width=32, positions=40, sequence_length=40,
    dropout=0.0, attention_dropout=0.0, batch_size=6, initializer_range=0.2, seed=4,
)  # fmt: skip
CHECKPOINT = Path(__file__).parents[2] / "samples" / "bert_checkpoint"


def samples(count=9, longest=LONGEST, entries=ENTRIES, masked=4):
    content = noise.sample_arrays(count, longest, masked, entries)
    return arrays.Samples(*(content[name].astype(dtype) for name, dtype in ARRAYS.items()))


def fixed_network():
    network = model.Network(SHAPE, "grouped")
    set_fixed_weights(network.parameters(), 0.5)
    return network


@pytest.mark.parametrize("attention", ["grouped", "padded"])
@pytest.mark.parametrize(
    ("gelu", "expected"),
    [
        ("erf", [-11.5253947, -0.6953766038, 38.27766291, -3.236558007]),
        ("tanh", [-11.51377289, -0.696121032, 38.2777633, -3.233553537]),
    ],
)
def test_logits_loss_and_gradients_match_transformers(attention, gelu, expected):
    """BertForPreTraining of transformers 4.57.1 in float64, eager, on padded samples; losses weighted 0.3 and 0.7."""
    network = model.Network(dataclasses.replace(SHAPE, gelu=gelu), attention).double()
    set_fixed_weights(network.parameters(), 0.5)
    batch = data.part_of(samples(), np.arange(9))._replace(weights=torch.tensor([0.3, 0.7], dtype=torch.float64))
    words, follows = network(batch.rows, batch.masked)
    loss = 0.3 * functional.cross_entropy(words, batch.labels, reduction="sum")
    loss += 0.7 * functional.cross_entropy(follows, batch.next, reduction="sum")
    loss.backward()
    values = [projection(words), projection(follows), loss.item(), gradient_projection(network.parameters())]
    assert values == pytest.approx(expected, rel=1e-8)
    assert network.loss(batch).item() == pytest.approx(expected[2], rel=1e-6), "in fp32, as in a run"


def rename(tensors, *pairs):
    for old, new in pairs:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def published_weights(network):
    # Return the weights by the names of Hugging Face's files, and by those of NVIDIA's submission with fused_mha
    tensors = {name: tensor.clone() for name, tensor in checkpoint.published_tensors(network.state_dict()).items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(LONGEST)[None]
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    products = [(f".self.{name}.", f".multi_head_attention.{name[0]}_") for name in ("query", "key", "value")]
    output = ("attention.output.dense.", "attention.multi_head_attention.out_proj_")
    return tensors, rename(tensors, *products, output, ("attention.output.LayerNorm.", "attention.layer_norm."))


def test_weights_of_every_origin_are_read(tmp_path):
    network, path = fixed_network(), tmp_path / "weights.pt"
    published, nvidia = published_weights(network)
    tensorflow = rename(published, ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    for content in (published, tensorflow, {"model": nvidia}, {"content": {"network": network.state_dict()}}):
        torch.save(content, str(path))
        loaded, encoder = model.Network(SHAPE, "grouped"), Encoder(SHAPE)
        checkpoint.fill(checkpoint.published_tensors(loaded.state_dict()), checkpoint.read(path), path)
        checkpoint.load_weights(encoder, path)
        assert all(map(torch.equal, network.state_dict().values(), loaded.state_dict().values()))
        assert all(map(torch.equal, network.encoder.state_dict().values(), encoder.state_dict().values()))
    # Published word embeddings have no padding.
    torch.save({**published, checkpoint.WORDS: published[checkpoint.WORDS][:ENTRIES]}, str(path))
    checkpoint.load_weights(encoder, path)
    assert not encoder.word_embeddings.weight[ENTRIES:].any()


def test_weight_decay_matches_the_submission():
    """The submission skips names with these words; with fused_mha it misses the attention's layer norms."""
    network = fixed_network()
    skipped = ("bias", "gamma", "beta", "LayerNorm", "position_ids", "decoder.weight")
    expected = [
        sum(weight.numel() for name, weight in tensors.items() if not any(word in name for word in skipped))
        for tensors in published_weights(network)
    ]
    counts = [
        sum(w.numel() for name, w in network.named_parameters() if model.decay_of(name, config))
        for config in (Config(attention_norm_decay=False), Config(attention_norm_decay=True))
    ]
    assert counts == expected == [expected[1] - 3 * 32, expected[1]], "one scale in each layer"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 4}, "bert.encoder.layer.3.attention.self.key.weight is missing"),
        ({"layers": 2}, "bert.encoder.layer.2.attention.self.key.weight is unexpected"),
        ({"inner_width": 64}, "0.intermediate.dense.weight has [48, 32] instead of [64, 32]"),
        ({"vocabulary": 120}, "word_embeddings.weight has [104, 32] instead of [120, 32]"),
    ],
)
def test_weights_that_do_not_fit_are_named(sizes, message, tmp_path):
    torch.save(published_weights(fixed_network())[0], tmp_path / "weights.pt")
    with pytest.raises(Problem, match=re.escape(message)):
        checkpoint.load_weights(Encoder(dataclasses.replace(SHAPE, **sizes)), tmp_path / "weights.pt")


def test_tensorflow_checkpoint_is_read_without_tensorflow():
    """The sample was written by the Saver of TensorFlow 1 with these numbers."""

    def written(name, shape):
        return np.asarray(np.random.RandomState(sum(name.encode())).randn(*shape), np.float32)

    index = CHECKPOINT / "model.ckpt-3.index"
    bundle, network = tensorflow_files.Bundle(index), model.Network(Shape(2, 8, 2, 16, 24, 8), "grouped")
    assert len(bundle.entries) == 48
    for name in bundle.entries:
        tensor = bundle.read(name)
        assert np.array_equal(tensor, written(name, tensor.shape)), name
    checkpoint.fill(checkpoint.published_tensors(network.state_dict()), checkpoint.read(index), index)
    query = written("bert/encoder/layer_1/attention/self/query/kernel", (8, 8))
    assert np.array_equal(network.encoder.layers[1].qkv.weight[:8].detach(), query.T)


@pytest.mark.parametrize(
    ("file", "damage"),
    [("data-00000-of-00001", "bit"), ("index", "bit"), ("index", "short"), ("data-00000-of-00001", "missing")],
)
def test_damaged_tensorflow_checkpoint_is_rejected(file, damage, tmp_path):
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "copy"))
    path = folder / f"model.ckpt-3.{file}"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[: 4 if damage == "short" else None])
    words = "differs from its checksum" if damage == "bit" else ""
    with pytest.raises(Problem, match=rf"{words}(.|\n)*copy all files of the checkpoint again"):
        checkpoint.read(folder / "model.ckpt-3.index")


def test_each_epoch_is_another_permutation():
    for size in (1, 2, 3, 63, 64, 65, 1000):
        assert sorted(data.permuted(np.arange(size), size, 1, 0).tolist()) == list(range(size))
    first, second = (data.permuted(np.arange(1000), 1000, 1, epoch) for epoch in (0, 1))
    assert (data.permuted(np.arange(500, 600), 1000, 1, 0) == first[500:600]).all()
    assert (first == np.arange(1000)).sum() + (first == second).sum() < 10
    assert 250 < np.abs(np.diff(first)).mean() < 420, "a third of 1,000 in a random order"


def test_samples_are_balanced_over_ranks():
    lengths = np.diff(noise.sample_arrays(4096, 512, 76, 1000)["offsets"])[:256]
    balanced, unsorted = data.shares(lengths, 8), np.arange(256).reshape(8, -1)
    assert sorted(balanced.flatten().tolist()) == list(range(256))
    imbalance = [lengths[split].sum(1).max() / lengths[split].sum(1).mean() for split in (balanced, unsorted)]
    assert imbalance[0] < 1.005 and imbalance[1] > 1.05


def micro_batch(number=0):
    part = data.part_of(samples(64, 20, 61), np.arange(4 * number, 4 * number + 4))
    return data.weighted(part, CONFIG, CPU, len(part.labels))


def assert_padding_changes_nothing(training, step, pairs):
    # Compare losses and gradients of padded rows with those without padding
    for padded, part in pairs:
        results, expected = (compute_gradients(training, step, batch) for batch in (padded, part))
        for tensor, reference in zip(results, expected, strict=True):
            assert float((tensor - reference).abs().max() / reference.abs().max()) < 1e-6


@pytest.mark.parametrize("attention", ["grouped", "padded"])
def test_padded_rows_train_like_those_without_padding(attention):
    training = train.Training(dataclasses.replace(CONFIG, attention=attention), 61, CPU)
    pairs = [(data.filled(part, CONFIG), part) for part in map(micro_batch, range(16))]
    assert_padding_changes_nothing(training, training.micro_step, pairs)
    for padded, part in pairs:
        # A GEMM of more rows may add in another order.
        torch.testing.assert_close(training.network.figures(padded), training.network.figures(part), rtol=1e-6, atol=0)
    assert {len(row.rows.tokens) for row, _ in pairs} == {48, 64, 80}


def test_warm_up_compiles_training_and_evaluation(monkeypatch):
    graphs = []
    backend = {"backend": lambda graph, inputs: graphs.append(graph) or graph}
    torch._dynamo.reset()  # graphs of other tests count towards the recompile limit
    monkeypatch.setattr(torch, "compile", partial(torch.compile, **backend))
    config = dataclasses.replace(CONFIG, attention="padded", warm_up_steps=1)
    object.__setattr__(config, "compile", True)  # not accepted on a CPU
    training = train.Training(config, 61, CPU)
    train.warm_up(training)
    compiled = len(graphs)
    for part in map(micro_batch, range(4)):
        training.micro_step(part)
        training.network.eval()
        train.evaluation_sums(training, part)
        training.network.train()
    assert len(graphs) == compiled > 0


def test_step_with_graphs_equals_the_eager_one():
    GraphStub.instances.clear()
    config = SimpleNamespace(**{**dataclasses.asdict(CONFIG), "fills_rows": True, "warm_up_steps": 1})
    training, graphs = train.Training(CONFIG, 61, CPU), GraphStub.instances
    step = captured(
        training.micro_step, lambda tokens: data.synthetic_batch(config, 61, CPU, tokens)[0], 75, 16, 1, GraphStub
    )
    for batch in [data.filled(micro_batch(number), CONFIG) for number in range(16)]:
        eager = compute_gradients(training, training.micro_step, batch)
        assert all(map(torch.equal, compute_gradients(training, step, batch), eager))
    assert [len(graph.tensors[0]) for graph in graphs] == [80, 64, 48, 32], "the longest first, down to a quarter"
    assert [graph.pool_of for graph in graphs] == [None, *[graphs[0]] * 3]
    crowded = micro_batch()._replace(masked=torch.zeros(40, dtype=torch.int64), labels=torch.ones(40, dtype=torch.long))
    compute_gradients(training, step, data.filled(crowded, CONFIG))
    assert sum(graph.replays for graph in graphs) == 16, "too many masked words for a graph"


# -- LAMB -------------------------------------------------------------------------------------------------

SHAPES = {"table.weight": (10, 64), "layer.qkv.weight": (96, 32), "layer.qkv.bias": (96 * 2,), "norm.weight": (5,)}


def initial_weights():
    generator = np.random.RandomState(1)
    return {**{name: generator.randn(*shape) for name, shape in SHAPES.items()}, "zero.weight": np.zeros((4, 16))}


@pytest.mark.parametrize(
    ("overflows", "expected"),
    [
        ((), [8.94775299, 74.4987307, -0.867289883, 1.42052502, -0.125846382]),
        ((0, 5), [20.2979071, 85.6393012, -1.06410592, 1.3136686, -0.208088295]),
    ],
)
@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_updates_match_the_paper_and_the_submission(kernel, overflows, expected):
    """Weights after 12 steps of algorithm 2 of You et al. 2020, tensor by tensor in float64 NumPy.

    As submitted the gradient is clipped by its norm, and the trust ratio is 1 for tensors without weight decay.
    """
    parameters = {name: torch.nn.Parameter(torch.tensor(w).float()) for name, w in initial_weights().items()}
    groups = lamb.parameter_groups(
        list(parameters.items()),
        lambda name: 0.0 if name.endswith("bias") or "norm" in name else 0.0166629,
        lambda name: 3 if ".qkv." in name else 1,
    )
    assert len(groups) == 9, "queries, keys and values have a trust ratio each"
    optimizer = flat_optimizer.FlatOptimizer(
        list(parameters.values()),
        lamb.lamb_candidates(groups, lamb.Options((0.88, 0.95), 1e-6), None),
        kernel,
        CPU,
        clip=1.0,
        scale=flat_optimizer.ScaleRule(8.0, 1000) if overflows else None,
    )
    for step in range(12):
        scale = 1.0 if optimizer.scale is None else float(optimizer.scale.value)
        generator = np.random.RandomState(100 + step)
        for parameter in parameters.values():
            parameter.grad.copy_(torch.tensor(generator.randn(*parameter.shape) * 0.3 * (step % 3) * scale))
            if step in overflows:
                parameter.grad.view(-1)[0] = math.inf
        if step == 6:
            optimizer.restore(copy.deepcopy(optimizer.state_dict()))
        optimizer.step(0.01 * (step + 1), 1.0)
    assert [projection(weight) for weight in parameters.values()] == pytest.approx(expected, rel=1e-5)
    assert int(optimizer.inner.steps) == 12 - len(overflows)


# -- SQuAD -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def squad_batches():
    # An epoch of 30 windows of random tokens and of 10 to 40 tokens
    random, count = np.random.RandomState(0), 30
    offsets = np.concatenate([[0], np.cumsum(random.randint(10, 41, count))])
    start = random.randint(0, 5, count)
    windows = Windows(
        tokens=random.randint(0, SQUAD_VOCABULARY, offsets[-1]).astype(np.uint16),
        **dict.fromkeys(("begins", "ends"), np.zeros(offsets[-1], np.uint16)),
        best=np.zeros(offsets[-1], np.uint8),
        offsets=offsets,
        second=np.full(count, 4, np.uint16),
        start=start.astype(np.uint16),
        end=(start + random.randint(0, 5, count)).astype(np.uint16),
        question=np.arange(count, dtype=np.int32),
    )
    indices = [squad_data.batch_indices(SQUAD, windows, step, 5, CPU) for step in range(5)]
    return [squad_data.gathered(windows, part) for part in indices]


@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_updates_match_adam_without_bias_correction(squad_batches, kernel):
    """Losses and weights of five steps in float64: loss of each window, clipping, Adam as in run_squad.py of BERT."""
    # The gradient of the key biases is rounding, which a smaller epsilon would amplify.
    config = dataclasses.replace(SQUAD, gradient_clip=0.5, weight_decay=0.1, learning_rate=0.01, epsilon=1e-4)
    training = squad.Training(config, SQUAD_VOCABULARY, CPU, kernel, None)
    set_fixed_weights(training.network.parameters(), 0.3)
    losses = [
        float(squad.train_step(training, batch, learning_rate(config, step, 5)))
        for step, batch in enumerate(squad_batches)
    ]
    assert losses == pytest.approx([3.03069323, 3.12961443, 3.05951067, 2.99248771, 2.90341786], abs=1e-5)
    assert projection(*training.network.parameters()) == pytest.approx(-98.4718295, rel=1e-5)


def test_pretrained_weights_are_read(tmp_path):
    first, path = squad.Training(SQUAD, SQUAD_VOCABULARY, CPU, "plain", None), tmp_path / "weights.pt"
    names = {f"encoder.{name}": tensor for name, tensor in first.network.encoder.state_dict().items()}
    torch.save({**checkpoint.published_tensors(names), "qa_outputs.weight": torch.zeros(2, 16)}, path)
    config = dataclasses.replace(SQUAD, seed=5, checkpoint="weights.pt")
    second = squad.Training(config, SQUAD_VOCABULARY, CPU, "plain", squad.weights_file(config, tmp_path))
    assert all(map(torch.equal, first.network.encoder.parameters(), second.network.encoder.parameters()))
    assert not torch.equal(first.network.span.weight, second.network.span.weight)
    with pytest.raises(Problem, match=r"is not there(.|\n)*--set checkpoint=FILE"):
        squad.weights_file(config, tmp_path / "missing")


def test_padded_rows_of_squad_train_like_those_without_padding(squad_batches):
    config = SimpleNamespace(**{**dataclasses.asdict(SQUAD), "token_bucket": 32})
    training = squad.Training(SQUAD, SQUAD_VOCABULARY, CPU, "plain", None)
    pairs = [(squad_data.filled(part, config), part) for part in squad_batches]
    assert_padding_changes_nothing(training, training.forward_and_backward, pairs)


# -- attention kernels for GPUs ----------------------------------------------------------------------------

GPU = SimpleNamespace(type="cuda")


@pytest.mark.parametrize("kernel", sorted(attention.KERNELS))
def test_why_a_kernel_is_not_used(monkeypatch, kernel):
    assert kernel in attention.why_not(kernel, CPU.context, torch.float32, 64), "no kernel takes fp32"
    assert attention.why_not(kernel, CPU.context, torch.bfloat16, 64), "and no CPU has one"
    monkeypatch.setitem(attention.KERNELS, kernel, attention.padded)
    assert attention.why_not(kernel, CPU.context, torch.bfloat16, 64) == ""
    monkeypatch.setitem(attention.KERNELS, kernel, lambda *args: attention.padded(*args) * 1.1)
    assert "wrong by" in attention.why_not(kernel, CPU.context, torch.bfloat16, 64)


def test_available_and_chosen_kernels(monkeypatch):
    assert attention.available(CPU.context, torch.float32, 64, 0.1) == ["grouped", "padded"]
    monkeypatch.setattr(attention, "why_not", lambda kernel, *_: "lacks it" if kernel == "flash" else "")
    kernels = [attention.available(GPU, torch.bfloat16, 64, dropout) for dropout in (0.1, 0.0)]
    assert kernels == [["padded"], ["varlen", "padded"]]
    for name, device, reason in (
        ("flash", GPU, "lacks it; use attention=auto"),
        ("varlen", CPU.context, "the kernel runs on GPUs only"),
    ):
        with pytest.raises(choices.UnavailableError, match=f"attention={name}: {reason}"):
            attention.choose(name, device, torch.bfloat16, 64)
