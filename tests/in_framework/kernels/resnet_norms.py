"""ResNet's batch-norm with ReLU as operators that torch.compile leaves as they are, in Triton's interpreter."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet.pytorch import kernels, model, operators
from benchmarks.resnet.pytorch.config import Config

CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
CONFIG = Config(
    device="cpu", precision="fp32", layout="NHWC", depth=18, image_size=32, batch_size=4, num_classes=10,
    compile="none", cuda_graph=False, kernels="triton", seed=3,
)  # fmt: skip
FUSED = operators.OperatorSet({"norm relu": "triton"}, kernels.norm_relu)


def trained(network, images, wrap=lambda module: module):
    """Loss, gradients and statistics of one pass."""
    network.zero_grad()
    loss = model.smoothed_loss(wrap(network)(images), torch.arange(len(images)), 0.1)
    loss.backward()
    tensors = [parameter.grad.clone() for parameter in network.parameters()]
    return [loss.detach(), *tensors, *(each.clone() for each in network.buffers())]


def network_of(chosen):
    network = model.to_device(model.build(CONFIG), CONFIG, CPU.context)
    model.set_operators(network, chosen)
    return network


def test_a_compiled_network_has_the_kernels_inside_one_graph():
    images = torch.randn(4, 4, 32, 32, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    plain = trained(network_of(operators.PLAIN), images)
    eager = trained(network_of(FUSED), images)
    compiled = trained(
        network_of(FUSED), images, lambda network: torch.compile(network, backend="aot_eager", fullgraph=True)
    )
    for ours, its, theirs in zip(compiled, eager, plain):
        assert torch.equal(ours, its), "what is around the kernels is the same"
        assert (ours - theirs).abs().max() <= 2e-4 * theirs.abs().max().clamp_min(1e-3)


@pytest.mark.parametrize("channels", [16, 64, 2048])
def test_there_are_enough_programs_for_few_channels(channels, monkeypatch):
    launched = []
    monkeypatch.setattr(kernels, "_launch", lambda kernel, shares, *tensors, **constants: launched.append(shares))
    # As many pixels as a batch of 400 has in the first and in the last stage.
    pixels = 400 * (56 * 56 if channels < 2048 else 7 * 7)
    kernels._channel_sums(kernels.norm_statistics, torch.empty(pixels, channels, device="meta"))
    programs = launched[0] * -(-channels // kernels.CHANNELS)
    assert 264 <= programs <= kernels.SUMMING


def test_a_pytorch_without_own_operators_refuses_them_where_it_compiles(monkeypatch):
    config = SimpleNamespace(**{**vars(CONFIG), "compile": "default"})
    assert operators.choose(config, CPU).names == {"norm relu": "triton"}
    assert operators.choose(SimpleNamespace(**{**vars(config), "kernels": "auto"}), CPU) is operators.PLAIN
    monkeypatch.delattr(torch.library, "custom_op")
    with pytest.raises(choices.UnavailableError, match=r"kernels=triton with compile=default: .* came with 2.4"):
        operators.choose(config, CPU)


def test_an_evaluation_takes_the_statistics():
    norm = nn.BatchNorm2d(4).eval()
    images = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    assert torch.equal(kernels.norm_relu(norm, images), torch.relu(norm(images)))
