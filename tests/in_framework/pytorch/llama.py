"""Llama, its LoRA and gpt-oss on one rank: recorded values, cached steps, adapters, weight files, FP8, memory."""

import dataclasses
import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from benchmarks.common.checks import step_cost
from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.torch import kernels
from benchmarks.gpt_oss_20b.pytorch import train as gpt_oss
from benchmarks.gpt_oss_20b.pytorch.config import Config as GptOssConfig
from benchmarks.llama import memory, order, safetensors, shapes
from benchmarks.llama.dataset import DataSet
from benchmarks.llama.megatron import Documents
from benchmarks.llama.pytorch import adapters, attention, data, experts, fp8, model, parallel, state
from benchmarks.llama.pytorch.network import (
    IGNORE_INDEX,
    Network,
    hf_name,
    rope_frequencies,
)
from benchmarks.llama2_70b_lora.dataset import Samples
from benchmarks.llama2_70b_lora.pytorch import data as lora_data
from benchmarks.llama2_70b_lora.pytorch import model as lora
from benchmarks.llama2_70b_lora.pytorch import train as lora_train
from benchmarks.llama2_70b_lora.pytorch.config import Config as LoraConfig
from benchmarks.llama31_8b.pytorch import train
from benchmarks.llama31_8b.pytorch.config import Config
from tests.in_framework.splits import (
    Trainer,
    assert_steps_match,
    full_weights,
    one_rank,
    random_batch,
    saved_by_layers,
    share_batch,
)
from tests.in_framework.torch_checks import FlashCalls, gradient_projection, projection, set_fixed_weights

VOCABULARY = 96
OPTIONS = {
    "device": "cpu", "precision": "fp32", "max_steps": 20, "sequence_length": 32, "layers": 2, "width": 32, "heads": 4,
    "key_value_heads": 2, "rope_base": 10000.0, "initial_weights": 0.3, "batch_size": 4, "learning_rate": 0.01,
    "end_learning_rate": 0.001, "warmup_steps": 2, "epsilon": 1e-3, "loss_rows": 24,
}  # fmt: skip
CONFIG = Config(**OPTIONS, inner_width=48, rope_context=16, micro_batch=2)
IN_FP8 = {
    "precision": "bf16", "fp8": "scaled_mm", "layers": 1, "width": 64, "inner_width": 64, "initial_weights": 0.05,
    "gradient_clip": 1e9,
}  # fmt: skip
GPT_OSS = GptOssConfig(
    **OPTIONS, inner_width=24, head_size=12, window=9, sinks=True, experts=4, chosen_experts=2, gate="gpt_oss",
    micro_batch=1, expert_parallelism=1, qk_norm=False, router_dtype="fp32",
)  # fmt: skip
SHAPE = shapes.Shape(11, 2, 16, 4, 2, 12, 10000.0, shapes.Scaling(8.0, 1.0, 4.0, 16), 1e-5)
MIXTURE = {"experts": 4, "chosen": 2, "gate": "gpt_oss", "window": 4, "sinks": True}
GPT_OSS_SHAPE = shapes.Shape(11, 2, 16, 4, 2, 12, 10000.0, shapes.Scaling(), 1e-5, head_size=6, **MIXTURE)
TOKENS = torch.tensor([0, 7, 5, 6, 9, 3, 0, 10, 0, 4, 10, 8, 8, 10, 4, 0, 10, 0, 3, 9, 6, 5, 7, 0, 7, 5])
TRAINER, GPT_OSS_TRAINER = (
    Trainer(
        config,
        lambda config, ranks: model.Training(config, VOCABULARY, ranks),
        lambda config, ranks, step: random_batch(config, VOCABULARY, ranks, step),
        step,
    )
    for config, step in ((CONFIG, train.train_step), (GPT_OSS, gpt_oss.train_step))
)


