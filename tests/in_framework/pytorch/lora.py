"""LoRA on Llama on one rank: merged weights, peft's and published files, dropout, FP8 and memory formulas."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch.func import functional_call

from benchmarks.common.data.problem import Problem
from benchmarks.llama import memory, safetensors
from benchmarks.llama.pytorch import adapters, parallel
from benchmarks.llama.pytorch.network import IGNORE_INDEX, ComputeOptions, Network, hf_name
from benchmarks.llama.shapes import Scaling, Shape
from benchmarks.llama2_70b_lora.dataset import Samples
from benchmarks.llama2_70b_lora.pytorch.config import Config
from benchmarks.llama2_70b_lora.pytorch.data import step_of
from benchmarks.llama2_70b_lora.pytorch.model import Training, rule_of
from benchmarks.llama2_70b_lora.pytorch.train import train_step
from tests.in_framework.splits import Trainer, full_weights, one_rank, saved_by_layers, share_batch
from tests.in_framework.torch_checks import set_fixed_weights

VOCABULARY = 96
CONFIG = Config(
    device="cpu", precision="fp32", max_steps=20, sequence_length=32, layers=2, width=32, heads=4, key_value_heads=2,
    inner_width=48, initial_weights=0.3, batch_size=4, micro_batch=2, learning_rate=0.01, epsilon=1e-3, loss_rows=24,
    lora_rank=4, lora_alpha=8, recompute=False, gradient_clip=1.0,
)  # fmt: skip
IN_FP8 = {"width": 64, "inner_width": 64, "initial_weights": 0.05, "precision": "bf16", "fp8": "scaled_mm"}
PLAIN = {**IN_FP8, "precision": "fp32", "fp8": "none"}
SHAPE = Shape(11, 2, 16, 4, 2, 12, 10000.0, Scaling(), 1e-5)
RULE = adapters.Rule(3, 6, 0.0, 1)
THIRD = torch.tensor(3)  # Number of an adapter


TOKENS = np.random.RandomState(0).randint(VOCABULARY, size=(40, CONFIG.sequence_length))
DATA = Samples(TOKENS, np.ones(TOKENS.shape, bool))
TRAINER = Trainer(
    CONFIG,
    lambda config, ranks: Training(config, VOCABULARY, ranks, None),
    lambda config, ranks, step: step_of(config, DATA, ranks, step),
    train_step,
)
PUBLISHED = [(False, "F32"), (True, "BF16")]  # fused projections, and type of the weights


def network_with_adapters(options=ComputeOptions()):  # noqa: B008
    """Return a float64 network with fixed weights, and copies of its base weights and adapters by name."""
    network = Network(SHAPE, options)
    adapters.add(network, RULE, 0)
    network.to_empty(device="cpu").double()
    set_fixed_weights(network.parameters(), 0.5)
    weights = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    trained = {name: weights.pop(name) for name in adapters.trained(network)}
    return network, weights, trained


@pytest.mark.parametrize("options", [ComputeOptions(), ComputeOptions(2, loss_rows=5)])
def test_adapters_match_merged_weights(options):
    """W + alpha / rank * B A in place of W; tools/parity.py compares the network with peft."""
    network, base, trained = network_with_adapters(options)
    trained = {name: weight.requires_grad_() for name, weight in trained.items()}
    tokens = torch.tensor([[0, 7, 5, 6, 9, 3, 0, 10, 0, 4], [10, 8, 8, 10, 4, 0, 10, 0, 3, 9]])
    labels = tokens[:, 1:].clone()
    labels[0, :4] = IGNORE_INDEX
    merged = adapters.merged(base, trained, RULE.scale)
    assert merged.keys() == base.keys()
    logits = functional_call(Network(SHAPE).double(), merged, (tokens[:, :-1],))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    loss = network(tokens[:, :-1], labels)
    loss.backward()
    torch.testing.assert_close((network(tokens[:, :-1]), loss), (logits, expected), rtol=1e-12, atol=1e-12)
    gradients = {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}
    expected_gradients = {name: weight.grad for name, weight in trained.items()}
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("fused", "products"), [(True, ["qkv"]), (False, ["q", "k", "v"])])
def test_adapter_files_have_pefts_names_and_products(fused, products, tmp_path):
    _, base, trained = network_with_adapters()
    adapters.save(tmp_path, trained, RULE, fused, "llama")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    targets = sorted(f"{product}_proj" for product in [*products, "o"])
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6, targets)
    stored = {name: t.values for name, t in safetensors.tensors_of(tmp_path / "adapter_model.safetensors").items()}
    assert len(stored) == 2 * 2 * len(targets)
    merged = adapters.merged(base, trained, RULE.scale)
    for layer in range(2):
        stem = f"layers.{layer}.self_attn"
        names = [f"base_model.model.model.{stem}.{product}_proj.lora" for product in products]
        change = np.concatenate([stored[f"{name}_B.weight"] @ stored[f"{name}_A.weight"] for name in names])
        weights = [f"{stem}.{product}_proj.weight" for product in "qkv"]
        expected = torch.cat([merged[name] - base[name] for name in weights])
        torch.testing.assert_close(torch.from_numpy(change * 2).double(), expected, rtol=1e-5, atol=1e-5)


def write_published(path, base, fused, dtype):
    """Write base weights by their published names; in bf16 as MLPerf's files have them."""
    kind = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    tensors = {hf_name(name): weight.to(kind) for name, weight in base.items()}
    for layer in range(SHAPE.layers if fused else 0):
        stem = f"model.layers.{layer}.self_attn."
        tensors[f"{stem}qkv_proj.weight"] = torch.cat(
            [tensors.pop(f"{stem}{product}_proj.weight") for product in "qkv"]
        )
    ends = np.cumsum([tensor.nbytes for tensor in tensors.values()]).tolist()
    header = json.dumps({
        name: {"dtype": dtype, "shape": tensor.shape, "data_offsets": [end - tensor.nbytes, end]}
        for (name, tensor), end in zip(tensors.items(), ends, strict=True)
    }).encode()  # fmt: skip
    content = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)


