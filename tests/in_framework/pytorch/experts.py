"""gpt-oss against a plain float64 formula; windows, grouped products, what it keeps and how many weights it has."""

import dataclasses

import pytest
import torch

from benchmarks.gpt_oss_20b.pytorch.config import Config
from benchmarks.llama import memory
from benchmarks.llama.pytorch.attention import windowed
from benchmarks.llama.pytorch.experts import by_all
from benchmarks.llama.pytorch.network import How, Network, published_name, rotated, rotation
from benchmarks.llama.shapes import Scaling, Shape
from tests.in_framework.activations import kept_by_layers
from tests.in_framework.splits import steps_are_those_of

VOCABULARY = 96
CONFIG = Config(
    device="cpu", precision="fp32", max_steps=20, sequence_length=32, layers=2, width=32, heads=4, key_value_heads=2,
    head_size=12, window=9, sinks=True, experts=4, chosen_experts=2, inner_width=24, gate="gpt_oss", rope_base=10000.0,
    initial_weights=0.3, batch_size=4, micro_batch=1, expert_parallelism=1, learning_rate=0.01,
    end_learning_rate=0.001, warmup_steps=2, epsilon=1e-3, loss_rows=24,
)  # fmt: skip


# -- a plain network: one sequence, one head, one position and one expert after the other ------------------


def plain_attention(of, normal, shape, window):
    length, shared = len(normal), shape.heads // shape.key_value_heads
    projected = [(normal @ of[f"self_attn.{name}_proj.weight"].t()).unflatten(-1, (-1, shape.size)) for name in "qkv"]
    by = rotation(torch.arange(length), shape)
    queries, keys = (rotated(each.transpose(0, 1)[None], by)[0] for each in projected[:2])
    rows = []
    for position in range(length):
        seen = slice(max(0, position + 1 - (window or length)), position + 1)
        heads = []
        for head in range(shape.heads):
            scores = keys[head // shared, seen] @ queries[head, position] / shape.size**0.5
            chances = torch.cat([scores, of["self_attn.sinks"][head : head + 1]]).softmax(0)[:-1]
            heads.append(chances @ projected[2][seen, head // shared])
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ of["self_attn.o_proj.weight"].t()


def plain_mixture(of, row, shape):
    logits = of["mlp.router.weight"] @ row
    chosen = sorted(range(shape.experts), key=lambda number: -float(logits[number].detach()))[: shape.chosen]
    found = 0
    for number, share in zip(chosen, logits[chosen].softmax(0)):
        both = row @ of["mlp.experts.gate_up_proj"][number]
        gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
        found = found + share * ((up + 1) * gate / (1 + (-1.702 * gate).exp())) @ of["mlp.experts.down_proj"][number]
    return found


def plain_logits(weights, shape, tokens):
    hidden = weights["model.embed_tokens.weight"][tokens]

    def normal(name):
        return hidden / (hidden.square().mean(-1, keepdim=True) + shape.epsilon).sqrt() * name

    for number in range(shape.layers):
        of = {name.split(f"layers.{number}.")[1]: each for name, each in weights.items() if f"layers.{number}." in name}
        hidden = hidden + plain_attention(
            of, normal(of["input_layernorm.weight"]), shape, [shape.window, 0][number % 2]
        )
        rows = normal(of["post_attention_layernorm.weight"])
        hidden = hidden + torch.stack([plain_mixture(of, row, shape) for row in rows])
    return normal(weights["model.norm.weight"]) @ weights["lm_head.weight"].t()


SHAPE = Shape(
    11,
    2,
    16,
    4,
    2,
    12,
    10000.0,
    Scaling(),
    1e-5,
    head_size=6,
    experts=4,
    chosen=2,
    gate="gpt_oss",
    window=4,
    sinks=True,
)


@pytest.mark.parametrize("how", [How(), How(recompute=True, loss_rows=5)])
@pytest.mark.parametrize("length", [12, 7, 3])
def test_logits_loss_and_gradients_are_those_of_a_plain_formula(how, length):
    """Within 1e-12 in float64; transformers' GptOssForCausalLM was compared in the same way, see README.md."""
    torch.manual_seed(length)
    network = Network(SHAPE, how).double()
    for each in network.parameters():
        torch.nn.init.normal_(each, std=0.5)
    tokens = torch.randint(SHAPE.vocabulary, (2, length + 1))
    plain = {published_name(name): each.detach().clone().requires_grad_() for name, each in network.named_parameters()}
    logits = torch.stack([plain_logits(plain, SHAPE, row[:-1]) for row in tokens])
    expected = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum()
    expected.backward()
    loss = network(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    torch.testing.assert_close(network(tokens[:, :-1]), logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, each in network.named_parameters():
        torch.testing.assert_close(each.grad, plain[published_name(name)].grad, rtol=1e-10, atol=1e-11)


def test_steps_with_a_cache_are_the_network():
    torch.manual_seed(2)
    network = Network(SHAPE).double()
    for each in network.parameters():
        torch.nn.init.normal_(each, std=0.3)
    steps_are_those_of(network, torch.randint(SHAPE.vocabulary, (2, 9)))


@pytest.mark.parametrize(("window", "length"), [(1, 6), (2, 6), (5, 12), (6, 13), (129, 256), (9, 9)])
def test_a_window_is_that_of_a_mask(window, length):
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = (distance >= 0) & (distance < window)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(windowed(window, queries, keys, values), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float64, 1e-12)])
def test_grouped_products_are_those_of_each_expert(kind, near):
    """Also where an expert has no token, and as all experts compute all tokens, which is what is exported."""
    torch.manual_seed(0)
    mixture = Network(SHAPE._replace(width=32, inner_width=24, experts=9)).layers[0].mlp
    for each in mixture.parameters():
        torch.nn.init.normal_(each, std=0.2)
    hidden = torch.randn(1, 4, 32)
    exact = by_all(mixture.double(), hidden.double())
    found = mixture.to(kind)(hidden.to(kind))
    torch.testing.assert_close(found.double(), exact, rtol=near, atol=near)
    found.square().sum().backward()
    touched = [bool(each.any()) for each in mixture.experts.down_proj.grad]
    assert 2 <= sum(touched) < 9


# -- formulas ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"recompute": True}])
def test_activations_are_those_of_the_formula(how):
    sizes = {"layers": 6, "width": 64, "inner_width": 80, "sequence_length": 64, "sinks": False, "window": 0}
    config = dataclasses.replace(CONFIG, gate="silu", **sizes, **how)
    network = Network(config.shape(VOCABULARY), How(config.recompute))
    kept = kept_by_layers(network, torch.zeros(2, 64, dtype=torch.int64), torch.arange(64))
    more = config.width * (0 if config.recompute else 12)  # a CPU's, as of Llama
    expected = 128 * 6 * (more + (config.width * 4 if config.recompute else config.kept()))
    assert kept == pytest.approx(expected, rel=0.1)


def test_parameters_are_those_of_20b():
    counted = memory.weights_of(Config(), 128256)
    with torch.device("meta"):
        network = Network(Config().shape(128256))
    weights = sum(each.numel() for each in network.parameters())
    # The published gpt-oss-20b has 20,914,757,184 with biases, sinks and 201,088 entries.
    more = 24 * (5120 + 2880 + 32 + 32 * (5760 + 2880) + 64) + 2 * 2880 * (201_088 - 128_256)
    assert weights == counted.layer * 24 + counted.outside == 20_914_757_184 - more
    assert counted.experts == sum(each.numel() for each in network.layers[0].mlp.experts.parameters())