# LlamaForCausalLM and GptOssForCausalLM of transformers 4.57.1 with norms in float64. Rotary frequencies of Llama are
# fp32 as well; gpt-oss is eager, with biases 0, softmax in float64 and a window of 4.
@pytest.mark.parametrize("options", [(), (2, 5)])  # recomputed layers, loss rows
@pytest.mark.parametrize(
    ("shape", "scale", "length", "ignored", "expected"),
    [
        (SHAPE, 0.8, 9, slice(3, 4), [4.029268095, 56.94583103, -51.3392618]),
        (GPT_OSS_SHAPE, 1.2, 12, slice(0), [-16.70354684, 102.8106046, 147.8012757]),
        (GPT_OSS_SHAPE, 1.2, 3, slice(0), [5.105972512, 23.42863028, -167.7032764]),
        # Not in transformers: qk_layernorm of Megatron (RMSNorm of each head before RoPE); recorded from this network
        (GPT_OSS_SHAPE._replace(qk_norm=True), 1.2, 12, slice(0), [-41.67367481, 124.1212625, -12.60894209]),
    ],
)
def test_logits_loss_and_gradients_match_transformers(options, shape, scale, length, ignored, expected):
    network = Network(shape, *options).double()
    set_fixed_weights(network.parameters(), scale)
    tokens = TOKENS[: 2 * length + 2].view(2, length + 1)
    labels = tokens[:, 1:].clone()
    labels[0, ignored] = IGNORE_INDEX
    loss = network(tokens[:, :-1], labels)
    loss.backward()
    values = [projection(network(tokens[:, :-1])), loss.item(), gradient_projection(network.parameters())]
    assert values == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", [SHAPE, GPT_OSS_SHAPE, GPT_OSS_SHAPE._replace(qk_norm=True, router_dtype="bf16")])
def test_cached_steps_match_the_network(shape):
    network = Network(shape).double()
    set_fixed_weights(network.parameters(), 0.5)
    assert_steps_match(network, TOKENS[:18].view(2, 9))


def test_norms_and_sinks_have_no_weight_decay():
    parameters = dict(Network(GPT_OSS_SHAPE._replace(qk_norm=True)).named_parameters())
    groups = state.adamw(parameters, GPT_OSS).param_groups
    summary = [(group["weight_decay"], {weight.ndim for weight in group["params"]}) for group in groups]
    assert summary == [(0.1, {2, 3}), (0.0, {1})]


def test_router_in_bf16():
    mixture = Network(GPT_OSS_SHAPE._replace(router_dtype="bf16")).layers[0].mlp
    set_fixed_weights(mixture.parameters(), 0.3)
    hidden = torch.sin(torch.arange(64.0) ** 2).view(1, 4, 16)
    logits, chosen, shares = experts.chosen_experts(mixture, hidden)
    torch.testing.assert_close(logits, hidden.bfloat16() @ mixture.router.weight.bfloat16().T, rtol=0, atol=0)
    torch.testing.assert_close(shares, logits.float().gather(-1, chosen).softmax(-1))


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (
            shapes.Scaling(),
            [1, 0.19392276, 0.037606031, 7.2926651e-3, 1.4142134e-3, 2.7424819e-4, 5.3182957e-5, 1.0313385e-5],
        ),
        (
            shapes.Scaling(8.0, 1.0, 4.0, 16),
            [
                0.57605636,
                0.024240345,
                4.7007538e-3,
                9.1158313e-4,
                1.7677668e-4,
                3.4281024e-5,
                6.6478697e-6,
                1.2891732e-6,
            ],
        ),
        (
            shapes.Scaling(8.0, 1.0, 4.0, 8192),
            [1, 0.19392276, 0.037606031, 7.2926651e-3, 5.2484602e-4, 3.4281024e-5, 6.6478697e-6, 1.2891732e-6],
        ),
    ],
)
def test_rotary_frequencies_match_transformers(scaling, expected):
    """Every eighth of _compute_llama3_parameters of transformers 4.57.1 for heads of 128 values."""
    assert rope_frequencies(128, 500000.0, scaling)[::8].tolist() == pytest.approx(expected, rel=2e-6)


def test_checkpoints_resume_bit_for_bit(ranks, together):
    TRAINER.assert_splits_resume([{}], ranks, together)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp32"}, "fp8 requires precision=bf16"),
        ({"tensor_parallelism": 2, "inner_width": 48}, "fp8 needs shares of 16"),
        ({"context_parallelism": 2, "sequence_length": 16}, "fp8 needs shares of 16"),
        ({"fp8": "scaled_mm_head", "loss_rows": 24}, "needs loss_rows=24 to be a multiple of 16"),
    ],
)
def test_invalid_fp8_configurations(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{**IN_FP8, **settings})


MEMORY = {"layers": 6, "width": 64, "sequence_length": 64}
LLAMA_MEMORY = dataclasses.replace(CONFIG, inner_width=160, **MEMORY)
GPT_OSS_MEMORY = dataclasses.replace(GPT_OSS, inner_width=80, sinks=False, window=0, gate="silu", **MEMORY)


