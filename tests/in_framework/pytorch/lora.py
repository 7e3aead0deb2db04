"""LoRA on Llama on one and two ranks: against its formula in float64, split, resumed, and what it keeps in memory."""

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.llama import memory, safetensors
from benchmarks.llama.pytorch import adapters, parallel
from benchmarks.llama.pytorch.network import IGNORED, How, Network, published_name
from benchmarks.llama.shapes import Scaling, Shape
from benchmarks.llama2_70b_lora.pytorch.config import Config
from benchmarks.llama2_70b_lora.pytorch.data import micro_batch
from benchmarks.llama2_70b_lora.pytorch.model import Training, rule_of
from benchmarks.llama2_70b_lora.pytorch.train import train_step
from tests.in_framework.activations import kept_by_layers

RANKS = (1, 2)
VOCABULARY = 96
CONFIG = Config(
    device="cpu", precision="fp32", max_steps=20, sequence_length=32, layers=2, width=32, heads=4, key_value_heads=2,
    inner_width=48, initial_weights=0.3, batch_size=4, micro_batch=2, learning_rate=0.01, epsilon=1e-3, loss_rows=24,
    lora_rank=4, lora_alpha=8, recompute=False, gradient_clip=1.0,
)  # fmt: skip
PARALLEL = ({}, {"tensor_parallelism": 2}, {"context_parallelism": 2}, {"recompute": True})


@pytest.fixture(scope="session")
def ranks():
    found = pytorch.start(CONFIG)
    yield found
    pytorch.finish()


@pytest.fixture
def alone(ranks):
    """The same process as the only rank."""
    return dataclasses.replace(ranks, rank=0, size=1)


# -- the formula, and files -----------------------------------------------------------------------------

SHAPE = Shape(11, 2, 16, 4, 2, 12, 10000.0, Scaling(), 1e-5)
RULE = adapters.Rule(3, 6, 0.0, 1)


def adapted(how=How(), rule=RULE):  # noqa: B008
    """A network in float64 with adapters, all of whose values are random; on every rank the same."""
    torch.manual_seed(0)
    network = Network(SHAPE, how)
    adapters.add(network, rule, 0)
    network.to_empty(device="cpu")
    network.double()
    for each in network.parameters():
        torch.nn.init.normal_(each, std=0.4)
    return network


def split_up(network):
    """Whole weights of the base and of the adapters, by name."""
    trained = adapters.trained(network)
    found = {name: each.detach().clone() for name, each in network.named_parameters()}
    return {name: each for name, each in found.items() if name not in trained}, {name: found[name] for name in trained}


