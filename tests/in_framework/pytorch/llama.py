"""Llama and gpt-oss on one rank: networks with recorded values, cached steps, memory formulas and initial weights."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.gpt_oss_20b.pytorch import train as gpt_oss
from benchmarks.gpt_oss_20b.pytorch.config import Config as GptOssConfig
from benchmarks.llama import memory, order
from benchmarks.llama.dataset import DataSet
from benchmarks.llama.megatron import Documents
from benchmarks.llama.pytorch import fp8, parallel
from benchmarks.llama.pytorch.attention import masked, windowed, with_sinks
from benchmarks.llama.pytorch.data import step_of
from benchmarks.llama.pytorch.experts import by_all, chosen_experts
from benchmarks.llama.pytorch.model import Training
from benchmarks.llama.pytorch.network import IGNORE_INDEX, ComputeOptions, Network, rope_cos_sin, rope_frequencies
from benchmarks.llama.pytorch.state import adamw
from benchmarks.llama.shapes import Scaling, Shape
from benchmarks.llama31_8b.pytorch.config import Config
from benchmarks.llama31_8b.pytorch.train import train_step
from tests.in_framework.splits import Trainer, assert_steps_match, random_batch, saved_by_layers
from tests.in_framework.torch_checks import gradient_projection, projection, set_fixed_weights

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
SHAPE = Shape(11, 2, 16, 4, 2, 12, 10000.0, Scaling(8.0, 1.0, 4.0, 16), 1e-5)
MIXTURE = {"experts": 4, "chosen": 2, "gate": "gpt_oss", "window": 4, "sinks": True}
GPT_OSS_SHAPE = Shape(11, 2, 16, 4, 2, 12, 10000.0, Scaling(), 1e-5, head_size=6, **MIXTURE)
TOKENS = torch.tensor([0, 7, 5, 6, 9, 3, 0, 10, 0, 4, 10, 8, 8, 10, 4, 0, 10, 0, 3, 9, 6, 5, 7, 0, 7, 5])
TRAINER, GPT_OSS_TRAINER = (
    Trainer(
        config,
        lambda config, ranks: Training(config, VOCABULARY, ranks),
        lambda config, ranks, step: random_batch(config, VOCABULARY, ranks, step),
        step,
    )
    for config, step in ((CONFIG, train_step), (GPT_OSS, gpt_oss.train_step))
)


# LlamaForCausalLM and GptOssForCausalLM of transformers 4.57.1 with norms in float64. Rotary frequencies of Llama are
# fp32 as well; gpt-oss is eager, with biases 0, softmax in float64 and a window of 4.
@pytest.mark.parametrize("options", [ComputeOptions(), ComputeOptions(2, loss_rows=5)])
@pytest.mark.parametrize(
    ("shape", "scale", "length", "ignored", "expected"),
    [
        (SHAPE, 0.8, 9, slice(3, 4), [4.029268095, 56.94583103, -51.3392618]),
        (GPT_OSS_SHAPE, 1.2, 12, slice(0), [-16.70354684, 102.8106046, 147.8012757]),
        (GPT_OSS_SHAPE, 1.2, 3, slice(0), [5.105972512, 23.42863028, -167.7032764]),
    ],
)
def test_logits_loss_and_gradients_match_transformers(options, shape, scale, length, ignored, expected):
    network = Network(shape, options).double()
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


def test_norms_of_queries_and_keys():
    """qk_layernorm of Megatron: RMSNorm over the values of a head, the same weights for all heads, before RoPE."""
    network = Network(GPT_OSS_SHAPE._replace(qk_norm=True)).double()
    set_fixed_weights(network.parameters(), 0.8)
    attention, hidden = network.layers[0].self_attn, torch.sin(torch.arange(48.0).double()).view(1, 3, 16)
    no_rotation = rope_cos_sin(torch.zeros(3), network.shape)
    for states, product, norm in zip(
        attention.project_qkv(hidden, no_rotation), "qk", (attention.q_norm, attention.k_norm)
    ):
        heads = getattr(attention, f"{product}_proj")(hidden).view(3, -1, 6)
        expected = heads / (heads.square().mean(-1, keepdim=True) + SHAPE.epsilon).sqrt() * norm.weight
        torch.testing.assert_close(states[0].transpose(0, 1), expected)
    groups = adamw(dict(network.named_parameters()), GPT_OSS).param_groups
    (decay,) = {group["weight_decay"] for group in groups for weight in group["params"] if weight.shape == (6,)}
    assert decay == 0.0


def test_router_in_bf16():
    mixture = Network(GPT_OSS_SHAPE._replace(router_dtype="bf16")).layers[0].mlp
    set_fixed_weights(mixture.parameters(), 0.3)
    hidden = torch.sin(torch.arange(64.0) ** 2).view(1, 4, 16)
    logits, experts, shares = chosen_experts(mixture, hidden)
    expected = (hidden.bfloat16() @ mixture.router.weight.bfloat16().T).float()
    assert logits.dtype == torch.bfloat16 and torch.equal(logits.float(), expected)
    torch.testing.assert_close(shares, expected.gather(-1, experts).softmax(-1))


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (Scaling(), [1, 0.19392276, 0.037606031, 7.2926651e-3, 1.4142134e-3, 2.7424819e-4, 5.3182957e-5, 1.0313385e-5]),
        (
            Scaling(8.0, 1.0, 4.0, 16),
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
            Scaling(8.0, 1.0, 4.0, 8192),
            [1, 0.19392276, 0.037606031, 7.2926651e-3, 5.2484602e-4, 3.4281024e-5, 6.6478697e-6, 1.2891732e-6],
        ),
    ],
)
def test_rotary_frequencies_match_transformers(scaling, expected):
    """Every eighth of _compute_llama3_parameters of transformers 4.57.1 for heads of 128 values."""
    assert rope_frequencies(128, 500000.0, scaling)[::8].tolist() == pytest.approx(expected, rel=2e-6)


def test_checkpoints_resume_bit_for_bit(ranks, together):
    TRAINER.assert_splits_resume([{}], ranks, together)


def test_fp8_is_rejected_if_unsupported(ranks, monkeypatch):
    monkeypatch.delattr(torch, "_scaled_mm")
    with pytest.raises(Problem, match=r"fp8=scaled_mm: PyTorch .* has no FP8"):
        TRAINER.new(ranks, **IN_FP8)


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
        (LLAMA_MEMORY, {"precision": "bf16", "fp8": "scaled_mm"}, 0.05),
        (GPT_OSS_MEMORY, {}, 0.1),
        (GPT_OSS_MEMORY, {"recompute": True}, 0.1),
    ],
)
def test_activation_memory_matches_the_formula(config, changes, tolerance, ranks):
    config = dataclasses.replace(config, **changes)
    network = Network(config.shape(VOCABULARY), ComputeOptions.of(config)).to(pytorch.DTYPES[config.precision])
    if config.fp8 != "none":
        fp8.set_up(network, config.fp8, ranks)
    measured = saved_by_layers(network, torch.zeros(2, 64, dtype=torch.int64), torch.arange(64))
    # Only on a CPU: RMSNorm also saves its scaled input, in fp32, and the attention output is copied for the GEMM.
    per_position = config.width * 4 if config.recompute else config.activation_bytes() + config.width * 12
    assert measured == pytest.approx(128 * 6 * per_position, rel=tolerance)


# The published gpt-oss-20b has 20,914,757,184 with biases, sinks and 201,088 entries, and without norms of queries and
# keys.
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), 8_030_261_248),
        (
            GptOssConfig(),
            20_914_757_184
            - 24 * (5120 + 2880 + 32 + 32 * (5760 + 2880) + 64 - 2 * 64)
            - 2 * 2880 * (201_088 - 128_256),
        ),
    ],
)
def test_published_number_of_parameters(config, expected):
    counted = memory.weights_of(config, 128256)
    with torch.device("meta"):
        sizes = {name: weight.numel() for name, weight in Network(config.shape(128256)).named_parameters()}
    assert sum(sizes.values()) == counted.layer * config.layers + counted.outside == expected
    assert sum(size for name, size in sizes.items() if ".0.mlp.experts." in name) == counted.experts


@pytest.mark.parametrize(("window", "length"), [(1, 6), (2, 6), (5, 12), (6, 13), (129, 256), (9, 9)])
def test_windowed_attention_matches_a_mask(window, length):
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = (distance >= 0) & (distance < window)
    expected = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(windowed(window, queries, keys, values), expected, rtol=1e-12, atol=1e-12)


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
    actual, expected = (attention_gradients(attend, window, dtype) for attend in (with_sinks, masked))
    for tensor, reference in zip(actual, expected):
        limit = tolerance * reference.abs().max().clamp(min=1)
        assert tensor.dtype == dtype and (tensor - reference).abs().max() <= limit


@pytest.mark.parametrize("window", [0, 5])
def test_flash_attention_with_sinks_on_a_gpu_has_the_shapes_of_its_inputs(window):
    # Without a GPU, only the arguments and shapes of the kernels are checked
    output, *gradients = attention_gradients(with_sinks, window, torch.bfloat16, "meta", size=64)
    shapes = [tuple(tensor.shape) for tensor in (output, *gradients)]
    assert shapes == [(2, 4, 16, 64), (2, 4, 16, 64), (2, 2, 16, 64), (2, 2, 16, 64), (4,)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float64, 1e-12)]
)
def test_grouped_products_match_all_experts_on_all_tokens(dtype, tolerance):
    """The latter is exported. Some experts have no token."""
    mixture = Network(GPT_OSS_SHAPE._replace(width=32, inner_width=24, experts=9)).layers[0].mlp
    set_fixed_weights(mixture.parameters(), 0.3)
    hidden = torch.sin(torch.arange(128.0) ** 2).view(1, 4, 32)
    expected = by_all(mixture.double(), hidden.double())
    output = mixture.to(dtype)(hidden.to(dtype))
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    output.square().sum().backward()
    assert 2 <= sum(bool(gradient.any()) for gradient in mixture.experts.down_proj.grad) < 9


def test_weight_decay_excludes_norms():
    groups = adamw(dict(Network(SHAPE).named_parameters()), CONFIG).param_groups
    summary = [(group["weight_decay"], {weight.ndim for weight in group["params"]}) for group in groups]
    assert summary == [(0.1, {2}), (0.0, {1})]
    assert sum(len(group["params"]) for group in groups) == 21


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
    logits = network(torch.zeros(1, 4, dtype=torch.int64))[0]
    assert functional.cross_entropy(logits, torch.zeros(4, dtype=torch.int64)) < 7


def test_labels_after_end_of_document_tokens_do_not_count(ranks):
    config = dataclasses.replace(GPT_OSS, eval_batch_size=3)
    tokens = np.random.RandomState(1).randint(8, size=4 * 32 + 1).astype("<u2")
    part = Documents(tokens, np.array([len(tokens)], np.int32), np.zeros(1, np.int64))
    data_set = DataSet(part, part, {}).excluding_labels_after(5)
    samples = order.in_order(part.lengths, 32, 4)
    training = Training(config, VOCABULARY, ranks)
    inputs = torch.tensor(tokens[:-1].astype(np.int64)).view(4, 32)
    labels = torch.tensor(tokens[1:].astype(np.int64)).view(4, 32).masked_fill(inputs == 5, IGNORE_INDEX)
    expected = [functional.cross_entropy(training.network(row[None])[0], label) for row, label in zip(inputs, labels)]
    counts = (labels != IGNORE_INDEX).sum(1)
    run = SimpleNamespace(
        ranks=ranks, interrupted=False, interruptible=iter, total=lambda sums, count: sums.tolist()[:2]
    )
    evaluated = gpt_oss.evaluate(training, data_set, samples, run)["log_perplexity"]
    assert evaluated == pytest.approx(float(torch.stack(expected) @ counts.float() / counts.sum()), rel=1e-6)
    loss = gpt_oss.train_step(training, step_of(config, data_set.train, samples, ranks, 0), 0.0)
    assert float(loss) == pytest.approx(float(torch.stack(expected).mean()), rel=1e-6)
    assert len(set(counts.tolist())) > 1, "each micro-batch has the same weight, whatever number of labels it has"
