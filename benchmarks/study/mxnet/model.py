"""The five networks as symbols, with layers and widths of MXNet's example/image-classification/symbols.

    from benchmarks.study.mxnet.model import build, describe
    facts = describe(build("googlenet", 1000, 224), (1, 3, 224, 224))
    print(facts["convolutions"], facts["weights"])

Compared with the files in MXNet 1.3.1 (the study used the release in NGC 18.04, which was not available): operators
and all array shapes are equal. Two differences: the last pooling of Inception-v3 is global, which is equivalent at
its image size and allows smaller images, and networks end with the logits. In the ResNet file, only the cifar
variant has 110 layers.
"""

import json
import math
from typing import Any, Callable, Dict, Optional, Tuple

import mxnet as mx

Pair = Tuple[int, int]


def build(name: str, classes: int, image: int, dropout: float = 0.5) -> mx.sym.Symbol:
    """Return the logits (batch, classes) for images (batch, 3, image, image); raise KeyError for an unknown name."""
    return _BUILDERS[name](mx.sym.Variable("data"), classes, image, dropout)


def describe(network: mx.sym.Symbol, shape: Tuple[int, int, int, int]) -> Dict[str, Any]:
    """Return numbers of convolutions, fully connected layers and weights, all array sizes, and output shape.

    Only learned weights count, not fixed scales and batch norm running statistics.
    """
    arguments, outputs, _ = network.infer_shape(data=shape)
    nodes = json.loads(network.tojson())["nodes"]
    operators = [node["op"] for node in nodes]
    # Scales of batch norms that stay 1.
    fixed = [
        nodes[node["inputs"][1][0]]["name"]
        for node in nodes
        if node["op"] == "BatchNorm" and node["attrs"].get("fix_gamma", "True") == "True"
    ]
    sizes = {
        name: math.prod(array_shape)
        for name, array_shape in zip(network.list_arguments(), arguments)
        if name != "data" and name not in fixed
    }
    return {
        "convolutions": operators.count("Convolution"),
        "fully_connected": operators.count("FullyConnected"),
        "weights": sum(sizes.values()),
        "sizes": sizes,
        "output": list(outputs[0]),
    }


def _conv(
    data: mx.sym.Symbol, filters: int, kernel: Pair, stride: Pair = (1, 1), pad: Pair = (0, 0), **options: Any
) -> mx.sym.Symbol:
    return mx.sym.Convolution(data, num_filter=filters, kernel=kernel, stride=stride, pad=pad, **options)


def _pool(data: mx.sym.Symbol, kind: str, kernel: int, stride: int, pad: int = 0) -> mx.sym.Symbol:
    return mx.sym.Pooling(data, pool_type=kind, kernel=(kernel, kernel), stride=(stride, stride), pad=(pad, pad))


def _whole_plane(data: mx.sym.Symbol) -> mx.sym.Symbol:
    return mx.sym.Flatten(mx.sym.Pooling(data, global_pool=True, kernel=(7, 7), pool_type="avg"))


def _dense(data: mx.sym.Symbol, width: int) -> mx.sym.Symbol:
    return mx.sym.FullyConnected(data, num_hidden=width)


def _activation(data: mx.sym.Symbol, kind: str = "relu") -> mx.sym.Symbol:
    return mx.sym.Activation(data, act_type=kind)


# Two convolutions (20 and 50 channels), 500 wide. Without global pooling, the weights grow with the image size.
def _lenet(data: mx.sym.Symbol, classes: int, image: int, dropout: float) -> mx.sym.Symbol:
    for filters in (20, 50):
        data = _pool(_activation(_conv(data, filters, (5, 5)), "tanh"), "max", 2, 2)
    return _dense(_activation(_dense(mx.sym.Flatten(data), 500), "tanh"), classes)


# Five convolutions without groups: 50.8 million weights at 224, where Krizhevsky's have 61.
def _alexnet(data: mx.sym.Symbol, classes: int, image: int, dropout: float) -> mx.sym.Symbol:
    def reduced(convolved: mx.sym.Symbol) -> mx.sym.Symbol:
        return _pool(mx.sym.LRN(_activation(convolved), alpha=0.0001, beta=0.75, knorm=2, nsize=5), "max", 3, 2)

    data = reduced(_conv(data, 96, (11, 11), stride=(4, 4)))
    data = reduced(_conv(data, 256, (5, 5), pad=(2, 2)))
    for filters in (384, 384, 256):
        data = _activation(_conv(data, filters, (3, 3), pad=(1, 1)))
    data = mx.sym.Flatten(_pool(data, "max", 3, 2))
    for _ in range(2):
        data = mx.sym.Dropout(_activation(_dense(data, 4096)), p=dropout)
    return _dense(data, classes)