@pytest.mark.parametrize("how", [How(), How(recompute=True, loss_rows=5)])
def test_logits_loss_and_gradients_are_those_of_the_formula(how):
    """W + alpha / rank * B A in place of W, in float64; peft was compared in the same way, see README.md."""
    network = adapted(how)
    base, trained = split_up(network)
    trained = {name: each.requires_grad_() for name, each in trained.items()}
    tokens = torch.randint(SHAPE.vocabulary, (2, 10))
    labels = tokens[:, 1:].clone()
    labels[0, :4] = IGNORED
    plain = Network(SHAPE).double()
    merged = adapters.merged(base, trained, RULE.scale)
    assert set(merged) == set(base)
    logits = functional_call(plain, merged, (tokens[:, :-1],))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    loss = network(tokens[:, :-1], labels)
    loss.backward()
    torch.testing.assert_close(network(tokens[:, :-1]), logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, each in network.named_parameters():
        assert (each.grad is None) == (name not in trained), name
        if name in trained:
            torch.testing.assert_close(each.grad, trained[name].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_adapters_have_pefts_names_and_product(fused, tmp_path):
    base, trained = split_up(adapted())
    adapters.save(tmp_path / "adapter", trained, RULE, fused, "llama")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    products = ["o_proj", "qkv_proj"] if fused else ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6, products)
    found = {k: v.values for k, v in safetensors.tensors_of(tmp_path / "adapter" / "adapter_model.safetensors").items()}
    assert len(found) == 2 * 2 * len(products)
    merged = adapters.merged(base, trained, RULE.scale)
    for layer in range(2):
        stem = f"layers.{layer}.self_attn"
        before, after = (torch.cat([of[f"{stem}.{each}_proj.weight"] for each in "qkv"]) for of in (base, merged))
        kinds = ["qkv"] if fused else list("qkv")
        names = [f"base_model.model.model.{stem}.{kind}_proj.lora" for kind in kinds]
        change = np.concatenate([found[f"{name}_B.weight"] @ found[f"{name}_A.weight"] for name in names])
        torch.testing.assert_close(torch.from_numpy(change * 2).double(), after - before, rtol=1e-5, atol=1e-5)


def stored_as(path, base, fused, kind):
    """A file of published names: bf16 bits are written as MLPerf's files have them."""
    tensors = {published_name(name): each.float().numpy() for name, each in base.items()}
    if fused:
        for layer in range(SHAPE.layers):
            stem = f"model.layers.{layer}.self_attn."
            rows = [tensors.pop(f"{stem}{each}_proj.weight") for each in "qkv"]
            tensors[f"{stem}qkv_proj.weight"] = np.concatenate(rows)
    if kind == "F32":
        safetensors.write(path, tensors)
        return
    header, content = {}, b""
    for name, each in tensors.items():
        bits = torch.from_numpy(each).bfloat16().view(torch.int16).numpy().tobytes()
        where = [len(content), len(content) + len(bits)]
        header[name] = {"dtype": "BF16", "shape": each.shape, "data_offsets": where}
        content += bits
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + content)