@pytest.mark.parametrize(
    ("config", "changes", "tolerance"),
    [
        (LLAMA_MEMORY, {}, 0.05),
        (LLAMA_MEMORY, {"recompute": True}, 0.05),
        (LLAMA_MEMORY, {"precision": "bf16", "fp8": "scaled_mm", "layers": 1}, 0.05),
        (GPT_OSS_MEMORY, {}, 0.1),
        (GPT_OSS_MEMORY, {"recompute": True}, 0.1),
    ],
)
def test_activation_memory_matches_the_formula(config, changes, tolerance, ranks):
    config = dataclasses.replace(config, **changes)
    network = Network(config.shape(VOCABULARY), config.recomputed_layers, config.loss_rows)
    network.to(pytorch.DTYPES[config.precision])
    if config.fp8 != "none":
        fp8.set_up(network, config.fp8, ranks)
    measured = saved_by_layers(network, torch.zeros(2, 64, dtype=torch.int64), torch.arange(64))
    # Only on a CPU: RMSNorm also saves its scaled input, in fp32, and the attention output is copied for the GEMM.
    per_position = config.width * 4 if config.recompute else config.activation_bytes() + config.width * 12
    assert measured == pytest.approx(128 * config.layers * per_position, rel=tolerance)


@pytest.mark.parametrize("config", [CONFIG, GPT_OSS])
def test_training_after_an_evaluation_has_static_shapes(config, monkeypatch):
    inputs = []
    backend = {"backend": lambda graph, values: inputs.append(values) or graph}
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, **backend))
    network = Network(config.shape(VOCABULARY), loss_rows=config.loss_rows)
    parallel.compile_parts(network, SimpleNamespace(tensor=1), has_fixed_rows=True)
    tokens, positions = torch.zeros(2, 32, dtype=torch.int64), torch.arange(32)
    with torch.no_grad():
        network(tokens[:1], tokens[:1], positions)
    evaluated = len(inputs)
    network(tokens, tokens, positions).backward()
    assert 0 < evaluated < len(inputs)
    assert all(isinstance(value, torch.Tensor) for values in inputs for value in values)


def test_no_copy_of_a_frozen_weight_is_kept_for_the_backward_pass():
    layer = fp8.Float8Linear(32, 16, bias=False)
    layer.weight = nn.Parameter(torch.ones(16, 32).to(torch.float8_e4m3fn).bfloat16(), requires_grad=False)
    layer.scale = torch.ones(())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = layer(torch.ones(48, 32, dtype=torch.bfloat16, requires_grad=True))
    assert output.sum().item() == 16 * 32 * 48
    assert [tensor.data_ptr() == layer.weight.data_ptr() for tensor in kept if tensor.shape == (16, 32)] == [True]


# The published gpt-oss-20b has 20,914,757,184 with biases, sinks and 201,088 entries, and without norms of queries and
# keys.
@pytest.mark.parametrize(
    ("config", "vocabulary", "expected"),
    [
        (Config(), 128_256, 8_030_261_248),
        (LoraConfig(), 32_000, 68_976_648_192),
        (
            GptOssConfig(),
            128_256,
            20_914_757_184
            - 24 * (5120 + 2880 + 32 + 32 * (5760 + 2880) + 64 - 2 * 64)
            - 2 * 2880 * (201_088 - 128_256),
        ),
    ],
)
def test_published_number_of_parameters(config, vocabulary, expected):
    counted = memory.weights_of(config, vocabulary)
    with torch.device("meta"):
        sizes = {name: weight.numel() for name, weight in Network(config.shape(vocabulary)).named_parameters()}
    assert sum(sizes.values()) == counted.layer * config.layers + counted.outside == expected
    assert sum(size for name, size in sizes.items() if ".0.mlp.experts." in name) == counted.experts


