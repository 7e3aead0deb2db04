"""ResNet v1.5 in PyTorch, with the architecture and names in benchmarks/resnet/architecture.py.

torchvision is not used, because it cannot be imported with every build of PyTorch.
"""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.torch import networks
from benchmarks.resnet import architecture
from benchmarks.resnet.pytorch import operators
from benchmarks.resnet.pytorch.config import Config

# Names in benchmarks/resnet/architecture.py for the tensors of batch-norm
NEUTRAL_PARTS = {"weight": "gamma", "bias": "beta", "running_mean": "mean", "running_var": "variance"}


class Convolution(nn.Conv2d):
    """Convolution without bias, padded by half of the kernel."""

    def __init__(self, conv: architecture.Conv) -> None:
        super().__init__(
            conv.in_channels, conv.channels, conv.kernel, conv.stride, padding=conv.kernel // 2, bias=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[2:] == (1, 1):
            # Only the center of the kernel contributes to a 1 x 1 image, as in the last stage on toy images, where
            # oneDNN's gradient of the full kernel took half of a step.
            center = self.kernel_size[0] // 2
            return functional.conv2d(x, self.weight[..., center : center + 1, center : center + 1])
        return super().forward(x)


# Make a convolution with weights from N(0, 2 / fan-in).
def _conv(conv: architecture.Conv) -> nn.Conv2d:
    layer = Convolution(conv)
    # He et al. 2015, arXiv 1502.01852, equation 10.
    nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
    return layer


# Make a batch-norm over the channels.
def _norm(config: Config, channels: int, zero_gamma: bool = False) -> nn.BatchNorm2d:
    # PyTorch's momentum is the weight of the new statistics, MXNet's of the old ones.
    layer = nn.BatchNorm2d(channels, eps=config.batch_norm_epsilon, momentum=1.0 - config.batch_norm_momentum)
    if zero_gamma and config.zero_init_residual:
        nn.init.zeros_(layer.weight)
    # Only an average without momentum needs this count, which costs a kernel per layer and step.
    layer.num_batches_tracked = None
    return layer


class Residual(nn.Module):
    def __init__(self, config: Config, block: architecture.Block) -> None:
        super().__init__()
        self.depth = len(block.convs)
        self.operators = operators.PLAIN
        for number, conv in enumerate(block.convs, 1):
            self.add_module(f"conv{number}", _conv(conv))
            self.add_module(f"norm{number}", _norm(config, conv.channels, zero_gamma=number == self.depth))
        self.project = None
        if block.project:
            layers = OrderedDict(conv=_conv(block.project), norm=_norm(config, block.channels))
            self.project = nn.Sequential(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.project is None else self.project(x)
        for number in range(1, self.depth + 1):
            norm, x = getattr(self, f"norm{number}"), getattr(self, f"conv{number}")(x)
            x = self.operators.norm_relu(norm, x, shortcut if number == self.depth else None)
        return x


class Network(nn.Sequential):
    """The layers in turn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch.compile starts no graph in nn.Sequential.forward: in DistributedDataParallel it would compile the blocks
        # separately, and not the stem.
        for layer in self:
            x = layer(x)
        return x


def build(config: Config) -> Network:
    """Build the network on the CPU in fp32, with weights initialized from config.seed.

    Images (N, C, H, W) to logits (N, num_classes). PyTorch uses this axis order for any memory format.
    """
    torch.manual_seed(config.seed)
    stem = architecture.stem(config)
    layers = OrderedDict(
        conv=_conv(stem), norm=_norm(config, stem.channels), relu=nn.ReLU(inplace=True), pool=nn.MaxPool2d(3, 2, 1)
    )
    network = Network(OrderedDict(stem=nn.Sequential(layers)))
    for block in architecture.residual_blocks(config):
        if not hasattr(network, block.stage):
            network.add_module(block.stage, nn.Sequential())
        getattr(network, block.stage).add_module(block.name, Residual(config, block))
    dense = nn.Linear(block.channels, config.num_classes)
    nn.init.normal_(dense.weight, std=0.01)
    nn.init.zeros_(dense.bias)
    for name, module in (("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("dense", dense)):
        network.add_module(name, module)
    return network


def set_operators(network: nn.Module, operator_set: operators.OperatorSet) -> None:
    """Set the operators of the network, whose names are saved in checkpoints, and of its residual blocks."""
    for module in network.modules():
        if module is network or isinstance(module, Residual):
            module.operators = operator_set


def to_device(network: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Move the network to the device, with weights in the memory format of config.layout."""
    return network.to(device=device, memory_format=networks.memory_format(config.layout))


def smoothed_loss(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Mean cross-entropy with label smoothing in fp32: logits (N, classes), labels (N,) to ()."""
    return functional.cross_entropy(logits.float(), labels, label_smoothing=smoothing)


def neutral_name(name: str) -> str:
    """Name of benchmarks/resnet/architecture.py for a tensor of the network's state."""
    module, _, part = name.rpartition(".")
    is_norm = module.rpartition(".")[2].startswith("norm")
    return f"{module}.{NEUTRAL_PARTS[part]}" if is_norm else name
