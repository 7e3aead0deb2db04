"""Export of Llama for a server: one step on new tokens, with a KV cache that the client stores."""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Tuple

import numpy as np
import torch

from benchmarks.common.export.export import Infer, Subject, Value
from benchmarks.common.export.torch import Served
from benchmarks.llama import order
from benchmarks.llama.dataset import DataSet
from benchmarks.llama.generate import POSITIONS, empty_cache, generate
from benchmarks.llama.pytorch.attention import masked
from benchmarks.llama.pytorch.data import open_for
from benchmarks.llama.pytorch.network import Network, rope_cos_sin
from benchmarks.llama.pytorch.state import joined

LAST = 1 << 30  # Use a step with a cache as the example: full samples have large logits.
GENERATED, FROM = 8, 8  # generated tokens and prompt tokens of the check of steps with a cache
INPUTS = (
    Value("tokens", "token ids: a text from its start, or the tokens after the cache"),
    Value("cache", "keys and values of earlier tokens, by layer and position; initially empty"),
)
OUTPUTS = (
    Value("logits", "over the vocabulary, for the token after each position"),
    Value("added", "keys and values of these tokens, to append to the cache"),
)


class Step(Served):
    def forward(self, tokens: torch.Tensor, cache: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return logits (B, N, vocabulary) and keys and values (B, layers, 2, key_value_heads, N, size).

        Args:
            tokens: int64 (B, N).
            cache: (B, layers, 2, key_value_heads, P, size), of the P tokens before.
        """
        network, past_length, added = self.network, cache.shape[POSITIONS], []
        by = rope_cos_sin(torch.arange(past_length, past_length + tokens.shape[1], device=tokens.device), network.shape)
        hidden = network.embed_tokens(tokens)
        for number, (layer, past) in enumerate(zip(network.layers, cache.unbind(1))):
            attn = layer.self_attn
            queries, keys, values = attn.project_qkv(layer.input_layernorm(hidden), by)
            added.append(torch.stack((keys, values), 1))
            keys, values = torch.cat((past, added[-1]), 3).unbind(1)
            attend = partial(masked, network.shape.window_of(number))
            hidden = hidden + attn.attend_and_project(attend, queries, keys, values)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return network.head(network.norm(hidden)), torch.stack(added, 1)


def subject(
    network: Network, evaluate: Callable[[Callable[[np.ndarray], np.ndarray]], Dict[str, float]], text: np.ndarray,
    preprocessing: Mapping[str, Any],
) -> Subject:  # fmt: skip
    """Return the export subject; ``evaluate`` takes a function that computes the logits of full samples (B, L).

    Also continues a ``text`` (L,), to check steps with a cache.
    """
    shape = network.shape
    cache = (shape.layers, 2, shape.key_value_heads, 0, shape.size)

    def through(infer: Infer) -> Dict[str, float]:
        def logits(tokens: np.ndarray) -> np.ndarray:
            return infer(tokens, empty_cache(cache, len(tokens)))[0]

        metrics = evaluate(logits)
        generate(infer, cache, text[:FROM].tolist(), GENERATED)
        return metrics

    return Subject(
        model=Step(network).eval(),
        inputs=INPUTS,
        outputs=OUTPUTS,
        example=(np.zeros((2, 3), np.int64), np.zeros((2, *cache[:3], 4, cache[4]), np.float32)),
        evaluate=through,
        any_size={"tokens": (1,), "logits": (1,), "cache": (POSITIONS,), "added": (POSITIONS,)},
        preprocessing=preprocessing,
        shown=LAST,
    )


def log_perplexity(config: Any, data: DataSet, logits: Callable[[np.ndarray], np.ndarray]) -> Dict[str, float]:
    samples = order.in_order(data.test.lengths, config.sequence_length, config.eval_samples)
    loss, count, size = 0.0, 0, config.eval_batch_size
    for start in range(0, len(samples), size):
        numbers = range(start, min(start + size, len(samples)))
        tokens = np.stack([samples.tokens(data.test, number) for number in numbers])
        outputs = torch.from_numpy(logits(np.ascontiguousarray(tokens[:, :-1])))
        log_probs = outputs.double().log_softmax(-1)
        is_label = torch.from_numpy(tokens[:, :-1] != data.test.end_token)
        loss -= float(log_probs.gather(-1, torch.from_numpy(tokens[:, 1:, None]))[..., 0][is_label].sum())
        count += int(is_label.sum())
    return {"log_perplexity": loss / count}


def pretrained(config: Any, saved: Mapping[str, Any], folder: Path) -> Subject:
    data = open_for(config, folder)
    network = Network(config.shape(data.padded_vocabulary(config.vocabulary_multiple)))
    network.load_state_dict(joined(saved))
    facts = {"tokenizer": "tokenizer.json of the data set", "sequence_length": config.sequence_length}
    return subject(network, partial(log_perplexity, config, data), data.test.read(0, 0, FROM), facts)
