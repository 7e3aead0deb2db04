"""GPU memory model for a ResNet training step; standard library only.

The host side uses it for warnings before a run. Tensor sizes are computed from the architecture; a test compares
activations with the tensors saved by PyTorch. For libraries, a constant allowance is added.
"""

from typing import Iterator, NamedTuple

from benchmarks.resnet.architecture import Conv, image_channels, residual_blocks, stem
from benchmarks.resnet.config import Hyperparameters

GIB = 2**30
LIBRARIES = int(1.5 * GIB)  # CUDA's context, code and workspaces of cuDNN and cuBLAS, buffers of NCCL: an allowance
FRAGMENTS = 0.1  # fraction of the activations lost to rounding and gaps of the allocator: an allowance
DECODED_BYTES = 500 * 375 * 3  # Decoded image of ImageNet's usual size; DALI has a batch of decoded images for cropping


class Memory(NamedTuple):
    """Bytes by use."""

    weights: int  # in fp32, and a copy in the type of the products
    gradients: int
    momenta: int
    activations: int  # tensors saved for the backward pass
    input: int  # batches in the queue, and buffers of DALI
    allowances: int

    @property
    def tensors(self) -> int:
        """Bytes for which there must be room in any case."""
        return sum(self) - self.allowances


def product_bytes(config: Hyperparameters) -> int:
    return 2 if config.precision in ("fp16", "bf16") else 4


def _out(size: int, conv: Conv) -> int:
    return (size - 1) // conv.stride + 1


# Numbers saved per image, by layer. A convolution saves its input, which is the output of the preceding ReLU; a
# batch-norm saves its input, the output of the convolution. The sum with the shortcut and the last ReLU share a tensor:
# the input of the next block.
def _kept_values(config: Hyperparameters) -> Iterator[int]:
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
    """Bytes saved in the forward pass for a micro-batch; memory usage is highest when it ends."""
    images = config.batch_size // getattr(config, "accumulation_steps", 1)
    numbers = sum(_kept_values(config)) * product_bytes(config)
    if framework == "pytorch":
        # PyTorch saves the index of every maximum as int64; other frameworks recompute it.
        first = stem(config)
        size = _out(_out(config.image_size, first), Conv(first.channels, first.channels, 3, 2))
        numbers += size**2 * first.channels * 8
    return images * numbers


def parameters(config: Hyperparameters) -> int:
    """Number of weights: convolutions, gamma and beta, and the dense layer."""
    convs = [stem(config)]
    for block in residual_blocks(config):
        convs += [*block.convs, *([block.project] if block.project else [])]
    dense = (block.channels + 1) * config.num_classes
    return dense + sum(conv.channels * (conv.in_channels * conv.kernel**2 + 2) for conv in convs)


def needed(config: Hyperparameters, framework: str) -> Memory:
    """Return the GPU memory that a rank needs."""
    count, size = parameters(config), product_bytes(config)
    copy = count * size if size < 4 else 0
    image = config.image_size**2 * image_channels(config) * size
    activation_bytes = activations(config, framework)
    # Batches in the queue, one in work and one in use; decoder buffers per thread; the cache of decoded images.
    padding_mb = getattr(config, "dali_nvjpeg_padding_mb", 256) * config.dali_threads + config.dali_decoder_cache_mb
    batches = (config.dali_prefetch + 2) * config.batch_size * image + config.batch_size * DECODED_BYTES
    return Memory(
        weights=count * 4 + copy,
        # MXNet keeps gradients in the type of the weights, other frameworks in fp32.
        gradients=count * (size if framework == "mxnet" else 4),
        momenta=count * 4,
        activations=activation_bytes,
        input=batches + padding_mb * 2**20,
        allowances=LIBRARIES + int(activation_bytes * FRAGMENTS),
    )