@pytest.mark.parametrize(("window", "length"), [(1, 6), (2, 6), (5, 12), (6, 13), (129, 256), (9, 9)])
def test_windowed_attention_matches_a_mask(window, length):
    torch.manual_seed(0)
    given = [torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = (distance >= 0) & (distance < window)
    expected = functional.scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(attention.windowed(window, *given), expected, rtol=1e-12, atol=1e-12)


def attention_gradients(attend, window, dtype, device="cpu", size=8):
    """Attention output, and the gradients of queries, keys, values and sinks."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 16, size, dtype=dtype, device=device) for heads in (4, 2, 2)]
    inputs = [tensor.requires_grad_() for tensor in (*inputs, torch.randn(4, dtype=dtype, device=device))]
    output = attend(window, *inputs)
    return [output, *torch.autograd.grad(output, inputs, torch.randn_like(output))]


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_flash_attention_with_sinks_has_the_gradients_of_one_more_key(window, dtype, tolerance):
    tensors = (attention_gradients(attend, window, dtype) for attend in (attention.with_sinks, attention.masked))
    for tensor, reference in zip(*tensors):
        limit = tolerance * reference.abs().max().clamp(min=1)
        assert tensor.dtype == dtype and (tensor - reference).abs().max() <= limit


@pytest.mark.parametrize(("fastest", "attend"), [("cudnn", attention.cudnn), ("default", None)])
def test_auto_attention_is_the_kernel_measured_on_the_heads_of_a_rank(fastest, attend, monkeypatch):
    sizes = []

    def fastest_correct(operator, candidates, device, dtype, measured_sizes, time):
        sizes.append(measured_sizes)
        return fastest, "timings"

    config = dataclasses.replace(CONFIG, tensor_parallelism=2, attention="auto")
    on_cpu = SimpleNamespace(context=torch.device("cpu"), rank=0)
    assert attention.choose(config, on_cpu) is None
    on_gpu = dataclasses.replace(config, device="gpu", precision="bf16", attention="cudnn")
    assert attention.choose(on_gpu, on_cpu) is attention.cudnn
    assert attention.choose(dataclasses.replace(on_gpu, context_parallelism=2), on_cpu) is None
    with pytest.raises(ValueError, match="attention=cudnn requires device=gpu and precision=bf16"):
        dataclasses.replace(config, attention="cudnn")
    monkeypatch.setattr(attention.kernels, "fastest_correct", fastest_correct)
    assert attention.choose(config, SimpleNamespace(context=SimpleNamespace(type="cuda"), rank=0)) is attend
    assert sizes == [{"heads": 2, "key_value_heads": 1, "length": 32, "size": 8}]
    assert choices.resolved(config, {})["attention"] == fastest


def test_a_kernel_that_this_device_lacks_is_not_chosen():
    candidates = {"default": lambda: attention.causal, "cudnn": lambda: attention.cudnn}
    sizes = {"heads": 2, "key_value_heads": 1, "length": 32, "size": 8}
    measured = (attention.OPERATOR, candidates, torch.device("cpu"), torch.bfloat16, sizes, kernels.seconds)
    name, timings = kernels.fastest_correct(*measured)
    assert name == "default" and "No viable backend" in timings


def test_windowed_flash_attention_on_a_gpu_has_the_window_in_both_passes():
    # Without a GPU, only the arguments and shapes of the kernels are checked
    inputs = [
        torch.empty(2, heads, 16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (4, 2, 2)
    ]
    with FlashCalls() as calls:
        attn_out = attention.windowed(5, *inputs)
        gradients = torch.autograd.grad(attn_out, inputs, torch.empty_like(attn_out))
    assert [options for _, options in calls.found] == [{"window_size_left": 4, "window_size_right": 0}] * 2
    assert [tuple(tensor.shape) for tensor in (attn_out, *gradients)] == [(2, 4, 16, 64)] * 2 + [(2, 2, 16, 64)] * 2


def test_flops_of_windowed_flash_attention():
    inputs = [torch.empty(1, heads, 1024, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 2, 2)]
    cost = step_cost.count(lambda: attention.windowed(129, *inputs))
    assert (cost.flops, cost.uncounted) == (4 * 8 * 1024 * 129 * 64, ())


@pytest.mark.parametrize("window", [0, 5])
def test_flash_attention_with_sinks_on_a_gpu_has_the_shapes_of_its_inputs(window):
    # Without a GPU, only the arguments and shapes of the kernels are checked
    tensors = attention_gradients(attention.with_sinks, window, torch.bfloat16, "meta", size=64)
    expected = [(2, 4, 16, 64), (2, 4, 16, 64), (2, 2, 16, 64), (2, 2, 16, 64), (4,)]
    assert [tuple(tensor.shape) for tensor in tensors] == expected


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float64, 1e-12)]
)
def test_grouped_products_match_all_experts_on_all_tokens(dtype, tolerance):
    """The latter is exported. Some experts have no token."""
    mixture = Network(GPT_OSS_SHAPE._replace(width=32, inner_width=24, experts=9)).layers[0].mlp
    set_fixed_weights(mixture.parameters(), 0.3)
    hidden = torch.sin(torch.arange(128.0) ** 2).view(1, 4, 32)
    expected = experts.by_all(mixture.double(), hidden.double())
    torch.testing.assert_close(mixture.to(dtype)(hidden.to(dtype)).double(), expected, rtol=tolerance, atol=tolerance)


def test_initial_weights_match_megatron():
    network = Network(SHAPE._replace(width=256, inner_width=512, layers=4, vocabulary=512))
    parallel.initialize(network, 0.02, 1, torch.device("cpu"))
    matrices = {name: weight.detach() for name, weight in network.named_parameters() if weight.ndim > 1}
    for name, weight in matrices.items():
        expected = 0.02 / math.sqrt(8) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        # At least 32,768 samples: the standard error of the deviation is below 0.4 %.
        assert float(weight.std()) == pytest.approx(expected, rel=0.03), name
    assert all(bool((weight == 1).all()) for weight in network.parameters() if weight.ndim == 1)
    assert len({tuple(weight.flatten()[:5].tolist()) for weight in matrices.values()}) == len(matrices)


def test_labels_after_end_of_document_tokens_do_not_count(ranks):
    config = dataclasses.replace(GPT_OSS, eval_batch_size=3)
    tokens = np.random.RandomState(1).randint(8, size=4 * 32 + 1).astype("<u2")
    part = Documents(tokens, np.array([len(tokens)], np.int32), np.zeros(1, np.int64))
    data_set = DataSet(part, part, {}).excluding_labels_after(5)
    samples = order.in_order(part.lengths, 32, 4)
    training = model.Training(config, VOCABULARY, ranks)
    inputs = torch.tensor(tokens[:-1].astype(np.int64)).view(4, 32)
    labels = torch.tensor(tokens[1:].astype(np.int64)).view(4, 32).masked_fill(inputs == 5, IGNORE_INDEX)
    expected = [functional.cross_entropy(training.network(row[None])[0], label) for row, label in zip(inputs, labels)]
    counts = (labels != IGNORE_INDEX).sum(1)
    run = SimpleNamespace(
        ranks=ranks, interrupted=False, interruptible=iter, total=lambda sums, count: sums.tolist()[:2]
    )
    evaluated = gpt_oss.evaluate(training, data_set, samples, run)["log_perplexity"]
    assert evaluated == pytest.approx(float(torch.stack(expected) @ counts.float() / counts.sum()), rel=1e-6)
    loss = gpt_oss.train_step(training, data.step_of(config, data_set.train, samples, ranks, 0), 0.0)
    # Each micro-batch has the same weight, whatever number of labels it has.
    assert float(loss) == pytest.approx(float(torch.stack(expected).mean()), rel=1e-6)


LORA = LoraConfig(
    device="cpu", precision="fp32", max_steps=20, sequence_length=32, layers=2, width=32, heads=4, key_value_heads=2,
    inner_width=48, initial_weights=0.3, batch_size=4, micro_batch=2, learning_rate=0.01, epsilon=1e-3, loss_rows=24,
    lora_rank=4, lora_alpha=8, recompute=False, gradient_clip=1.0,
)  # fmt: skip
LORA_IN_FP8 = {"width": 64, "inner_width": 64, "initial_weights": 0.05, "precision": "bf16", "fp8": "scaled_mm"}
LORA_PLAIN = {**LORA_IN_FP8, "precision": "fp32", "fp8": "none"}
LORA_SHAPE = shapes.Shape(11, 2, 16, 4, 2, 12, 10000.0, shapes.Scaling(), 1e-5)
RULE = adapters.Rule(3, 6, 0.0, 1)
THIRD = torch.tensor(3)  # Number of an adapter


LORA_TOKENS = np.random.RandomState(0).randint(VOCABULARY, size=(40, LORA.sequence_length))
SAMPLES = Samples(LORA_TOKENS, np.ones(LORA_TOKENS.shape, bool))
LORA_TRAINER = Trainer(
    LORA,
    lambda config, ranks: lora.Training(config, VOCABULARY, ranks, None),
    lambda config, ranks, step: lora_data.step_of(config, SAMPLES, ranks, step),
    lora_train.train_step,
)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
PUBLISHED = [(False, "F32"), (True, "BF16")]  # fused projections, and type of the weights


def network_with_adapters(options=()):
    """Return a float64 network with fixed weights, and copies of its base weights and adapters by name."""
    network = Network(LORA_SHAPE, *options)
    adapters.add(network, RULE, 0)
    network.to_empty(device="cpu").double()
    set_fixed_weights(network.parameters(), 0.5)
    weights = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    return network, weights, {name: weights.pop(name) for name in adapters.trained(network)}


@pytest.mark.parametrize("options", [(), (2, 5)])  # recomputed layers, loss rows
def test_adapters_match_merged_weights(options):
    """W + alpha / rank * B A in place of W; tools/parity.py compares the network with peft."""
    network, base, trained = network_with_adapters(options)
    trained = {name: weight.requires_grad_() for name, weight in trained.items()}
    inputs, labels = TOKENS[:18].view(2, 9), TOKENS[1:19].view(2, 9).clone()
    labels[0, :4] = IGNORE_INDEX
    logits = functional_call(Network(LORA_SHAPE).double(), adapters.merged(base, trained, RULE.scale), (inputs,))
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = network(inputs, labels)
    for each in (expected, loss):
        each.backward()
    torch.testing.assert_close((network(inputs), loss), (logits, expected), rtol=1e-12, atol=1e-12)
    gradients = {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}
    expected = {name: weight.grad for name, weight in trained.items()}
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("fused", "products"), [(True, ["qkv"]), (False, ["q", "k", "v"])])
def test_adapter_files_have_pefts_names_and_products(fused, products, tmp_path):
    _, base, trained = network_with_adapters()
    adapters.save(tmp_path, trained, RULE, fused, "llama")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    targets = sorted(f"{product}_proj" for product in [*products, "o"])
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6, targets)
    stored = safetensors.tensors_of(tmp_path / "adapter_model.safetensors")
    merged = adapters.merged(base, trained, RULE.scale)
    for stem in ("layers.0.self_attn", "layers.1.self_attn"):
        names = [f"base_model.model.model.{stem}.{product}_proj.lora" for product in products]
        change = [2 * stored[f"{name}_B.weight"].values @ stored[f"{name}_A.weight"].values for name in names]
        weights = [f"{stem}.{product}_proj.weight" for product in "qkv"]
        expected = torch.cat([merged[name] - base[name] for name in weights])
        assert np.concatenate(change) == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-5)


def write_published(path, base, fused, dtype):
    """Write base weights by their published names; in bf16 as MLPerf's files have them."""
    tensors = {hf_name(name): weight.to(DTYPES[dtype]) for name, weight in base.items()}
    for stem in [f"model.layers.{layer}.self_attn." for layer in range(LORA_SHAPE.layers if fused else 0)]:
        products = [tensors.pop(f"{stem}{product}_proj.weight") for product in "qkv"]
        tensors[f"{stem}qkv_proj.weight"] = torch.cat(products)
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
    file, path = folder / "model-1.safetensors", folder / "model.safetensors.index.json"
    write_published(file, base, fused, dtype)
    path.write_text(json.dumps({"weight_map": dict.fromkeys(safetensors.tensors_of(file), file.name)}))
    config = share_batch(LORA, ranks, width=16, heads=4, inner_width=12, **split)
    training = lora.Training(config, LORA_SHAPE.vocabulary, ranks, path)
    assert training.fused == fused
    stored = {name: weight.to(DTYPES[dtype]).float() for name, weight in base.items()}
    loaded = {name: weight for name, weight in full_weights(training).items() if name in base}
    torch.testing.assert_close(loaded, stored, rtol=0, atol=0)
    local = sum(parallel.local(w).numel() for name, w in training.network.named_parameters() if name in base)
    assert local <= sum(weight.numel() for weight in base.values()) * (0.75 if ranks.size > 1 else 1)
    message = r"gate_proj.weight of \(12, 16\) in model-1.safetensors\n.*expected: .*of \(16, 16\)"
    with pytest.raises(Problem, match=message):
        lora.Training(dataclasses.replace(config, inner_width=16), LORA_SHAPE.vocabulary, ranks, path)


@pytest.mark.parametrize(("fused", "dtype"), PUBLISHED)
def test_published_weights_are_read(fused, dtype, ranks, tmp_path):
    check_published_weights_are_read(ranks, tmp_path, fused, dtype)


def test_dropout_depends_only_on_sample_position_and_layer():
    full, part = (adapters.Dropout(RULE._replace(dropout=0.25), rank) for rank in (0, 1))
    ones, positions = torch.ones(2, 64, 32), torch.arange(64)
    for dropout, own_positions in ((full, positions), (part, positions[5:9])):
        dropout.samples, dropout.positions = torch.tensor([7, 8]), own_positions
    dropped, next_layer = full.of(ones, THIRD, 32), full.of(ones, THIRD + 1, 32)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    # 4,096 draws with fixed seeds: the standard error is 0.007.
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert not torch.equal(dropped, next_layer) and not torch.equal(*dropped)
    assert torch.equal(part.of(ones[:, 5:9, 16:], THIRD, 32), dropped[:, 5:9, 16:])


def test_dropout_masks_are_independent():
    # Over samples, adapters, seeds, positions and features; the standard error of a correlation of 2 ** 16 draws is
    # 0.004.
    samples, positions, features = torch.tensor([0, 1, 2, 1 << 20]), torch.arange(256), torch.arange(256)
    masks = [
        adapters.dropout_mask(samples, torch.tensor(number), positions, features, seed, 0.9)
        for seed in (0, 1, 1 << 32)
        for number in (0, 1, 159)
    ]
    centred = (torch.cat(masks).float() - 0.9) / 0.3
    assert centred.mean().abs() < 0.003
    products = centred.flatten(1) @ centred.flatten(1).t() / (1 << 16)
    assert products.fill_diagonal_(0).abs().max() < 0.02
    for shift in (1, 2, 64):
        for axis in (1, 2):
            assert (centred * centred.roll(shift, axis)).mean((1, 2)).abs().max() < 0.02


def test_only_adapters_train_with_dropout_and_resume(ranks, together):
    initial, (training, losses) = full_weights(LORA_TRAINER.new(ranks)), LORA_TRAINER.train(ranks)
    changed = {name for name, weight in full_weights(training).items() if not torch.equal(weight, initial[name])}
    assert changed == set(training.state_dict()["parts"]) == {name for name in initial if "lora" in name}
    assert losses != LORA_TRAINER.train(ranks, lora_dropout=0.0)[1]
    LORA_TRAINER.assert_splits_train_alike([{"recompute": True}], ranks, atol=5e-6)
    LORA_TRAINER.assert_splits_resume([{}], ranks, together)


def check_fp8_weights(training, network):
    """Compare stored weights with the originals: E4M3 has three bits after the first, its smallest step is 2^-9."""
    for name, original in network.named_parameters():
        parameter = training.network.get_parameter(name).detach()
        local, expected = parallel.local(parameter), original.detach()[parallel.share(parameter)]
        if local.dtype == torch.uint8:
            scale = training.network.get_submodule(name.rpartition(".")[0]).scale
            error = (local.view(torch.float8_e4m3fn).float() * scale - expected).abs()
            assert bool((error <= torch.maximum(expected.abs() / 16, scale * 2.0**-9)).all()), name


def check_fp8_base_trains(ranks, **split):
    """Also used on two ranks."""
    training, losses = LORA_TRAINER.train(ranks, **LORA_IN_FP8, **split)
    single, expected = LORA_TRAINER.train(one_rank(ranks), **LORA_PLAIN)
    assert losses == pytest.approx(expected, rel=0.01) and losses != expected
    in_fp8 = [name for name, w in training.network.named_parameters() if w.dtype == torch.uint8]
    assert len(in_fp8) == 2 * 7 and not any("lora" in name for name in in_fp8)
    check_fp8_weights(training, single.network)


def test_training_with_a_base_in_fp8_is_close_to_fp32(ranks):
    check_fp8_base_trains(ranks, recompute=True)


def check_published_weights_in_fp8(ranks, folder):
    """Also used on two ranks."""
    single, path = LORA_TRAINER.new(one_rank(ranks), **LORA_PLAIN), folder / "model.safetensors"
    weights = {hf_name(k): v.detach().numpy() for k, v in single.network.named_parameters() if "lora" not in k}
    safetensors.write(path, weights)
    config = share_batch(LORA, ranks, **LORA_IN_FP8, tensor_parallelism=ranks.size)
    check_fp8_weights(lora.Training(config, VOCABULARY, ranks, path), single.network)


def test_published_weights_are_stored_in_fp8(ranks, tmp_path):
    check_published_weights_in_fp8(ranks, tmp_path)