def check_published_weights_are_read(ranks, folder, fused, dtype, **split):
    """Also used on two ranks, each of which reads only its part."""
    _, base, _ = network_with_adapters()
    write_published(folder / "model-1.safetensors", base, fused, dtype)
    names = safetensors.tensors_of(folder / "model-1.safetensors")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    config = share_batch(CONFIG, ranks, width=16, heads=4, inner_width=12, **split)
    training = Training(config, SHAPE.vocabulary, ranks, path)
    assert training.fused == fused
    stored = {name: weight.float() if dtype == "F32" else weight.bfloat16().float() for name, weight in base.items()}
    loaded = full_weights(training)
    torch.testing.assert_close({name: loaded[name] for name in base}, stored, rtol=0, atol=0)
    local = sum(parallel.local(w).numel() for name, w in training.network.named_parameters() if name in base)
    assert local <= sum(weight.numel() for weight in base.values()) * (0.75 if ranks.size > 1 else 1)
    message = r"gate_proj.weight of \(12, 16\) in model-1.safetensors\n.*expected: .*of \(16, 16\)"
    with pytest.raises(Problem, match=message):
        Training(dataclasses.replace(config, inner_width=16), SHAPE.vocabulary, ranks, path)


@pytest.mark.parametrize(("fused", "dtype"), PUBLISHED)
def test_published_weights_are_read(fused, dtype, ranks, tmp_path):
    check_published_weights_are_read(ranks, tmp_path, fused, dtype)


def test_dropout_depends_only_on_sample_position_and_layer():
    full, part = (adapters.Dropout(RULE._replace(dropout=0.25), rank) for rank in (0, 1))
    ones, positions = torch.ones(2, 64, 32), torch.arange(64)
    for dropout, own_positions in ((full, positions), (part, positions[5:9])):
        dropout.samples, dropout.length, dropout.positions = torch.tensor([7, 8]), 64, own_positions
    dropped = full.of(ones, THIRD, 32)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    # 4,096 draws with fixed seeds: the standard error is 0.007.
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert torch.equal(dropped, full.of(ones, THIRD, 32)) and not torch.equal(dropped, full.of(ones, THIRD + 1, 32))
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(part.of(ones[:, 5:9, 16:], THIRD, 32), dropped[:, 5:9, 16:])
    full.samples = adapters.NO_SAMPLES
    assert full.of(ones, THIRD, 32) is ones


