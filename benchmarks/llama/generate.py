"""Continue a text with an exported Llama model on a Triton server, see `encore serve`.

    $ python -m benchmarks.llama.generate DIR --tokenizer DATA/tokenizer.json "The list"
    $ python -m benchmarks.llama.generate DIR --tokenizer DATA/tokenizer.json "The list" --temperature 0.8 --seed 1

DIR is the output of `encore export`. A request has the last token and the KV cache; the new keys and values in the
response are appended to the cache. Needs NumPy, tokenizers and tritonclient. Exit code 0: printed; 2: no server, or
the server rejects the request.
"""

import argparse
import sys
from pathlib import Path
from typing import Callable, List, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.common.serving import client
from benchmarks.llama import tokenization

POSITIONS = 4  # position axis in a cache (B, layers, 2, key_value_heads, P, size)
# (tokens int64 (B, N), cache) -> (logits (B, N, vocabulary), keys and values to append to the cache)
Step = Callable[[np.ndarray, np.ndarray], Tuple[np.ndarray, ...]]


def empty_cache(shape: Sequence[int], batch: int = 1) -> np.ndarray:
    """Return an empty cache; ``shape`` omits the batch axis, and its position axis is ignored."""
    return np.zeros((batch, *shape[:3], 0, shape[4]), np.float32)


def next_token(logits: np.ndarray, temperature: float, random: np.random.RandomState) -> int:
    """Return the most likely token, or a sample from the softmax of the logits divided by ``temperature``."""
    if temperature <= 0:
        return int(logits.argmax())
    chances = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return int(random.choice(len(chances), p=chances / chances.sum()))


def generate(
    step: Step,
    cache_shape: Sequence[int],
    prompt: Sequence[int],
    count: int,
    temperature: float = 0.0,
    seed: int = 0,
    end: Optional[int] = None,
) -> List[int]:
    """Return up to ``count`` tokens after a prompt; stops after ``end``."""
    random, cache, pending = np.random.RandomState(seed), empty_cache(cache_shape), list(prompt)
    generated: List[int] = []
    while len(generated) < count and (not generated or generated[-1] != end):
        logits, added = step(np.array([pending], np.int64), cache)
        cache = np.concatenate((cache, added), POSITIONS)
        pending = [next_token(logits[0, -1], temperature, random)]
        generated += pending
    return generated


def served(url: str, exported: Path, seconds: float) -> Tuple[Step, List[int]]:
    """Return a server's step function and its cache shape without the batch axis."""
    manifest = client.read_manifest(exported)
    server = client.Server(url, "http", manifest)
    server.wait(seconds)
    (cache,) = (value["shape"][1:] for value in manifest["inputs"] if value["name"] == "cache")

    def step(tokens: np.ndarray, cache: np.ndarray) -> Tuple[np.ndarray, ...]:
        outputs = client.predict(server, {"tokens": tokens, "cache": cache})
        return outputs["logits"], outputs["added"]

    return step, cache


def main(argv: Optional[List[str]] = None) -> int:
    """Print a text and its continuation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exported", type=Path, metavar="DIR", help="folder of export.json")
    parser.add_argument("text", help="text to continue")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the data set")
    parser.add_argument("--url", default="localhost:8000", help="HOST:PORT over HTTP; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="at most; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, selects the most likely token")
    parser.add_argument("--seed", type=int, default=0, help="random seed; default: %(default)s")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds for the model to become ready")
    arguments = parser.parse_args(argv)
    if not (arguments.exported / "export.json").is_file():
        parser.error(f"{arguments.exported} has no export.json: pass a folder of encore export")
    try:
        tokenizer = tokenization.read(arguments.tokenizer)
        prompt = tokenizer.encode(arguments.text, add_special_tokens=False).ids
        if not prompt:
            parser.error("the text has no tokens")
        step, cache = served(arguments.url, arguments.exported, arguments.wait)
        end = tokenizer.token_to_id(tokenization.END)
        generated = generate(step, cache, prompt, arguments.tokens, arguments.temperature, arguments.seed, end)
    except (client.RefusedError, Problem) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(arguments.text + tokenizer.decode(generated))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
