"""Export the Transformer for a server: the encoder, and a decoder step, which a client's search calls for every token.

$ python -m benchmarks.transformer.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np
import torch

from benchmarks.common.export import export
from benchmarks.common.export.export import Arrays, Infer, Parts, Subject, Value
from benchmarks.common.export.torch import ALONE, TOOLS, Served, as_tensors, inferring
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.data import evaluation_input
from benchmarks.transformer.pytorch.model import (
    FIRST_POSITION,
    Layer,
    Memories,
    Network,
    Norm,
    State,
    Stream,
    mask_of,
    plain_attention,
    search,
    sinusoids,
)
from benchmarks.transformer.pytorch.train import score_of
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.pytorch import serving
from benchmarks.translation.pytorch.batches import SourceBatch

MEMORY = Value("memory", "keys and values of the source, of each layer and head at each position")
CACHE = Value("cache", "keys and values of a hypothesis, of each layer and head at each position; initially empty")
ADDED = Value("added", "keys and values of the last token: to append to the cache")
# Decoder layer parts that the encoder export does not need.
STEP_PARTS = ("self_attention", "fc1", "fc2", "norms", "cross_attention.query", "cross_attention.output")
POSITIONS = 5  # position axis in a cache (B, K, layers, 2, heads, P, width / heads)


class Encoder(Served):
    def forward(self, source: torch.Tensor) -> torch.Tensor:
        # (B, layers, 2, heads, S, width / heads) of int64 (B, S).
        network = self.network
        values = network.embed_at(source, sinusoids(source.shape[1], network.config.width))
        return stack(network.memories(network.encode_embeddings(values, mask_of(source))))


class Step(Served):
    def forward(
        self, tokens: torch.Tensor, source: torch.Tensor, memory: torch.Tensor, cache: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (B, K, V) and (B, K, layers, 2, heads, 1, width / heads) of K hypotheses.

        Args:
            tokens: int64 (B, K).
            source: int64 (B, S).
            memory: (B, layers, 2, heads, S, width / heads).
            cache: (B, K, layers, 2, heads, P, width / heads), of the P tokens before.
        """
        network = self.network
        values = network.embed_at(tokens, sinusoids(1, network.config.width, FIRST_POSITION + cache.shape[POSITIONS]))
        mask, added = mask_of(source), []
        stream, layers = (
            network.norm_input(network.decoder, values),
            network.layers_with_norms(network.decoder, network.decoder_norm),
        )
        for (layer, after), keys_and_values, layer_cache in zip(layers, unstack(memory), cache.unbind(2)):
            stream, new = decode(layer, stream, keys_and_values, mask, after, layer_cache)
            added.append(new)
        return network.log_probabilities(stream.block_input), torch.stack(added, 2)


def decode(
    layer: Layer,
    stream: Stream,
    memory: Tuple[torch.Tensor, ...],
    mask: torch.Tensor,
    after: Norm,
    layer_cache: torch.Tensor,
) -> Tuple[Stream, torch.Tensor]:
    """A decoder layer on (B, K, width), with keys and values ``layer_cache`` (B, K, 2, heads, P, width / heads).

    Training flattens both axes to B * K rows. Here, a shape computed from two others would be checked in every
    request, and K = 1 would be specialized.
    """
    self_attention = layer.self_attention
    projected = self_attention.joint(stream.block_input).unflatten(2, (3, self_attention.heads, -1))
    query, new = projected[:, :, 0].unsqueeze(3), projected[:, :, 1:].unsqueeze(4)
    key, value = torch.cat((layer_cache, new), 4).unbind(2)
    attn_out = self_attention.output(plain_attention(query, key, value, None, 0.0, False).squeeze(3).flatten(2))
    stream = layer.add_and_norm(0, stream.values, attn_out)
    stream = layer.add_and_norm(1, stream.values, layer.attend_source(stream.block_input, memory, mask))
    return layer.feed_forward(stream, after), new


def stack(memories: Memories) -> torch.Tensor:
    # Return (B, layers, 2, heads, S, width / heads).
    return torch.stack([torch.stack(tensors, 1) for tensors in memories], 1)


