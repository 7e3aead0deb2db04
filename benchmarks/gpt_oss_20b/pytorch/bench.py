"""Measure the training step, compared with a plain PyTorch loop.

    $ python -m benchmarks.gpt_oss_20b.pytorch.bench --config config.json --data DATA

Same plain loop as for Llama 3.1 8B, with a loop over the experts, and a mask for the full sequence in layers with a
window. Up to two layers are measured on a GPU, four on a CPU. Speeds are tokens/s. The last line of the output is the
result as JSON.
"""

from functools import partial
from typing import Any

import torch

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.gpt_oss_20b.pytorch.config import Config
from benchmarks.gpt_oss_20b.pytorch.train import build, train_step
from benchmarks.llama.pytorch.attention import masked
from benchmarks.llama.pytorch.experts import chosen_experts
from benchmarks.llama.pytorch.measured import for_one_rank, pretraining
from benchmarks.llama.pytorch.network import Network


def one_by_one(mixture: Any, hidden: torch.Tensor) -> torch.Tensor:
    rows = hidden.flatten(0, 1)
    _, experts, shares = chosen_experts(mixture, rows)
    outputs = torch.zeros_like(rows)
    for number in range(mixture.count):
        tokens, rank_of_choice = torch.where(experts == number)
        local_experts = mixture.experts
        gated = local_experts.gate(rows[tokens] @ local_experts.gate_up_proj[number])
        weighted = gated @ local_experts.down_proj[number] * shares[tokens, rank_of_choice, None]
        outputs = outputs.index_add(0, tokens, weighted.to(outputs.dtype))
    return outputs.unflatten(0, hidden.shape[:2])


def plain(network: Network) -> None:
    for number, layer in enumerate(network.layers):
        layer.self_attn.attend = partial(masked, network.shape.window_of(number))
        layer.mlp.forward = partial(one_by_one, layer.mlp)


prepare = partial(pretraining, "gpt-oss", build, train_step, plain)

if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare, for_one_rank=for_one_rank)
