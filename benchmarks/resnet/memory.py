"""Memory that a training step of ResNet keeps on a GPU: a model and no measurement; standard library only.

The host side loads it to warn before a run. The tensors are computed from the network's shape, and a test compares
the activations with those that PyTorch saves. What libraries take besides is allowed for in round figures.
"""

from typing import Iterator, NamedTuple

from benchmarks.resnet.architecture import Conv, image_channels, residual_blocks, stem
from benchmarks.resnet.config import Hyperparameters

GIB = 2**30
LIBRARIES = int(1.5 * GIB)  # CUDA's context, code and workspaces of cuDNN and cuBLAS, buffers of NCCL: an allowance
FRAGMENTS = 0.1  # share of the activations that the allocator's rounding and gaps take: an allowance
DECODED_BYTES = 500 * 375 * 3  # A decoded image of ImageNet's usual size; DALI holds a batch of them while it crops


class Memory(NamedTuple):
    """Bytes by their use."""

    weights: int  # in fp32, and a copy in the type of the products
    gradients: int
    momenta: int
    activations: int  # tensors that the forward pass keeps for the backward pass
    input: int  # batches that wait, and what DALI holds to make them
    allowances: int

    @property
    def tensors(self) -> int:
        """Bytes for which there must be room in any case."""
        return sum(self) - self.allowances


def product_bytes(config: Hyperparameters) -> int:
    return 2 if config.precision in ("fp16", "bf16") else 4


def _out(size: int, conv: Conv) -> int:
    return (size - 1) // conv.stride + 1


# Numbers that each part of the network keeps for one image.
# A convolution keeps its input, which is the ReLU's output before it; a batch-norm keeps its input, the convolution's
# output. The sum with the shortcut and the last ReLU are one tensor: the next block's input.
def _kept(config: Hyperparameters) -> Iterator[int]:
    first = stem(config)
    size = _out(config.image_size, first)
    yield config.image_size**2 * image_channels(config)
    yield size**2 * first.channels * 2
    # The maximum over 3x3 with stride 2.
    size = _out(size, Conv(first.channels, first.channels, 3, 2))
    yield size**2 * first.channels
    for block in residual_blocks(config):
        if block.project:
            yield _out(size, block.project) ** 2 * block.channels
        for conv in block.convs:
            size = _out(size, conv)
            yield size**2 * conv.channels * 2


def activations(config: Hyperparameters, framework: str) -> int:
    """Bytes that the forward pass of one micro-batch keeps; at its end a step needs the most."""
    images = config.batch_size // getattr(config, "accumulation_steps", 1)
    numbers = sum(_kept(config)) * product_bytes(config)
    if framework == "pytorch":
        # It keeps where each maximum was, as int64; the others look for it again.
        first = stem(config)
        size = _out(_out(config.image_size, first), Conv(first.channels, first.channels, 3, 2))
        numbers += size**2 * first.channels * 8
    return images * numbers


def parameters(config: Hyperparameters) -> int:
    """Count the weights: convolutions, gamma and beta of each, and the dense layer."""
    convs = [stem(config)]
    for block in residual_blocks(config):
        convs += [*block.convs, *([block.project] if block.project else [])]
    dense = (block.channels + 1) * config.num_classes
    return dense + sum(conv.channels * (conv.in_channels * conv.kernel**2 + 2) for conv in convs)


def needed(config: Hyperparameters, framework: str) -> Memory:
    """Return what one rank needs on its GPU."""
    count, size = parameters(config), product_bytes(config)
    copy = count * size if size < 4 else 0
    image = config.image_size**2 * image_channels(config) * size
    kept = activations(config, framework)
    # Batches in the queue, one in work and one in use; decoder buffers per thread; the cache of decoded images.
    padding_mb = getattr(config, "dali_nvjpeg_padding_mb", 256) * config.dali_threads + config.dali_decoder_cache_mb
    batches = (config.dali_prefetch + 2) * config.batch_size * image + config.batch_size * DECODED_BYTES
    return Memory(
        weights=count * 4 + copy,
        # MXNet keeps them in the type of its weights, the others in fp32.
        gradients=count * (size if framework == "mxnet" else 4),
        momenta=count * 4,
        activations=kept,
        input=batches + padding_mb * 2**20,
        allowances=LIBRARIES + int(kept * FRAGMENTS),
    )