def unstack(memory: torch.Tensor) -> Memories:
    return [tensor.unbind(1) for tensor in memory.unbind(1)]


def training_step(network: Network) -> Infer:
    # Return the training code's way to the outputs of `Step`.

    def infer(*inputs: np.ndarray) -> Arrays:
        tokens, source, memory, cache = as_tensors(inputs)
        position = cache.shape[POSITIONS]
        past = cache.flatten(0, 1).permute(1, 2, 0, 3, 4, 5)
        state = State(tokens.shape[1], mask_of(source), unstack(memory), past)
        with torch.no_grad():
            log_probabilities = network.next(tokens.flatten(), position, state)
        added = state.kv[..., position : position + 1, :].permute(2, 0, 1, 3, 4, 5)
        return tuple(tensor.unflatten(0, tokens.shape).numpy() for tensor in (log_probabilities, added))

    return infer


def evaluate(config: Config, data: DataSet, infer: Mapping[str, Infer]) -> Dict[str, float]:
    # BLEU of the translations of all test sentences, as in the run.

    def ask(tokens: torch.Tensor, position: int, state: serving.Hypotheses) -> Tuple[torch.Tensor, None]:
        log_probabilities, added = state.ask(tokens)
        state.changing = (np.concatenate((*state.changing, added), POSITIONS),)
        return serving.rows_of(log_probabilities), None

    def decode(batch: SourceBatch) -> List[List[int]]:
        source = batch.source.numpy()
        (memory,) = infer["encoder"](source)
        sentences, layers, pair, heads, _, head = memory.shape
        cache = np.zeros((sentences, config.beam, layers, pair, heads, 0, head), np.float32)
        state = serving.Hypotheses(infer["decoder"], config.beam, (source, memory), (cache,))
        return search(config, data.vocabulary.size, batch, state, ask)

    return serving.evaluate(evaluation_input(config, data, ALONE), data, decode, score_of(config))


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Parts:
    data = open_data(folder)
    network = Network(config, data.vocabulary.padded(config.vocabulary_multiple)).eval()
    network.load_state_dict(saved["network"])

    def original(source: torch.Tensor) -> torch.Tensor:
        return stack(network.memories(network.encode(source, mask_of(source))))

    unused = [f"decoder.{layer}.{name}" for layer in range(len(network.decoder)) for name in STEP_PARTS]
    encoding = Subject(
        model=Encoder(serving.without(network, "decoder_norm", *unused)).eval(),
        inputs=(serving.SOURCE,),
        outputs=(MEMORY,),
        example=(np.ones((2, 5), np.int64),),
        any_size={"source": (1,), "memory": (4,)},
        preprocessing=serving.preprocessing(data, source_bos=False),
        original=inferring(original),
    )
    head, width = (config.layers, 2, config.heads), config.width // config.heads
    decoding = Subject(
        model=Step(serving.without(network, "encoder", "encoder_norm")).eval(),
        inputs=(serving.TOKENS, serving.SOURCE, MEMORY, CACHE),
        outputs=(serving.LOG_PROBABILITIES, ADDED),
        example=(
            np.ones((2, 3), np.int64),
            np.ones((2, 5), np.int64),
            np.zeros((2, *head, 5, width), np.float32),
            np.zeros((2, 3, *head, 4, width), np.float32),
        ),
        any_size={
            "tokens": (1,),
            "source": (1,),
            "memory": (4,),
            "cache": (1, POSITIONS),
            "log_probabilities": (1,),
            "added": (1,),
        },
        preprocessing={
            "beam": config.beam,
            "shortest": 1,
            "longest": f"{config.longest_factor:g} * tokens of the source with its end + {config.longest_offset}",
            "length_penalty": config.length_penalty,
            "length_constant": config.length_constant,
            "score": "sum of log_probabilities / ((length_constant + tokens) / 6) ** length_penalty",
            "ended": "a hypothesis leaves the beam; the search ends when as many as the beam has have",
        },
        original=training_step(network),
        shown=serving.SHOWN_STEP,
    )
    return Parts({"encoder": encoding, "decoder": decoding}, lambda infer: evaluate(config, data, infer))


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
