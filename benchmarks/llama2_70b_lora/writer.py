"""Write packed samples: MLPerf's as they are, or texts with summaries, packed as in the reference.

create_datasets of the reference (llama2_70b_lora/scripts/utils.py) combines a text and its summary with a prompt,
drops texts longer than a sample, and cuts the concatenated rest into samples. In evaluation, only the summary is
included in the loss. The last token of every text is the tokenizer's end-of-sequence token.
"""

import argparse
import hashlib
import platform
from itertools import chain
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import tokenizers

from benchmarks.common.data import source_checks
from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.files import in_one_step
from benchmarks.common.data.prepare import Content, Listing, Split
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.common.data.text_files import text_of
from benchmarks.llama import tokenization
from benchmarks.llama2_70b_lora import sources, toy
from benchmarks.llama2_70b_lora.dataset import BASE, PARTS
from benchmarks.llama2_70b_lora.sources import PACKED, TEXT, Source

VERSION = "1"  # increase it if the output for the same source and options changes
LENGTH, ENTRIES = 8192, 32000  # of MLPerf's samples, and of the vocabulary of Llama 2
ENDS = ("</s>", tokenization.END)  # marks of the end, of Llama 2 and of the toy data set's tokenizer
NOT_COUNTED = -100  # label of such a token in MLPerf's samples
BEFORE, BETWEEN = "### Summarize the following text:\n ", "\n ### Summary:\n"


class Packed(NamedTuple):
    """A part's samples."""

    tokens: np.ndarray  # int32 (samples, length)
    counts: np.ndarray  # bool, the same
    keys: List[str]  # keys of the packed texts
    left_out: int  # texts longer than a sample


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    # Find the files. The fingerprint includes everything that determines the output.
    source = sources.find(args) if args.origin is not None else None
    if source is None and args.tokenizer:
        raise Problem("--tokenizer without raw data", "both only with your own text", "pass the text")
    paths = [path for files in source.files.values() for path in files] if source else []
    paths += [source.tokenizer] if source and source.tokenizer else []
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    settings = (VERSION, args.name, "" if source else platform.python_version())
    key = repr((settings, tokenizers.__version__, files, args.vocabulary_size, args.sequence_length))
    return Listing(source, hashlib.sha256(key.encode()).hexdigest())


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    """Write both parts.

    Raises:
        Problem: the source is damaged, too small, or does not match the vocabulary.
    """
    source: Source = listing.source
    length = args.sequence_length or (toy.LENGTH if source is None else LENGTH)
    entries = args.vocabulary_size or ENTRIES
    extra: Dict[str, Any] = sources.commit_of(args.origin) if source else {}
    files: List[str] = []
    if source is None or source.tokenizer:
        texts = toy.texts() if source is None else None
        if texts:
            tokenizer = tokenization.learn((*texts.base, *chain.from_iterable(texts.train)), toy.ENTRIES)
        else:
            tokenizer = tokenization.read(source.tokenizer)
        entries, files = tokenizer.get_vocab_size(), [tokenization.FILE]
        with in_one_step(scratch / tokenization.FILE) as file:
            file.write(tokenizer.to_str(pretty=True).encode())
        if texts:
            end = _end(tokenizer)
            ids = [token for packed in tokenization.encode(tokenizer, texts.base) for token in (*packed, end)]
            extra = {"made": texts.made, **toy.train_base(np.array(ids), entries, scratch / BASE, progress)}
            files.append(BASE)
    parts: Dict[str, Packed] = {}
    for part in PARTS:
        if source and source.is_packed:
            parts[part] = _checked(source.files[part])
        else:
            pairs = getattr(texts, part) if source is None else _pairs(source.files[part])
            parts[part] = _pack(pairs, tokenizer, length, part == "test")
        progress.note(f"{part}: {len(parts[part].tokens):,} samples")
        _check(parts[part], part, entries)
        write_array(scratch / f"{part}_tokens.npy", parts[part].tokens)
        write_array(scratch / f"{part}_counts.npy", parts[part].counts)
    length = parts["train"].tokens.shape[1]
    if parts["test"].tokens.shape[1] != length:
        raise Problem(f"evaluation samples of {parts['test'].tokens.shape[1]:,} tokens", f"{length:,}", "pack alike")
    test_rows = [(f"row {number:,}", key) for number, key in enumerate(parts["test"].keys, 1)]
    common = source_checks.overlap(test_rows, parts["train"].keys, "samples", args.allow_overlap, progress)
    counts = {part: len(packed.tokens) for part, packed in parts.items()}
    usual = toy.NAME if source is None else sources.NAME if source.is_packed else args.origin.stem
    arrays = {part: (f"{part}_tokens.npy", f"{part}_counts.npy", *files) for part in PARTS}
    return Content(
        name=args.name or usual,
        splits={part: Split(counts[part], arrays[part]) for part in PARTS},
        summary=f"{counts['train']:,} + {counts['test']:,} samples of {length:,} tokens, {entries:,} entries",
        facts={"vocabulary": entries, "sequence_length": length},
        how={"in_both": common, "left_out": {part: packed.left_out for part, packed in parts.items()}, **extra},
        tool={"version": VERSION, "numpy": np.__version__, "tokenizers": tokenizers.__version__},
    )


