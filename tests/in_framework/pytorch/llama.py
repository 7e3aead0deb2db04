"""Llama on one rank: its network with recorded values, cached steps, memory formulas and initial weights."""

import math

import pytest
import torch
from torch.nn import functional

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.llama import memory
from benchmarks.llama.pytorch import fp8, parallel
from benchmarks.llama.pytorch.model import Training
from benchmarks.llama.pytorch.network import IGNORE_INDEX, ComputeOptions, Network, rope_frequencies
from benchmarks.llama.pytorch.state import adamw
from benchmarks.llama.shapes import Scaling, Shape
from benchmarks.llama31_8b.pytorch.config import Config
from benchmarks.llama31_8b.pytorch.train import train_step
from tests.in_framework.activations import kept_by_layers
from tests.in_framework.fixed_weights import gradient_projection, projection, set_fixed_weights
from tests.in_framework.splits import Trainer, assert_steps_match, one_rank, random_batch

VOCABULARY = 96
OPTIONS = {
    "device": "cpu", "precision": "fp32", "max_steps": 20, "sequence_length": 32, "layers": 2, "width": 32, "heads": 4,
    "key_value_heads": 2, "inner_width": 48, "rope_base": 10000.0, "rope_context": 16, "initial_weights": 0.3,
    "batch_size": 4, "micro_batch": 2, "learning_rate": 0.01, "end_learning_rate": 0.001, "warmup_steps": 2,
    "epsilon": 1e-3, "loss_rows": 24,
}  # fmt: skip
CONFIG = Config(**OPTIONS)
IN_FP8 = {
    "precision": "bf16", "fp8": "scaled_mm", "layers": 1, "width": 64, "inner_width": 64, "initial_weights": 0.05,
    "gradient_clip": 1e9,
}  # fmt: skip
SHAPE = Shape(11, 2, 16, 4, 2, 12, 10000.0, Scaling(8.0, 1.0, 4.0, 16), 1e-5)
TRAINER = Trainer(
    lambda config, ranks: Training(config, VOCABULARY, ranks),
    lambda config, ranks, step: random_batch(config, VOCABULARY, ranks, step),
    train_step,
)


@pytest.mark.parametrize("options", [ComputeOptions(), ComputeOptions(2, loss_rows=5)])
def test_logits_loss_and_gradients_match_transformers(options):
    """LlamaForCausalLM of transformers 4.57.1 with norms in float64; its rotary frequencies are fp32 as well."""
    network = Network(SHAPE, options).double()
    set_fixed_weights(network.parameters(), 0.8)
    tokens = torch.tensor([[0, 7, 5, 6, 9, 3, 0, 10, 0, 4], [10, 8, 8, 10, 4, 0, 10, 0, 3, 9]])
    labels = tokens[:, 1:].clone()
    labels[0, 3] = IGNORE_INDEX
    loss = network(tokens[:, :-1], labels)
    loss.backward()
    values = [projection(network(tokens[:, :-1])), loss.item(), gradient_projection(network.parameters())]
    assert values == pytest.approx([4.029268095, 56.94583103, -51.3392618], rel=1e-6)


def test_cached_steps_match_the_network():
    network = Network(SHAPE).double()
    set_fixed_weights(network.parameters(), 0.5)
    assert_steps_match(network, torch.tensor([[0, 7, 5, 6, 9, 3, 0, 10, 0], [10, 8, 8, 10, 4, 0, 10, 0, 3]]))


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
    TRAINER.assert_splits_resume(CONFIG, ({},), ranks, together)


def test_fp8_is_rejected_if_unsupported(ranks, monkeypatch):
    monkeypatch.delattr(torch, "_scaled_mm")
    with pytest.raises(Problem, match=r"fp8=scaled_mm: PyTorch .* has no FP8"):
        Training(Config(**{**OPTIONS, **IN_FP8}), VOCABULARY, ranks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp32"}, "fp8 needs precision=bf16"),
        ({"tensor_parallelism": 2, "inner_width": 48}, "fp8 needs shares of 16"),
        ({"context_parallelism": 2, "sequence_length": 16}, "fp8 needs shares of 16"),
    ],
)
def test_invalid_fp8_configurations(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**{**OPTIONS, **IN_FP8, **settings})


@pytest.mark.parametrize("settings", [{}, {"recompute": True}, {"precision": "bf16", "fp8": "scaled_mm"}])
def test_activation_memory_matches_the_formula(settings, ranks):
    config = Config(**{**OPTIONS, "layers": 6, "width": 64, "inner_width": 160, "sequence_length": 64, **settings})
    network = Network(config.shape(VOCABULARY), ComputeOptions.of(config)).to(pytorch.DTYPES[config.precision])
    if config.fp8 != "none":
        fp8.set_up(network, config.fp8, one_rank(ranks).context)
    measured = kept_by_layers(network, torch.zeros(2, 64, dtype=torch.int64), torch.arange(64))
    # Only on a CPU: RMSNorm also saves its scaled input, in fp32, and the attention output is copied for the GEMM.
    extra = config.width * (0 if config.recompute else 12)
    saved = config.width * 4 if config.recompute else config.kept()
    assert measured == pytest.approx(128 * 6 * (extra + saved), rel=0.05)


def test_8b_has_the_published_number_of_parameters():
    counted = memory.weights_of(Config(), 128256)
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in Network(Config().shape(128256)).parameters())
    assert parameters == counted.layer * 32 + counted.outside == 8_030_261_248


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
