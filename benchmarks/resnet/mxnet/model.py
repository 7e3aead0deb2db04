"""ResNet v1.5 in Gluon; its shape is in benchmarks/resnet/architecture.py.

On GPUs the fused batch-norm operators of NVIDIA's MXNet are used where the installed MXNet has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mxnet as mx
from mxnet.gluon import HybridBlock, nn

from benchmarks.resnet import architecture
from benchmarks.resnet.mxnet.config import Config


@dataclass(frozen=True)
class FusedOperators:
    """Which of NVIDIA's fused operators the installed MXNet offers and this configuration can use."""

    batch_norm_relu: bool
    batch_norm_add_relu: bool


def fused_operators(config: Config, operators: Any = mx.sym) -> FusedOperators:
    """Ask MXNet itself for the operators; they exist on GPUs, for NHWC and fp16 only."""
    usable = config.device == "gpu" and config.layout == "NHWC" and config.precision == "fp16"
    signature = getattr(getattr(operators, "BatchNorm", None), "__doc__", None) or ""
    return FusedOperators(
        batch_norm_relu=usable and "act_type" in signature,
        batch_norm_add_relu=usable and hasattr(operators, "BatchNormAddRelu"),
    )


@dataclass(frozen=True)
class Layers:
    """Makes the layers that all blocks share, in one layout and with one kind of batch-norm."""

    config: Config
    fused: FusedOperators

    def conv(self, conv: architecture.Conv) -> HybridBlock:
        """Make a convolution."""
        return nn.Conv2D(
            conv.channels,
            conv.kernel,
            in_channels=conv.in_channels,
            strides=conv.stride,
            padding=conv.kernel // 2,
            use_bias=False,
            layout=self.config.layout,
            weight_initializer=mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
        )

    def norm(self, channels: int, kind: Any = nn.BatchNorm, zero_gamma: bool = False, **options: Any) -> HybridBlock:
        """Make a batch-norm over the channels."""
        return kind(
            in_channels=channels,
            axis=self.config.layout.index("C"),
            momentum=self.config.batch_norm_momentum,
            epsilon=self.config.batch_norm_epsilon,
            gamma_initializer="zeros" if zero_gamma and self.config.zero_init_residual else "ones",
            **options,
        )

    def norm_relu(self, channels: int) -> HybridBlock:
        """Make a batch-norm and ReLU, as one kernel where there is one."""
        if self.fused.batch_norm_relu:
            return self.norm(channels, act_type="relu")
        block = nn.HybridSequential()
        block.add(self.norm(channels), nn.Activation("relu"))
        return block

    def norm_add_relu(self, channels: int) -> HybridBlock:
        """Make a batch-norm, the sum with the shortcut and ReLU, as one kernel where there is one."""
        if self.fused.batch_norm_add_relu:
            return self.norm(channels, FusedNormAddRelu, zero_gamma=True)
        return NormAddRelu(self.norm(channels, zero_gamma=True))


class FusedNormAddRelu(nn.BatchNorm):
    """relu(batch_norm(x) + shortcut) in NVIDIA's operator BatchNormAddRelu."""

    def hybrid_forward(self, F: Any, x: Any, shortcut: Any, **parameters: Any) -> Any:
        return F.BatchNormAddRelu(
            data=x,
            addend=shortcut,
            gamma=parameters["gamma"],
            beta=parameters["beta"],
            moving_mean=parameters["running_mean"],
            moving_var=parameters["running_var"],
            name="fwd",
            **self._kwargs,
        )


class NormAddRelu(HybridBlock):
    """relu(batch_norm(x) + shortcut) in MXNet's own operators."""

    def __init__(self, norm: HybridBlock) -> None:
        super().__init__()
        self.norm = norm

    def hybrid_forward(self, F: Any, x: Any, shortcut: Any) -> Any:
        return F.Activation(self.norm(x) + shortcut, act_type="relu")


class Residual(HybridBlock):
    """One residual block."""

    def __init__(self, layers: Layers, block: architecture.Block) -> None:
        super().__init__()
        self.body = nn.HybridSequential()
        for conv in block.convs[:-1]:
            self.body.add(layers.conv(conv), layers.norm_relu(conv.channels))
        self.body.add(layers.conv(block.convs[-1]))
        self.merge = layers.norm_add_relu(block.channels)
        self.project = None
        if block.project:
            self.project = nn.HybridSequential()
            self.project.add(layers.conv(block.project), layers.norm(block.channels))

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        shortcut = x if self.project is None else self.project(x)
        return self.merge(self.body(x), shortcut)


def build(config: Config, operators: Any = mx.sym) -> HybridBlock:
    """The network of ``config``: images in config.layout to logits (batch, num_classes).

    All shapes are given, so that no parameter waits for a first pass: that pass, made for inference, would
    leave the weights in a layout of oneDNN's that Horovod cannot send.
    """
    layers = Layers(config, fused_operators(config, operators))
    stem = architecture.stem(config)
    network = nn.HybridSequential(prefix="resnet_")
    with network.name_scope():
        network.add(layers.conv(stem), layers.norm_relu(stem.channels), nn.MaxPool2D(3, 2, 1, layout=config.layout))
        for block in architecture.residual_blocks(config):
            network.add(Residual(layers, block))
        network.add(
            nn.GlobalAvgPool2D(layout=config.layout),
            nn.Flatten(),
            nn.Dense(config.num_classes, in_units=block.channels, weight_initializer=mx.init.Normal(0.01)),
        )
    return network


def initialize(network: HybridBlock, config: Config, context: mx.Context) -> None:
    """Draw the weights from config.seed, cast them for config.precision and have the graph compiled."""
    mx.random.seed(config.seed)
    network.initialize(ctx=context)
    if config.precision == "fp16":
        network.cast("float16")  # Gluon leaves the parameters of batch-norm in fp32
    network.hybridize(static_alloc=True, static_shape=True)


class SmoothedLoss(HybridBlock):
    """Cross-entropy with label smoothing, in fp32: logits (batch, classes), labels (batch,) to (batch,)."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self._smoothing = smoothing

    def hybrid_forward(self, F: Any, logits: Any, labels: Any) -> Any:
        log_probabilities = F.log_softmax(F.cast(logits, "float32"), axis=-1)
        loss = -F.pick(log_probabilities, labels, axis=-1)
        if self._smoothing == 0.0:
            return loss
        uniform = -F.mean(log_probabilities, axis=-1)
        return (1.0 - self._smoothing) * loss + self._smoothing * uniform