def _end(tokenizer: tokenizers.Tokenizer) -> int:
    end_id = next((tokenizer.token_to_id(mark) for mark in ENDS if tokenizer.token_to_id(mark) is not None), None)
    if end_id is None:
        raise Problem(f"the tokenizer has no {' or '.join(ENDS)}", "a tokenizer of Llama 2", "take another")
    return int(end_id)


def _pairs(paths: Sequence[Path]) -> List[toy.Pair]:
    first, second = TEXT
    return [(text_of(row, first, location), text_of(row, second, location)) for location, row in sources.rows(paths)]


def _pack(pairs: List[toy.Pair], tokenizer: tokenizers.Tokenizer, length: int, is_test: bool) -> Packed:
    # Tokenize and pack, without the last tokens that fill no sample.
    tokens: List[int] = []
    counts: List[bool] = []
    keys: List[str] = []
    end, left_out = _end(tokenizer), 0
    for text, summary in pairs:
        prompt = f"{BEFORE}{text}{BETWEEN}"
        ids = [*tokenizer.encode(f"{prompt} {summary}").ids, end]
        if len(ids) > length:
            left_out += 1
            continue
        first = len(tokenizer.encode(prompt).ids) if is_test else 0
        tokens += ids
        counts += [not is_test or first <= index < len(ids) - 1 for index in range(len(ids))]
        keys.append(source_checks.key(f"{text}\n{summary}".encode()))
    sample_count = len(tokens) // length
    shape = (sample_count, length)
    packed = np.array(tokens[: sample_count * length], np.int32).reshape(shape)
    return Packed(packed, np.array(counts[: sample_count * length], bool).reshape(shape), keys, left_out)


def _checked(paths: Sequence[Path]) -> Packed:
    # Read packed samples.
    samples: List[Tuple[np.ndarray, np.ndarray]] = []
    length = 0
    for location, row in sources.rows(paths):
        try:
            ids, labels = (_integers(row[name]) for name in PACKED)
        except (KeyError, ValueError, TypeError, OverflowError):
            raise Problem(f"{location} has no lists of numbers", " and ".join(PACKED), "fix the row") from None
        length = length or len(ids)
        if ids.shape != (length,) or labels.shape != ids.shape:
            sizes = f"{len(ids):,} ids and {len(labels):,} labels"
            raise Problem(f"{location} has {sizes}", f"{length:,}, as in the first row", "pack it again")
        counts = labels != NOT_COUNTED
        if not np.array_equal(ids[counts], labels[counts]):
            raise Problem(
                f"{location} has labels that are not its tokens",
                "its tokens, or -100",
                "write the tokens themselves as labels: they are shifted here",
            )
        samples.append((ids, counts))
    arrays = [np.array([row[kind] for row in samples]).reshape(len(samples), length) for kind in (0, 1)]
    return Packed(arrays[0], arrays[1], [source_checks.key(ids.tobytes()) for ids, _ in samples], 0)


def _integers(values: List[Any]) -> np.ndarray:
    array = np.array(values)
    if array.ndim != 1 or array.dtype.kind != "i" or (array.astype(np.int32) != array).any():
        raise ValueError("not 32-bit integers")
    return array.astype(np.int32)


def _check(packed: Packed, part: str, entries: int) -> None:
    if not len(packed.tokens):
        raise Problem(f"the {part} part has no sample", "a whole one", "add data, or use a shorter --sequence-length")
    lowest, highest = int(packed.tokens.min()), int(packed.tokens.max())
    # Ids that the vocabulary has not would be read beyond the end of the embedding table.
    if lowest < 0 or highest >= entries:
        raise Problem(
            f"tokens {lowest:,} to {highest:,} in the {part} part, and {entries:,} entries",
            "the vocabulary of the samples",
            "pass it with --tokenizer or --vocabulary-size",
        )
    empty = np.flatnonzero(~packed.counts[:, 1:].any(axis=1))
    if len(empty):
        raise Problem(f"sample {empty[0] + 1:,} of the {part} part has no token in the loss", "one", "leave it out")
