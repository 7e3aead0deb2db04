"""ResNet v1.5 in Gluon, with the architecture in benchmarks/resnet/architecture.py.

On GPUs the fused batch-norm operators of NVIDIA's MXNet are used if installed, with the arguments of the submissions
(resnet/implementations/mxnet/symbols/resnet-v1b-fl.py).
"""

from dataclasses import dataclass
from typing import Any, Dict, Sequence

import mxnet as mx
from mxnet.gluon import HybridBlock, nn

from benchmarks.resnet import architecture
from benchmarks.resnet.mxnet.config import Config

# Argument of NVIDIA's operators: attribute of Gluon's batch-norm
NORM_ARGUMENTS = {"gamma": "gamma", "beta": "beta", "moving_mean": "running_mean", "moving_var": "running_var"}


@dataclass(frozen=True)
class FusedOperators:
    """Which of NVIDIA's fused operators the installed MXNet offers and this configuration can use."""

    batch_norm_relu: bool
    batch_norm_add_relu: bool


def fused_operators(config: Config, operators: Any = mx.sym) -> FusedOperators:
    """Detect the operators by building them like the network; they support only NHWC and fp16."""
    usable = config.device == "gpu" and config.layout == "NHWC" and config.precision == "fp16"

    def exists(*names: str) -> bool:
        try:
            fused_norm(operators, norm_options(config), *map(mx.sym.var, names))
        except (AttributeError, TypeError, mx.base.MXNetError):
            return False
        return True

    return FusedOperators(usable and exists("data"), usable and exists("data", "addend"))


def missing_operators(config: Config, operators: Any = mx.sym) -> str:
    """Return a warning if a submitted configuration's fused operators are missing on a GPU, else ""."""
    available = fused_operators(config, operators)
    required = {"BatchNorm with act_type": available.batch_norm_relu, "BatchNormAddRelu": available.batch_norm_add_relu}
    missing = " and ".join(name for name, there in required.items() if not there)
    if config.device != "gpu" or config.precision != "fp16" or not missing:
        return ""
    reason = "layout=NCHW has" if config.layout == "NCHW" else f"MXNet {mx.__version__} has"
    return f"{reason} no {missing}: batch-norm, sum and ReLU run as separate, slower kernels"


def norm_options(config: Config) -> Dict[str, Any]:
    """Return the arguments of the batch-norm operators that are numbers."""
    axis = config.layout.index("C")
    numbers = {"eps": config.batch_norm_epsilon, "momentum": config.batch_norm_momentum}
    return {"axis": axis, "fix_gamma": False, **numbers}


def fused_norm(operators: Any, options: Dict[str, Any], x: Any, *shortcut: Any, **arrays: Any) -> Any:
    """Return relu(batch_norm(x)), or relu(batch_norm(x) + shortcut), by NVIDIA's operators."""
    if shortcut:
        return operators.BatchNormAddRelu(data=x, addend=shortcut[0], **arrays, **options)
    return operators.BatchNorm(data=x, act_type="relu", **arrays, **options)


@dataclass(frozen=True)
class Layers:
    """Makes the layers that all blocks share, in one layout and with one kind of batch-norm."""

    config: Config
    fused: FusedOperators

    def conv(self, conv: architecture.Conv) -> HybridBlock:
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
        return kind(
            in_channels=channels,
            axis=self.config.layout.index("C"),
            momentum=self.config.batch_norm_momentum,
            epsilon=self.config.batch_norm_epsilon,
            gamma_initializer="zeros" if zero_gamma and self.config.zero_init_residual else "ones",
            **options,
        )

    def norm_relu(self, channels: int) -> HybridBlock:
        if self.fused.batch_norm_relu:
            return self.norm(channels, FusedNorm, options=norm_options(self.config))
        block = nn.HybridSequential()
        block.add(self.norm(channels), nn.Activation("relu"))
        return block

    def body(self, convs: Sequence[architecture.Conv]) -> HybridBlock:
        """Return a block's convolutions with batch-norm and ReLU between the convolutions."""
        block = nn.HybridSequential()
        for conv in convs[:-1]:
            block.add(self.conv(conv), self.norm_relu(conv.channels))
        block.add(self.conv(convs[-1]))
        return block

    def norm_add_relu(self, channels: int) -> HybridBlock:
        if self.fused.batch_norm_add_relu:
            return self.norm(channels, FusedNorm, zero_gamma=True, options=norm_options(self.config))
        return NormAddRelu(self.norm(channels, zero_gamma=True))


class FusedNorm(nn.BatchNorm):
    """Parameters of Gluon's batch-norm with NVIDIA's operators; other arguments of Gluon are not passed on."""

    def __init__(self, options: Dict[str, Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._options = options

    def hybrid_forward(self, F: Any, x: Any, *shortcut: Any, **parameters: Any) -> Any:
        arrays = {name: parameters[argument] for name, argument in NORM_ARGUMENTS.items()}
        return fused_norm(F, self._options, x, *shortcut, **arrays, name="fwd")


class NormAddRelu(HybridBlock):
    """relu(batch_norm(x) + shortcut) with MXNet operators."""

    def __init__(self, norm: HybridBlock) -> None:
        super().__init__()
        self.norm = norm

    def hybrid_forward(self, F: Any, x: Any, shortcut: Any) -> Any:
        return F.Activation(self.norm(x) + shortcut, act_type="relu")


class Residual(HybridBlock):
    def __init__(self, layers: Layers, block: architecture.Block) -> None:
        super().__init__()
        self.body = layers.body(block.convs)
        self.merge = layers.norm_add_relu(block.channels)
        self.project = None
        if block.project:
            self.project = nn.HybridSequential()
            self.project.add(layers.conv(block.project), layers.norm(block.channels))

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        shortcut = x if self.project is None else self.project(x)
        return self.merge(self.body(x), shortcut)


def build(config: Config, operators: Any = mx.sym) -> HybridBlock:
    """Build the network: images in config.layout to logits (batch, num_classes).

    All shapes are specified, so that initialization is not deferred to a first forward pass: in inference mode that
    pass would leave weights in a oneDNN layout that Horovod cannot send.
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
    """Initialize the weights from config.seed, cast for config.precision and hybridize."""
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
