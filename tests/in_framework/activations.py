"""What autograd keeps of Llama's layers, as bytes that have no other use."""

import torch

from benchmarks.llama.pytorch.network import rope_cos_sin


def kept_by_layers(network, tokens, positions):
    """Return the bytes that the layers keep of a forward pass for the backward pass, weights left out."""
    weights = {each.untyped_storage().data_ptr() for each in network.parameters()}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden, by = network.embed_tokens(tokens), rope_cos_sin(positions, network.shape)
        for layer in network.layers:
            hidden = layer(hidden, by)
    return sum(size for size, _ in found.values())