def test_only_adapters_train_with_dropout_and_resume(ranks, together):
    initial, (training, losses) = full_weights(TRAINER.new(ranks)), TRAINER.train(ranks)
    changed = {name for name, weight in full_weights(training).items() if not torch.equal(weight, initial[name])}
    assert changed == set(training.state_dict()["parts"]) == {name for name in initial if "lora" in name}
    assert losses != TRAINER.train(ranks, lora_dropout=0.0)[1]
    TRAINER.assert_splits_train_alike([{"recompute": True}], ranks, atol=5e-6)
    TRAINER.assert_splits_resume([{}], ranks, together)


def check_fp8_weights(training, network):
    """Compare stored weights with the originals: E4M3 has three bits after the first, its smallest step is 2^-9."""
    for name, original in network.named_parameters():
        parameter = training.network.get_parameter(name).detach()
        local, expected = parallel.local(parameter), original.detach()[parallel.share(parameter)]
        if local.dtype == torch.uint8:
            scale = training.network.get_submodule(name.rpartition(".")[0]).scale
            assert float(scale) == pytest.approx(float(original.detach().abs().max()) / 448)
            error = (local.view(torch.float8_e4m3fn).float() * scale - expected).abs()
            assert bool((error <= torch.maximum(expected.abs() / 16, scale * 2.0**-9)).all()), name


def check_fp8_base_trains(ranks, **split):
    """Also used on two ranks."""
    training, losses = TRAINER.train(ranks, **IN_FP8, **split)
    single, expected = TRAINER.train(one_rank(ranks), **PLAIN)
    assert losses == pytest.approx(expected, rel=0.01) and losses != expected
    in_fp8 = [name for name, w in training.network.named_parameters() if w.dtype == torch.uint8]
    assert len(in_fp8) == 2 * 7 and not any("lora" in name for name in in_fp8)
    check_fp8_weights(training, single.network)


def test_training_with_a_base_in_fp8_is_close_to_fp32(ranks):
    check_fp8_base_trains(ranks, recompute=True)


def check_published_weights_in_fp8(ranks, folder):
    """Also used on two ranks."""
    single = TRAINER.new(one_rank(ranks), **PLAIN)
    base = {hf_name(k): v.detach().numpy() for k, v in single.network.named_parameters() if "lora" not in k}
    safetensors.write(folder / "model.safetensors", base)
    config = share_batch(CONFIG, ranks, **IN_FP8, tensor_parallelism=ranks.size)
    check_fp8_weights(Training(config, VOCABULARY, ranks, folder / "model.safetensors"), single.network)


def test_published_weights_are_stored_in_fp8(ranks, tmp_path):
    check_published_weights_in_fp8(ranks, tmp_path)


@pytest.mark.parametrize("recompute", [False, True])
def test_activation_memory_matches_the_formula(recompute, ranks):
    """In fp32, with dropout masks of one byte."""
    training = TRAINER.new(ranks, layers=6, width=64, inner_width=160, recompute=recompute)
    config, part = training.config, step_of(training.config, DATA, ranks, 0)[0]
    training.dropout.samples, training.dropout.positions, training.dropout.length = (
        torch.tensor(part.samples),
        part.positions,
        32,
    )
    measured = saved_by_layers(training.network, part.tokens, part.positions)
    per_position = config.layers * (config.width * 4 if recompute else config.activation_bytes())
    assert measured == pytest.approx(part.tokens.numel() * per_position, rel=0.1)


def test_70b_has_the_published_number_of_parameters():
    config = Config()
    counted = memory.weights_of(config, 32000)
    with torch.device("meta"):
        network = Network(config.shape(32000))
        parameters = sum(weight.numel() for weight in network.parameters())
        adapters.add(network, rule_of(config), 0)
    assert parameters == counted.layer * 80 + counted.outside == 68_976_648_192
    trained = sum(weight.numel() for weight in adapters.trained(network).values())
    assert trained == config.adapters() * 80 == 44_564_480
    assert math.isclose(parameters * 2, 137.95e9, rel_tol=1e-3)
