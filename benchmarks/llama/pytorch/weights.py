"""Load published Llama weights into a sharded network: each rank reads its shards only."""

from typing import Mapping, Tuple

import numpy as np
import torch

from benchmarks.common.data.problem import Problem
from benchmarks.llama.pytorch.network import Network, hf_name
from benchmarks.llama.pytorch.parallel import keep, share
from benchmarks.llama.safetensors import Stored

FUSED = "qkv_proj.weight"  # MLPerf's Llama 2 70B has the rows of queries, keys and values in one


def locate_tensor(name: str, network: Network, stored: Mapping[str, Stored]) -> Tuple[str, int, Tuple[int, ...]]:
    """Return a parameter's tensor name, first row and expected shape in the files."""
    published, full_shape = hf_name(name), network.get_parameter(name).shape
    product = next((letter for letter in "qkv" if published.endswith(f"self_attn.{letter}_proj.weight")), "")
    fused = f"{published[: -len('q_proj.weight')]}{FUSED}" if product else ""
    if fused not in stored:
        return published, 0, tuple(full_shape)
    shape = network.shape
    first = {"q": 0, "k": shape.queries, "v": shape.queries + shape.keys}[product]
    return fused, first, (shape.queries + 2 * shape.keys, shape.width)


@torch.no_grad()
def fill(network: Network, stored: Mapping[str, Stored]) -> None:
    """Load a network's frozen parameters from files; the network is on its device.

    Raises:
        Problem: a tensor is missing or has a different shape; raised on all ranks.
    """
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            continue
        tensor_name, first, shape = locate_tensor(name, network, stored)
        tensor = stored.get(tensor_name)
        if tensor is None or tensor.shape != shape:
            there = (
                f"{tensor_name} of {tensor.shape} in {tensor.path.name}"
                if tensor
                else f"no {tensor_name} in the weights"
            )
            raise Problem(
                there, f"{tensor_name} of {shape}", "use the weights of the configured network, or set its sizes"
            )
        rows, *other_dims = share(parameter)
        part = tensor.values[(slice(first + rows.start, first + rows.stop), *other_dims)]
        bits = tensor.kind == "BF16"
        values = torch.from_numpy(part.astype("<i2") if bits else np.array(part))
        keep(network, name, values.view(torch.bfloat16) if bits else values)
