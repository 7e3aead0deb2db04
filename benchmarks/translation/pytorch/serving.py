"""Shared code of exported translation models: beam search that calls an exported decoder step, scores, facts.

A sentence has ``beam`` hypotheses. Per-sentence tensors are (B, ...), per-hypothesis tensors (B, beam, ...): a
server gets the encoder's output once per sentence.
"""

import copy
from types import SimpleNamespace
from typing import Any, Dict, Iterable, TypeVar

import numpy as np
import torch
from torch import nn

from benchmarks.common.export.export import Arrays, Infer, Value
from benchmarks.common.export.torch import ALONE
from benchmarks.translation import CODES, VOCABULARY
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.pytorch.batches import SourceBatch
from benchmarks.translation.pytorch.evaluation import Decode, Score, translate
from benchmarks.translation.vocabulary import BOS, BPE, EOS, PAD, SPECIAL, UNK

M = TypeVar("M", bound=nn.Module)
SHOWN_STEP = 3  # step of the first batch that is shown: the hypotheses differ there, and have a past
SOURCE = Value("source", "token ids of the source, then </s>, padded with 0")
TOKENS = Value("tokens", "the last token of each hypothesis, initially <s>")
LOG_PROBABILITIES = Value("log_probabilities", "of each next token; entries beyond the vocabulary are padding")


class Hypotheses:
    # Beam search state that calls an exported decoder step.

    def __init__(self, infer: Infer, beam: int, fixed: Arrays, changing: Arrays) -> None:
        """Store a step's inputs.

        Args:
            infer: a step, from ``tokens`` (B, beam), ``fixed`` and ``changing``.
            beam: hypotheses per sentence.
            fixed: per sentence, (B, ...).
            changing: per hypothesis, (B, beam, ...); the caller replaces it with a step's outputs.
        """
        self.infer, self.beam, self.fixed, self.changing = infer, beam, fixed, changing

    def select(self, rows: torch.Tensor) -> None:
        # Select the hypotheses ``rows`` int64, ``beam`` per remaining sentence, in this order.
        indices = rows.numpy().reshape(-1, self.beam)
        sentences = indices[:, 0] // self.beam
        if len(sentences) < len(self.fixed[0]):
            self.fixed = tuple(state[sentences] for state in self.fixed)
        self.changing = tuple(state.reshape(-1, *state.shape[2:])[indices] for state in self.changing)

    def ask(self, tokens: torch.Tensor) -> Arrays:
        # Return a step's outputs from ``tokens`` int64 (B * beam,).
        return self.infer(tokens.view(-1, self.beam).numpy(), *self.fixed, *self.changing)


def without(network: M, *names: str) -> M:
    # Return a copy of the network without the named modules: an exported file contains all weights of the network.
    clone = copy.deepcopy(network)
    for name in names:
        path, _, last = name.rpartition(".")
        delattr(clone.get_submodule(path), last)
    return clone


def rows_of(array: np.ndarray) -> torch.Tensor:
    # Return (B * beam, ...) of (B, beam, ...).
    return torch.from_numpy(array).flatten(0, 1)


def evaluate(batches: Iterable[SourceBatch], data: DataSet, decode: Decode, score: Score) -> Dict[str, float]:
    # Return the BLEU of the translations of all test sentences.
    run: Any = SimpleNamespace(interrupted=False, interruptible=iter)
    hypotheses = translate(batches, len(data.test), decode, ALONE, run) or []
    return {"bleu": score(hypotheses, data)}


def preprocessing(data: DataSet, source_bos: bool) -> Dict[str, Any]:
    # Preprocessing of the client's text, and postprocessing of the decoder's tokens.
    entries = data.vocabulary
    facts: Dict[str, Any] = {
        "languages": [data.source_language, data.target_language],
        "tokens": "BPE of subword-nmt" if entries.kind == BPE else "subtokens of tensor2tensor",
        "vocabulary": f"{VOCABULARY} of the data set: an entry a line, numbered from {len(SPECIAL)}",
        "entries": entries.size,
        "special": {SPECIAL[mark]: mark for mark in (PAD, UNK, BOS, EOS)},
        "source": ["<s>"] * source_bos + ["tokens", "</s>"],
    }
    if entries.kind == BPE:
        # If the references are raw text, BPE was applied to Moses tokens.
        facts["words"] = "Moses' tokenizer and detokenizer" if entries.language else "separated by white space"
        facts["codes"] = f"{CODES} of the data set"
    return facts