# 1x1; 1x1, 3x3; 1x1, 5x5; width after the pooling. None: a pooling with stride 2.
_INCEPTION: Tuple[Optional[Tuple[int, ...]], ...] = (
    (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), None,
    (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), None,
    (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
)  # fmt: skip


# Three convolutions and nine modules of six, without the two other outputs of the paper.
def _googlenet(data: mx.sym.Symbol, classes: int, image: int, dropout: float) -> mx.sym.Symbol:
    def conv(x: mx.sym.Symbol, filters: int, size: int, stride: int = 1) -> mx.sym.Symbol:
        return _activation(_conv(x, filters, (size, size), (stride, stride), (size // 2, size // 2)))

    data = _pool(conv(data, 64, 7, 2), "max", 3, 2)
    data = _pool(conv(conv(data, 64, 1), 192, 3), "max", 3, 2)
    for widths in _INCEPTION:
        if widths is None:
            data = _pool(data, "max", 3, 2)
            continue
        w1, w3_in, w3, w5_in, w5, w_pool = widths
        data = mx.sym.Concat(
            conv(data, w1, 1),
            conv(conv(data, w3_in, 1), w3, 3),
            conv(conv(data, w5_in, 1), w5, 5),
            conv(_pool(data, "max", 3, 1, 1), w_pool, 1),
        )
    return _dense(_whole_plane(data), classes)


# Convolution, batch norm with a fixed scale, ReLU; ``same``: padding that keeps the size.
def _normed(
    data: mx.sym.Symbol, filters: int, kernel: Pair = (1, 1), stride: int = 1, same: bool = True
) -> mx.sym.Symbol:
    pad = (kernel[0] // 2, kernel[1] // 2) if same else (0, 0)
    convolved = _conv(data, filters, kernel, (stride, stride), pad, no_bias=True)
    return _activation(mx.sym.BatchNorm(convolved, fix_gamma=True))


def _chain(data: mx.sym.Symbol, *steps: Tuple[int, Pair]) -> mx.sym.Symbol:
    for filters, kernel in steps:
        data = _normed(data, filters, kernel)
    return data


def _module_a(data: mx.sym.Symbol, pool_width: int) -> mx.sym.Symbol:
    return mx.sym.Concat(
        _normed(data, 64),
        _chain(data, (48, (1, 1)), (64, (5, 5))),
        _chain(data, (64, (1, 1)), (96, (3, 3)), (96, (3, 3))),
        _normed(_pool(data, "avg", 3, 1, 1), pool_width),
    )


def _module_c(data: mx.sym.Symbol, width: int) -> mx.sym.Symbol:
    wide, high = (1, 7), (7, 1)
    return mx.sym.Concat(
        _normed(data, 192),
        _chain(data, (width, (1, 1)), (width, wide), (192, high)),
        _chain(data, (width, (1, 1)), (width, high), (width, wide), (width, high), (192, wide)),
        _normed(_pool(data, "avg", 3, 1, 1), 192),
    )


def _module_e(data: mx.sym.Symbol, pooling: str) -> mx.sym.Symbol:
    three = _normed(data, 384)
    double = _chain(data, (448, (1, 1)), (384, (3, 3)))
    ends = [_normed(branch, 384, kernel) for branch in (three, double) for kernel in ((1, 3), (3, 1))]
    return mx.sym.Concat(_normed(data, 320), *ends, _normed(_pool(data, pooling, 3, 1, 1), 192))


# Five convolutions and eleven modules, two with stride 2.
def _inception_v3(data: mx.sym.Symbol, classes: int, image: int, dropout: float) -> mx.sym.Symbol:
    three = (3, 3)
    data = _normed(_normed(data, 32, three, 2, same=False), 32, three, same=False)
    data = _pool(_normed(data, 64, three), "max", 3, 2)
    data = _pool(_normed(_normed(data, 80), 192, three, same=False), "max", 3, 2)
    for pool_width in (32, 64, 64):
        data = _module_a(data, pool_width)
    data = mx.sym.Concat(
        _normed(data, 384, three, 2, same=False),
        _normed(_chain(data, (64, (1, 1)), (96, three)), 96, three, 2, same=False),
        _pool(data, "max", 3, 2),
    )
    for width in (128, 160, 160, 192):
        data = _module_c(data, width)
    data = mx.sym.Concat(
        _normed(_normed(data, 192), 320, three, 2, same=False),
        _normed(_chain(data, (192, (1, 1)), (192, (1, 7)), (192, (7, 1))), 192, three, 2, same=False),
        _pool(data, "max", 3, 2),
    )
    return _dense(_whole_plane(_module_e(_module_e(data, "avg"), "max")), classes)


_UNITS = 18  # in each of the three stages: (110 layers - 2) / 6


# 54 pre-activation units of two convolutions: 1.7 million weights.
def _resnet_110(data: mx.sym.Symbol, classes: int, image: int, dropout: float) -> mx.sym.Symbol:
    def norm(x: mx.sym.Symbol, **options: Any) -> mx.sym.Symbol:
        return mx.sym.BatchNorm(x, eps=2e-5, momentum=0.9, **options)

    def conv(x: mx.sym.Symbol, filters: int, stride: int, size: int = 3) -> mx.sym.Symbol:
        return _conv(x, filters, (size, size), (stride, stride), (size // 2, size // 2), no_bias=True)

    data = conv(norm(data, fix_gamma=True), 16, 1)
    for stage, filters in enumerate((16, 32, 64)):
        for number in range(_UNITS):
            stride = 2 if stage and not number else 1
            active = _activation(norm(data, fix_gamma=False))
            # Each stage's first unit has a convolution in its shortcut, as in MXNet's file.
            short_cut = data if number else conv(active, filters, stride, 1)
            active = _activation(norm(conv(active, filters, stride), fix_gamma=False))
            data = conv(active, filters, 1) + short_cut
    return _dense(_whole_plane(_activation(norm(data, fix_gamma=False))), classes)


_BUILDERS: Dict[str, Callable[..., mx.sym.Symbol]] = {
    "lenet": _lenet,
    "alexnet": _alexnet,
    "googlenet": _googlenet,
    "inception-v3": _inception_v3,
    "resnet-110": _resnet_110,
}
