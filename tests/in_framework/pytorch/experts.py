"""gpt-oss on one rank: its network with recorded values, windows, grouped products and memory formulas."""

import dataclasses

import pytest
import torch

from benchmarks.gpt_oss_20b.pytorch.config import Config
from benchmarks.llama import memory
from benchmarks.llama.pytorch.attention import windowed
from benchmarks.llama.pytorch.experts import by_all, chosen_experts
from benchmarks.llama.pytorch.network import ComputeOptions, Network, rope_cos_sin
from benchmarks.llama.pytorch.state import adamw
from benchmarks.llama.shapes import Scaling, Shape
from tests.in_framework.activations import kept_by_layers
from tests.in_framework.fixed_weights import gradient_projection, projection, set_fixed_weights
from tests.in_framework.splits import assert_steps_match

VOCABULARY = 96
CONFIG = Config(
    device="cpu", precision="fp32", max_steps=20, sequence_length=32, layers=2, width=32, heads=4, key_value_heads=2,
    head_size=12, window=9, sinks=True, experts=4, chosen_experts=2, inner_width=24, gate="gpt_oss", rope_base=10000.0,
    initial_weights=0.3, batch_size=4, micro_batch=1, expert_parallelism=1, learning_rate=0.01,
    end_learning_rate=0.001, warmup_steps=2, epsilon=1e-3, loss_rows=24, qk_norm=False, router_dtype="fp32",
)  # fmt: skip
MIXTURE = {"experts": 4, "chosen": 2, "gate": "gpt_oss", "window": 4, "sinks": True}
SHAPE = Shape(11, 2, 16, 4, 2, 12, 10000.0, Scaling(), 1e-5, head_size=6, **MIXTURE)
TOKENS = torch.tensor([0, 7, 5, 6, 9, 3, 0, 10, 0, 4, 10, 8, 8, 10, 4, 0, 10, 0, 3, 9, 6, 5, 7, 0, 7, 5])


@pytest.mark.parametrize("options", [ComputeOptions(), ComputeOptions(2, loss_rows=5)])
@pytest.mark.parametrize(
    ("length", "expected"),
    [(12, [-16.70354684, 102.8106046, 147.8012757]), (3, [5.105972512, 23.42863028, -167.7032764])],
)
def test_logits_loss_and_gradients_match_transformers(options, length, expected):
    """GptOssForCausalLM of transformers 4.57.1: eager, biases 0, norms and softmax in float64; a window of 4."""
    network = Network(SHAPE, options).double()
    set_fixed_weights(network.parameters(), 1.2)
    tokens = TOKENS[: 2 * length + 2].view(2, length + 1)
    loss = network(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    values = [projection(network(tokens[:, :-1])), loss.item(), gradient_projection(network.parameters())]
    assert values == pytest.approx(expected, rel=1e-6)


def test_norms_of_queries_and_keys():
    """qk_layernorm of Megatron: RMSNorm over the values of a head, the same weights for all heads, before RoPE."""
    network = Network(SHAPE._replace(qk_norm=True)).double()
    set_fixed_weights(network.parameters(), 0.8)
    attention, hidden = network.layers[0].self_attn, torch.sin(torch.arange(48.0).double()).view(1, 3, 16)
    no_rotation = rope_cos_sin(torch.zeros(3), network.shape)
    for states, product, norm in zip(
        attention.project_qkv(hidden, no_rotation), "qk", (attention.q_norm, attention.k_norm)
    ):
        heads = getattr(attention, f"{product}_proj")(hidden).view(3, -1, 6)
        expected = heads / (heads.square().mean(-1, keepdim=True) + SHAPE.epsilon).sqrt() * norm.weight
        torch.testing.assert_close(states[0].transpose(0, 1), expected)
    groups = adamw(dict(network.named_parameters()), CONFIG).param_groups
    (decay,) = {group["weight_decay"] for group in groups for weight in group["params"] if weight.shape == (6,)}
    assert decay == 0.0


def test_router_in_bf16():
    mixture = Network(SHAPE._replace(router_dtype="bf16")).layers[0].mlp
    set_fixed_weights(mixture.parameters(), 0.3)
    hidden = torch.sin(torch.arange(64.0) ** 2).view(1, 4, 16)
    logits, experts, shares = chosen_experts(mixture, hidden)
    expected = (hidden.bfloat16() @ mixture.router.weight.bfloat16().T).float()
    assert logits.dtype == torch.bfloat16 and torch.equal(logits.float(), expected)
    torch.testing.assert_close(shares, expected.gather(-1, experts).softmax(-1))


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "router_dtype": "bf16"}])
def test_cached_steps_match_the_network(options):
    network = Network(SHAPE._replace(**options)).double()
    set_fixed_weights(network.parameters(), 0.5)
    assert_steps_match(network, TOKENS[:18].view(2, 9))


@pytest.mark.parametrize(("window", "length"), [(1, 6), (2, 6), (5, 12), (6, 13), (129, 256), (9, 9)])
def test_windowed_attention_matches_a_mask(window, length):
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = (distance >= 0) & (distance < window)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(windowed(window, queries, keys, values), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float64, 1e-12)]
)
def test_grouped_products_match_all_experts_on_all_tokens(dtype, tolerance):
    """The latter is exported. Some experts have no token."""
    mixture = Network(SHAPE._replace(width=32, inner_width=24, experts=9)).layers[0].mlp
    set_fixed_weights(mixture.parameters(), 0.3)
    hidden = torch.sin(torch.arange(128.0) ** 2).view(1, 4, 32)
    expected = by_all(mixture.double(), hidden.double())
    output = mixture.to(dtype)(hidden.to(dtype))
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    output.square().sum().backward()
    assert 2 <= sum(bool(gradient.any()) for gradient in mixture.experts.down_proj.grad) < 9


@pytest.mark.parametrize("recompute", [False, True])
def test_activation_memory_matches_the_formula(recompute):
    sizes = {"layers": 6, "width": 64, "inner_width": 80, "sequence_length": 64, "sinks": False, "window": 0}
    config = dataclasses.replace(CONFIG, gate="silu", recompute=recompute, **sizes)
    network = Network(config.shape(VOCABULARY), ComputeOptions.of(config))
    measured = kept_by_layers(network, torch.zeros(2, 64, dtype=torch.int64), torch.arange(64))
    extra = 0 if recompute else config.width * 12  # on a CPU, as for Llama
    assert measured == pytest.approx(128 * 6 * (extra + (config.width * 4 if recompute else config.kept())), rel=0.1)


def test_20b_has_the_published_number_of_parameters():
    counted = memory.weights_of(Config(), 128256)
    with torch.device("meta"):
        network = Network(Config().shape(128256))
    parameters = sum(weight.numel() for weight in network.parameters())
    # The published gpt-oss-20b has 20,914,757,184 with biases, sinks and 201,088 entries.
    extra = 24 * (5120 + 2880 + 32 + 32 * (5760 + 2880) + 64) + 2 * 2880 * (201_088 - 128_256)
    extra -= 24 * 2 * 64  # norms of queries and keys
    assert parameters == counted.layer * 24 + counted.outside == 20_914_757_184 - extra
    assert counted.experts == sum(weight.numel() for weight in network.layers[0].mlp.experts.parameters())
