"""Texts, dumps, samples and records for the tests of BERT's pretraining data, and the preparation command."""

import struct
import tarfile
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bert import masking
from benchmarks.bert.masking import Documents, Settings
from benchmarks.language import tensorflow_files, vocabulary
from benchmarks.language.arrays import Samples
from benchmarks.language.vocabulary import SPECIAL, Vocabulary
from encore import paths
from tests import preparing

SHARED = paths.ROOT.parent / "shared" / "data"

run = partial(preparing.run, "bert")


def unpack(archive: str, to: Path) -> Path:
    path = SHARED / archive
    if not path.exists():
        pytest.skip(f"no {path.name}: it is not part of the project, it is put next to it")
    with tarfile.open(path) as file:
        file.extractall(to, filter="data")
    return to


def write_dump(pages: list[str]) -> bytes:
    rows = [
        f"  <page>\n    <title>Page {number}</title>\n    <ns>0</ns>\n    <id>{number}</id>\n    <revision>\n"
        f'      <text bytes="9" xml:space="preserve">{text}</text>\n    </revision>\n  </page>\n'
        for number, text in enumerate(pages)
    ]
    rows += [
        '  <page>\n    <title>R</title>\n    <ns>0</ns>\n    <redirect title="x" />\n    <text>x</text>\n  </page>\n',
        "  <page>\n    <title>Talk:T</title>\n    <ns>1</ns>\n    <text>some talk</text>\n  </page>\n",
    ]
    return ("<mediawiki>\n" + "".join(rows) + "</mediawiki>\n").encode()


PAGES = [f"Page {number} has é text. It is &lt;b&gt;short&lt;/b&gt;." for number in range(40)]

SHORT = ("--sequence-length", 40, "--duplication", 3)


WORDS = ("the", "cat", "dog", "sees", "a", "red", "old", "house", "in", "town", "and", "runs", "far", "near", "water")


def write_text(path: Path, documents: int = 60, seed: int = 0) -> Path:
    random = np.random.RandomState(seed)
    lines = []
    for _ in range(documents):
        for _ in range(random.randint(6, 20)):
            lines.append(" ".join(WORDS[index] for index in random.randint(len(WORDS), size=9)) + " .")
        lines.append("")
    path.write_text("\n".join(lines))
    return path


LENGTHS = [[1 + (7 * doc + 5 * line) % 23 for line in range(30)] for doc in range(40)]
NUMBERS = Vocabulary((*SPECIAL, *map(str, range(60000))))


@cache
def numbered_documents() -> Documents:
    # Every token has its own id, so that a sample shows where its text is from
    ends = np.concatenate(([0], np.cumsum(LENGTHS)))
    return Documents(np.arange(5, 5 + ends[-1]).astype(np.uint16), ends.tolist(), list(range(0, len(ends), 30)))


@cache
def drawn_samples() -> Samples:
    documents, random = list(range(40)) * 60, masking.stream(3, 0, 0, 0)
    return masking.make_samples(numbered_documents(), documents, Settings(64, 9, 1), NUMBERS, random)


def padded(samples: Samples, width: int, most: int, is_hdf5: bool = False) -> dict[str, np.ndarray]:
    # As create_pretraining_data.py pads them; its HDF5 files have no mask and no segments (NVIDIA v0.7)
    count = len(samples)
    rows = {key: np.zeros((count, width), np.int64) for key in ("input_ids", "input_mask", "segment_ids")}
    rows.update({key: np.zeros((count, most), np.int64) for key in ("masked_lm_positions", "masked_lm_ids")})
    for number in range(count):
        tokens, (positions, labels) = samples[number], samples.masked(number)
        rows["input_ids"][number, : len(tokens)] = tokens
        if not is_hdf5:
            rows["input_mask"][number, : len(tokens)] = 1
            rows["segment_ids"][number, samples.second[number] : len(tokens)] = 1
        rows["masked_lm_positions"][number, : len(positions)] = positions
        rows["masked_lm_ids"][number, : len(labels)] = labels
    rows["next_sentence_labels"] = samples.next.astype(np.int64)[:, None]
    return rows


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def example(rows: dict[str, np.ndarray], number: int) -> bytes:
    entries = b""
    for key, values in rows.items():
        packed = field(1, b"".join(varint(int(value)) for value in values[number]))
        entries += field(1, field(1, key.encode()) + field(2, field(3, packed)))
    weights = field(1, struct.pack("<2f", 1.0, 0.0))
    entries += field(1, field(1, b"masked_lm_weights") + field(2, field(2, weights)))
    return field(1, entries)


def write_records(path: Path, rows: dict[str, np.ndarray]) -> Path:
    frames = [tensorflow_files.frame(example(rows, number)) for number in range(len(rows["input_ids"]))]
    path.write_bytes(b"".join(frames))
    return path


def take(samples: Samples, begin: int, end: int) -> Samples:
    return samples.take(np.arange(begin, end))


def write_packed(folder: Path) -> Path:
    # Two files for training and one for evaluation, of the same documents but too short to be an overlap
    files = {"train/part-00000-of-00500": (0, 50), "train/b.tfrecord": (50, 90), "eval/eval.tfrecord": (90, 120)}
    for name, (begin, end) in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_records(folder / name, padded(take(drawn_samples(), begin, end), 64, 9))
    vocabulary.write(folder / "vocab.txt", NUMBERS.entries)
    return folder
