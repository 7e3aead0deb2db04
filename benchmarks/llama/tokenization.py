"""Byte-level BPE with Hugging Face's tokenizers: a published tokenizer.json, or a trained tokenizer."""

from pathlib import Path
from typing import Iterable, List

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.common.data.problem import Problem

FILE = "tokenizer.json"
END = "<|end_of_text|>"  # Llama 3's end-of-document token


def read(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json.

    Raises:
        Problem: it cannot be read.
    """
    hint = "take tokenizer.json as published with the model"
    if not path.is_file():
        raise Problem(f"{path} is not there", FILE, hint)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other type
        raise Problem(f"{path}: {error}", "a tokenizer of Hugging Face's tokenizers", hint) from None


def learn(texts: Iterable[str], entries: int) -> tokenizers.Tokenizer:
    """Train a tokenizer with ``entries`` entries: the 256 bytes, the end-of-document token, and merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=entries, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, texts: List[str]) -> List[List[int]]:
    """Return the token ids per text, without special tokens."""
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
