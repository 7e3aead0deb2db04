"""What the tests of BERT's pretraining data share: texts, dumps, samples and records of their own, and the command."""

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

# Small blocks and shards let a test see several of each, and interrupt between them.
SIZES = """
from benchmarks.bert import prepare, stages, writer
writer.BLOCK_BYTES, stages.SHARD_BYTES = 6000, 3000
"""
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
    redirect = (
        '  <page>\n    <title>R</title>\n    <ns>0</ns>\n    <redirect title="x" />\n    <text>x</text>\n  </page>\n'
    )
    other = "  <page>\n    <title>Talk:T</title>\n    <ns>1</ns>\n    <text>some talk</text>\n  </page>\n"
    return ("<mediawiki>\n" + "".join(rows) + redirect + other + "</mediawiki>\n").encode()


PAGES = [f"Page {number} has é text. It is &lt;b&gt;short&lt;/b&gt;." for number in range(40)]
PLAIN = [f"Page {number} has é text. It is <b>short</b>." for number in range(40)]


SHORT = ("--sequence-length", 40, "--duplication", 3)


WORDS = ("the", "cat", "dog", "sees", "a", "red", "old", "house", "in", "town", "and", "runs", "far", "near", "water")


def write_text(path: Path, documents: int = 60, seed: int = 0) -> Path:
    random = np.random.RandomState(seed)
    lines = []
    for _ in range(documents):
        for _ in range(random.randint(6, 20)):
            lines.append(" ".join(WORDS[place] for place in random.randint(len(WORDS), size=9)) + " .")
        lines.append("")
    path.write_text("\n".join(lines))
    return path


LENGTHS = [[1 + (7 * doc + 5 * place) % 23 for place in range(30)] for doc in range(40)]
NUMBERS = Vocabulary((*SPECIAL, *map(str, range(60000))))


@cache
def numbered_documents() -> Documents:
    # Every token has its own id, so that a sample shows where its text is from
    sizes = [size for document in LENGTHS for size in document]
    ends = np.concatenate(([0], np.cumsum(sizes)))
    tokens = np.arange(5, 5 + ends[-1]).astype(np.uint16)
    return Documents(tokens, ends.tolist(), list(range(0, len(sizes) + 1, 30)))


@cache
def drawn_samples() -> Samples:
    # Many samples of the numbered documents
    settings = Settings(64, 9, 1)
    random = masking.stream(3, 0, 0, 0)
    return masking.make_samples(numbered_documents(), list(range(40)) * 60, settings, NUMBERS, random)


def padded(samples: Samples, width: int, most: int, is_hdf5: bool = False) -> dict[str, np.ndarray]:
    # As create_pretraining_data.py pads them; its HDF5 files have no mask and no segments (NVIDIA v0.7)
    count = len(samples)
    rows = {key: np.zeros((count, width), np.int64) for key in ("input_ids", "input_mask", "segment_ids")}
    rows.update({key: np.zeros((count, most), np.int64) for key in ("masked_lm_positions", "masked_lm_ids")})
    for number in range(count):
        tokens, (places, labels) = samples[number], samples.masked(number)
        rows["input_ids"][number, : len(tokens)] = tokens
        if not is_hdf5:
            rows["input_mask"][number, : len(tokens)] = 1
            rows["segment_ids"][number, samples.second[number] : len(tokens)] = 1
        rows["masked_lm_positions"][number, : len(places)] = places
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
    # Two files for training, one for evaluation whose documents are no others: it overlaps only where asked to
    drawn = drawn_samples()
    (folder / "train").mkdir()
    (folder / "eval").mkdir()
    write_records(folder / "train" / "part-00000-of-00500", padded(take(drawn, 0, 50), 64, 9))
    write_records(folder / "train" / "b.tfrecord", padded(take(drawn, 50, 90), 64, 9))
    write_records(folder / "eval" / "eval.tfrecord", padded(take(drawn, 90, 120), 64, 9))
    vocabulary.write(folder / "vocab.txt", NUMBERS.entries)
    return folder