@pytest.mark.parametrize(("fused", "kind"), [(False, "F32"), (True, "BF16")])
@pytest.mark.parametrize("how", PARALLEL[:2])
def test_each_rank_reads_its_part_of_published_weights(fused, kind, how, ranks, tmp_path):
    base, _ = split_up(adapted())
    stored_as(tmp_path / "model-1.safetensors", base, fused, kind)
    index = {
        "weight_map": dict.fromkeys(safetensors.tensors_of(tmp_path / "model-1.safetensors"), "model-1.safetensors")
    }
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    sizes = {"width": 16, "heads": 4, "inner_width": 12, "batch_size": 4 // ranks.size}
    config = dataclasses.replace(CONFIG, **sizes, **(how if ranks.size > 1 else {}))
    training = Training(config, SHAPE.vocabulary, ranks, path)
    assert training.fused == fused
    for name, each in training.network.named_parameters():
        if name in base:
            wanted = base[name].float()
            wanted = wanted if kind == "F32" else wanted.bfloat16().float()
            assert torch.equal(parallel.whole(each.detach()), wanted), name
    # The parts of all ranks are together no larger than the whole.
    mine = sum(parallel.local(each).numel() for name, each in training.network.named_parameters() if name in base)
    assert mine <= sum(each.numel() for each in base.values()) * (0.75 if ranks.size > 1 else 1)
    other = dataclasses.replace(config, inner_width=16)
    with pytest.raises(
        Problem, match=r"gate_proj.weight of \(12, 16\) in model-1.safetensors\n.*expected: .*of \(16, 16\)"
    ):
        Training(other, SHAPE.vocabulary, ranks, path)


# -- dropout ----------------------------------------------------------------------------------------------


def test_dropout_is_of_the_sample_alone():
    whole, part = (adapters.Dropout(RULE._replace(dropout=0.25), rank) for rank in (0, 1))
    ones, positions = torch.ones(2, 64, 32), torch.arange(64)
    for each, at in ((whole, positions), (part, positions[5:9])):
        each.samples, each.length, each.positions = (7, 8), 64, at
    found = whole.of(ones, 3, 32)
    assert found.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float((found == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert torch.equal(found, whole.of(ones, 3, 32)) and not torch.equal(found, whole.of(ones, 4, 32))
    assert not torch.equal(found[0], found[1])
    assert torch.equal(part.of(ones[:, 5:9, 16:], 3, 32), found[:, 5:9, 16:])
    whole.samples = ()
    assert whole.of(ones, 3, 32) is ones


# -- ranks ------------------------------------------------------------------------------------------------


def batch_of(config, place, ranks, step):
    """Samples that do not depend on how the ranks share them, as the input deals them out."""
    mine = config.batch_size * config.group
    random = np.random.RandomState(step)
    tokens = random.randint(VOCABULARY, size=(config.batch_size * ranks.size, config.sequence_length))
    first, made = step * len(tokens) + place.group * mine, []
    for begin in range(place.group * mine, (place.group + 1) * mine, config.micro_batch_size):
        rows, numbers = tokens[begin : begin + config.micro_batch_size], range(first, first + config.micro_batch_size)
        made.append(micro_batch(rows, np.ones(rows.shape, bool), place, numbers))
        first += config.micro_batch_size
    return made


def trained(config, ranks, steps=3):
    training = Training(config, VOCABULARY, ranks, None)
    losses = []
    for step in range(steps):
        loss = train_step(training, batch_of(config, training.place, ranks, step), 0.01)
        losses.append(pytorch.total(loss)[0] / ranks.size if ranks.size > 1 else float(loss))
    return training, losses


def whole(training):
    """All weights of all ranks together, by name."""
    return {name: parallel.whole(each.detach()).clone() for name, each in training.network.named_parameters()}


@pytest.mark.parametrize("how", PARALLEL)
def test_any_split_trains_as_one_rank(how, ranks, alone):
    if ranks.size == 1 and "recompute" not in how:
        how = {}
    split = dataclasses.replace(CONFIG, batch_size=CONFIG.batch_size // ranks.size, **how)
    training, losses = trained(split, ranks)
    single, expected = trained(CONFIG, alone)
    assert losses == pytest.approx(expected, rel=2e-6)
    found, wanted = whole(training), whole(single)
    frozen = whole(Training(CONFIG, VOCABULARY, alone, None))
    for name, each in wanted.items():
        assert torch.equal(each, frozen[name]) == ("lora" not in name), name
        torch.testing.assert_close(
            found[name], each, rtol=1e-4, atol=5e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_dropout_matters(alone):
    assert trained(CONFIG, alone)[1] != trained(dataclasses.replace(CONFIG, lora_dropout=0.0), alone)[1]


@pytest.mark.parametrize("how", PARALLEL[:3])
def test_a_checkpoint_holds_adapters_alone_and_continues_in_every_split(how, ranks, alone, tmp_path):
    config = dataclasses.replace(CONFIG, batch_size=4 // ranks.size, **(how if ranks.size > 1 else {}))
    training, _ = trained(config, ranks, steps=2)
    folder = Path(os.environ.get("TOGETHER", tmp_path))
    paths = [folder / f"{sorted(how)}-{rank}" for rank in range(ranks.size)]
    pytorch.save(paths[ranks.rank], training.state_dict())
    pytorch.barrier()
    assert all("lora" in name for name in pytorch.load(paths[0])["parts"])
    for other, by in ((how, ranks), ({}, ranks), ({"tensor_parallelism": 2}, ranks), ({}, alone)):
        split = dataclasses.replace(CONFIG, batch_size=4 // by.size, **(other if by.size > 1 else {}))
        again = Training(split, VOCABULARY, by, None)
        again.restore(map(pytorch.load, paths))
        ours, theirs = whole(again), whole(training)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), other
    again = Training(config, VOCABULARY, ranks, None)
    again.restore(map(pytorch.load, paths))
    for each in (training, again):
        train_step(each, batch_of(config, each.place, ranks, 7), 0.01)
    ours, theirs = whole(again), whole(training)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_base_is_kept_in_bf16_and_adapters_in_fp32(ranks, alone):
    config = dataclasses.replace(CONFIG, batch_size=4 // ranks.size, precision="bf16")
    training, losses = trained(config, ranks)
    _, expected = trained(CONFIG, alone)
    assert losses == pytest.approx(expected, rel=0.02) and losses != expected
    kinds = {("lora" in name, each.dtype) for name, each in training.network.named_parameters()}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}


IN_FP8 = dataclasses.replace(CONFIG, width=64, inner_width=64, initial_weights=0.05, precision="bf16", fp8="scaled_mm")


@pytest.mark.parametrize("how", PARALLEL)
def test_a_base_in_fp8_trains_like_one_in_fp32_in_every_split(how, ranks, alone):
    how = how if ranks.size > 1 or "recompute" in how else {}
    config = dataclasses.replace(IN_FP8, batch_size=4 // ranks.size, **how)
    training, losses = trained(config, ranks)
    single, expected = trained(dataclasses.replace(IN_FP8, fp8="none", precision="fp32"), alone)
    assert losses == pytest.approx(expected, rel=0.01) and losses != expected
    kept = [name for name, each in training.network.named_parameters() if each.dtype == torch.float8_e4m3fn]
    assert len(kept) == 2 * 7 and not any("lora" in name for name in kept)
    check_kept(training, single.network)


def check_kept(training, network):
    # Three bits behind the first: within a sixteenth, and the smallest values within the type's smallest step
    for name, whole_of in network.named_parameters():
        parameter = training.network.get_parameter(name).detach()
        found, wanted = parallel.local(parameter), whole_of.detach()[parallel.share(parameter)]
        if found.dtype == torch.float8_e4m3fn:
            scale = training.network.get_submodule(name.rpartition(".")[0]).scale
            assert float(scale) == pytest.approx(float(whole_of.detach().abs().max()) / 448)
            error = (found.float() * scale - wanted).abs()
            assert bool((error <= torch.maximum(wanted.abs() / 16, scale * 2.0**-9)).all()), name


def test_published_weights_are_kept_in_fp8(ranks, alone, tmp_path):
    single = Training(dataclasses.replace(IN_FP8, fp8="none", precision="fp32"), VOCABULARY, alone, None)
    base = {published_name(k): v.detach().numpy() for k, v in single.network.named_parameters() if "lora" not in k}
    safetensors.write(tmp_path / "model.safetensors", base)
    config = dataclasses.replace(IN_FP8, tensor_parallelism=ranks.size, batch_size=4 // ranks.size)
    check_kept(Training(config, VOCABULARY, ranks, tmp_path / "model.safetensors"), single.network)


# -- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_those_of_the_formula(recompute, alone):
    """What autograd keeps of a forward pass, besides weights, in the layers: fp32 here, with a mask of a byte."""
    config = dataclasses.replace(CONFIG, layers=6, width=64, inner_width=160, sequence_length=64, recompute=recompute)
    training = Training(config, VOCABULARY, alone, None)
    (part, *_) = batch_of(config, training.place, alone, 0)
    training.dropout.samples, training.dropout.positions, training.dropout.length = part.samples, part.positions, 64
    kept = kept_by_layers(training.network, part.tokens, part.positions)
    positions = part.tokens.numel()
    expected = positions * config.layers * (config.width * 4 if recompute else config.kept())
    assert kept == pytest.approx(expected, rel=0.1)


def test_parameters_are_those_of_70b():
    config = Config()
    counted = memory.weights_of(config, 32000)
    with torch.device("meta"):
        network = Network(config.shape(32000))
        before = sum(each.numel() for each in network.parameters())
        adapters.add(network, rule_of(config), 0)
    assert before == counted.layer * 80 + counted.outside == 68_976_648_192
    assert sum(each.numel() for each in adapters.trained(network).values()) == config.adapters() * 80 == 44_564_480
    assert math.isclose(before * 2, 137.95e9, rel_tol=1e-3)
