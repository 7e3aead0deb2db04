"""What tests of Llama's parallelism share: samples for any split, and what all ranks have together."""

import torch

from benchmarks.llama.pytorch.state import MOMENTS
from benchmarks.llama31_8b.pytorch.data import place as place_of
from benchmarks.llama31_8b.pytorch.data import synthetic_batch


def whole(training):
    """The weights of all ranks together, by name."""
    return {
        name: (each.detach().full_tensor() if hasattr(each, "full_tensor") else each.detach()).clone()
        for name, each in training.parameters.items()
    }


def batch_of(config, vocabulary, ranks, step):
    """Samples that do not depend on how the ranks share them, as the input deals them out."""
    place, generator = place_of(config, ranks), torch.Generator().manual_seed(step)
    mine = config.batch_size * config.group
    tokens = torch.randint(
        vocabulary, (config.batch_size * ranks.size, config.sequence_length + 1), generator=generator
    )
    tokens = tokens[place.group * mine : (place.group + 1) * mine]
    positions = place.positions(config.sequence_length)
    example = synthetic_batch(config, vocabulary, ranks)[0]
    return [
        example._replace(tokens=part[:, positions], labels=part[:, positions + 1], positions=positions)
        for part in tokens.split(config.micro_batch_size)
    ]


def moments_of(optimizer, name, training):
    """Both moments of a parameter, of all ranks together."""
    state = optimizer.state[training.parameters[name]]
    found = [state[key].full_tensor() if hasattr(state[key], "full_tensor") else state[key] for key in MOMENTS]
    return torch.stack(found)
