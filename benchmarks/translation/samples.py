"""Sentence pairs and vocabulary, for benchmarks/common/data/sample_checks.py."""

import html
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common.data import sample_checks
from benchmarks.common.data.arrays import Sequences
from benchmarks.translation.arrays import DataSet, Pairs, open_data
from benchmarks.translation.vocabulary import UNK

SHORT = 6  # sentences with up to this number of tokens in both sides may be duplicates
LEAST_RELATION = 0.3  # correlation of the lengths of both sides; translations have 0.9 and more
LEAST_PAIRS = 300  # from which it is told from an accident
MOST_UNKNOWN = 0.1


def _key(pairs: Pairs, index: int) -> Optional[bytes]:
    source, target = pairs.source[index], pairs.target[index]
    if 0 < len(source) + len(target) <= SHORT:
        return None
    return sample_checks.key(source, target) if len(target) else b""


def _part(pairs: Pairs) -> sample_checks.Part:
    return sample_checks.Part(len(pairs), lambda indices: [_key(pairs, index) for index in indices.tolist()])


def letters(text: str) -> str:
    # Moses' tokenizer writes an apostrophe as &apos;
    return "".join(filter(str.isalpha, html.unescape(text))).lower()


def _same(data: DataSet, sentences: Sequences, lines: Sequence[str]) -> Dict[int, bool]:
    # Whether a sentence's tokens match the line's text, by index; unknown tokens differ.
    ids = {index: sentences[index].tolist() for index in sample_checks.spread(len(sentences), 500).tolist()}
    joined = ((index, data.vocabulary.joined(tokens)) for index, tokens in ids.items() if UNK not in tokens)
    return {index: letters(text) == letters(lines[index]) for index, text in joined}


def view(directory: Path, manifest: Mapping[str, Any]) -> sample_checks.View:
    data = open_data(directory)

    def own() -> Iterator[Tuple[str, str]]:
        for name, pairs in (("train", data.train), ("test", data.test)):
            indices = sample_checks.spread(len(pairs))
            lengths = [np.diff(side.offsets)[indices] for side in (pairs.source, pairs.target)]
            if len(indices) >= LEAST_PAIRS and all(side_lengths.std() for side_lengths in lengths):
                related = float(np.corrcoef(*lengths)[0, 1])
                if related < LEAST_RELATION:
                    message = f"{name}: the lengths of both sides have a correlation of {related:.2f}"
                    yield f"{message}: the sides may not be aligned", f"at least {LEAST_RELATION}"
            for side, sentences in (("source", pairs.source), ("target", pairs.target)):
                ids = sentences.tokens[sample_checks.spread(len(sentences.tokens))]
                if len(ids) and int(ids.max()) >= data.vocabulary.size:
                    yield f"{name}_{side}: tokens up to {int(ids.max()):,}", f"{data.vocabulary.size:,} entries"
                elif float((ids == UNK).mean()) > MOST_UNKNOWN:
                    yield f"{name}_{side}: {float((ids == UNK).mean()):.0%} of the tokens are unknown", "a few"
        for name, sentences, lines in (
            ("test_source", data.test.source, data.sources),
            ("test_target", data.test.target, data.references),
        ):
            problem = f"lines of {name} are not what its tokens say"
            expected = "the same order and the vocabulary that made the tokens"
            yield from sample_checks.agreement(_same(data, sentences, lines), problem, expected, least=0.5)

    return sample_checks.View({"train": _part(data.train), "test": _part(data.test)}, extra_checks=own)
