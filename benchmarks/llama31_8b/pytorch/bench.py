"""Measure the training step, compared with a plain PyTorch loop.

    $ python -m benchmarks.llama31_8b.pytorch.bench --config config.json --data DATA

The plain loop uses the same network with the logits of all positions at once and repeated keys and values,
torch.autocast and torch.optim.AdamW, on one device. Up to two layers are measured on a
GPU, four on a CPU. Speeds are tokens/s. The last line of the output is the result as JSON.
"""

from functools import partial

import torch
from torch.nn import functional

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.llama.pytorch.measured import for_one_rank, pretraining
from benchmarks.llama.pytorch.network import Network
from benchmarks.llama31_8b.pytorch.config import Config
from benchmarks.llama31_8b.pytorch.train import build, train_step


def repeated(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    keys, values = (tensor.repeat_interleave(queries.shape[1] // tensor.shape[1], dim=1) for tensor in (keys, values))
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def plain(network: Network) -> None:
    for layer in network.layers:
        layer.self_attn.attend = repeated


prepare = partial(pretraining, "Llama", build, train_step, plain)

if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare, for_one_rank=for_one_rank)
