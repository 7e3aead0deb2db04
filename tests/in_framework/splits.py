"""What tests of Llama's parallelism share: samples for any split, and what all ranks have together."""

import torch

from benchmarks.common.export.torch import inferring
from benchmarks.llama.generate import POSITIONS, empty_cache, generate
from benchmarks.llama.pytorch.serving import Step
from benchmarks.llama.pytorch.state import MOMENTS
from benchmarks.llama31_8b.pytorch.data import place as place_of
from benchmarks.llama31_8b.pytorch.data import synthetic_batch


def whole(training):
    """The weights of all ranks together, by name."""
    return {
        name: (each.detach().full_tensor() if hasattr(each, "full_tensor") else each.detach()).clone()
        for name, each in training.parameters.items()
    }


def assert_same_weights(found, expected, note, rtol=1e-4, atol=1e-6):
    """Hold the weights of all ranks of one training against another's."""
    weights = whole(found)
    for name, each in whole(expected).items():
        torch.testing.assert_close(
            weights[name], each, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{note}, {name}: {text}"
        )


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


def steps_are_those_of(network, tokens, near=1e-12):
    """A text in one call, in several and token by token has the network's logits; the likeliest tokens follow it."""
    step, shape = inferring(Step(network)), network.shape
    cache_shape = (shape.layers, 2, shape.key_value_heads, 0, shape.size)
    exact = network.embed_tokens.weight.dtype
    expected = network(tokens).detach()
    for cuts in ((), (3,), (1, 2, 6), range(1, tokens.shape[1])):
        cache, found = torch.from_numpy(empty_cache(cache_shape, len(tokens))).to(exact), []
        for part in torch.tensor_split(tokens, list(cuts), dim=1):
            logits, added = map(torch.from_numpy, step(part.numpy(), cache.numpy()))
            cache = torch.cat((cache, added), POSITIONS)
            found.append(logits)
        torch.testing.assert_close(torch.cat(found, 1), expected, rtol=near, atol=near)
    prompt = tokens[0, :5].tolist()
    greedy = generate(inferring(Step(network.float())), cache_shape, prompt, 6)
    for number, token in enumerate(greedy):
        before = torch.tensor([prompt + greedy[:number]])
        assert token == int(network(before)[0, -1].argmax())
    drawn = [generate(inferring(Step(network)), cache_shape, prompt, 6, 2.0, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 6
    assert generate(inferring(Step(network)), cache_shape, prompt, 6, end=greedy[0]) == greedy[:1]
