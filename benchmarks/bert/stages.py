"""The stages that worker processes run: text to clean sentences, sentences to samples.

A block is a range of a source file. Cleaning writes its documents as shards of bounded size, ``.text`` (one sentence a
line, an empty line between documents) and ``.md5`` (16 bytes a document). A shard is what samples are made of: a random
second segment is from the same shard, as the reference takes it from the same one of its 500 files. Each stage ends
with a file of facts; what has it is done.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from benchmarks.bert import buckets, masking, texts, wikipedia
from benchmarks.bert.masking import Documents, Settings
from benchmarks.bert.texts import Document
from benchmarks.common.data.files import in_one_step, write_facts
from benchmarks.common.data.workers import Report
from benchmarks.language import vocabulary
from benchmarks.language.wordpiece import Tokenizer

SHARD_BYTES = 8 << 20  # text of a shard, about: what a worker holds in memory, about 40 times

DIGEST_BYTES = 16
DUMP = "dump"  # the form of a Wikipedia dump; the others are those of texts


class Block(NamedTuple):
    """A range of a source file."""

    part: str
    form: str
    path: str
    begin: int
    end: int
    stem: str  # path of its files, without what each adds to it
    shard_bytes: int  # text of a shard, about

    @property
    def done_path(self) -> Path:
        """The file of its facts, which marks it as done."""
        return Path(f"{self.stem}.clean.json")


class Shard(NamedTuple):
    """Clean text of bounded size, and how its samples are made."""

    number: int
    part: str
    stem: str
    size: int  # bytes of text
    left_out: Tuple[int, ...]  # documents that are not taken: those of the evaluation set
    settings: Settings
    seed: int
    buckets: int
    vocabulary: str

    @property
    def done_path(self) -> Path:
        """The file of its facts, which marks it as done."""
        return Path(f"{self.stem}.mask.json")


# -- clean ---------------------------------------------------------------------------------------------------


def clean(block: Block, report: Report) -> Tuple[int, int]:
    """Write the documents of a block as shards."""
    counts: Dict[str, int] = {}
    shards: List[Dict[str, int]] = []
    lines: List[str] = []
    digests: List[bytes] = []
    size = sentences = 0

    def flush() -> None:
        nonlocal size, sentences
        stem = f"{block.stem}-{len(shards):04}"
        for suffix, content in (("text", "\n".join(lines).encode("utf-8")), ("md5", b"".join(digests))):
            with in_one_step(Path(f"{stem}.{suffix}")) as file:
                file.write(content)
        shards.append({"documents": len(digests), "sentences": sentences, "bytes": size})
        lines.clear()
        digests.clear()
        size = sentences = 0

    for document in _documents(block, counts, report):
        lines += [*document.sentences, ""]
        digests.append(hashlib.md5(document.raw.encode("utf-8")).digest())
        size += sum(len(each.encode("utf-8")) for each in document.sentences)
        sentences += len(document.sentences)
        if size >= block.shard_bytes:
            flush()
    if digests:
        flush()
    write_facts(block.done_path, {"shards": shards, "counts": counts})
    return block.end - block.begin, 0


def _documents(block: Block, counts: Dict[str, int], report: Report) -> Iterator[Document]:
    def so_far(done: int) -> None:
        report(min(done, block.end - block.begin), 0)

    path = Path(block.path)
    if block.form == DUMP:
        yield from wikipedia.read(path, block.begin, block.end, counts, so_far)
    else:
        yield from texts.read(path, block.form, block.begin, block.end, so_far)


def read_shard(stem: str) -> Iterator[List[str]]:
    """Yield the sentences of each document of a shard."""
    text = Path(f"{stem}.text").read_bytes().decode("utf-8")
    for document in text[:-1].split("\n\n"):
        yield document.split("\n")


def count_digests(stem: str) -> int:
    """Return the number of documents of a shard."""
    return Path(f"{stem}.md5").stat().st_size // DIGEST_BYTES


def read_digests(stem: str) -> List[bytes]:
    """Return the md5 of each document of a shard."""
    content = Path(f"{stem}.md5").read_bytes()
    return [content[place : place + DIGEST_BYTES] for place in range(0, len(content), DIGEST_BYTES)]


# -- mask ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> Tokenizer:
    return Tokenizer(vocabulary.read(Path(path)))


def mask(shard: Shard, report: Report) -> Tuple[int, int]:
    """Write the samples of a shard, grouped by bucket."""
    tokenizer = _tokenizer(shard.vocabulary)
    documents, unknown = tokenize(read_shard(shard.stem), set(shard.left_out), tokenizer)
    count = len(documents.documents) - 1
    passes = []
    for number in range(shard.settings.duplication if count else 0):
        random = masking.stream(shard.seed, PARTS_BY_NUMBER.index(shard.part), shard.number, number)
        passes.append(masking.make_samples(documents, range(count), shard.settings, tokenizer.vocabulary, random))
        report(shard.size * number // shard.settings.duplication, 0)
    random = masking.stream(shard.seed, PARTS_BY_NUMBER.index(shard.part), shard.number, shard.settings.duplication)
    samples = buckets.join(passes)
    facts = {"unknown": unknown, "documents": count, "tokens": len(documents.tokens), "samples": len(samples)}
    buckets.write_grouped(shard.stem, samples, random.randint(shard.buckets, size=len(samples)), shard.buckets)
    write_facts(shard.done_path, facts)
    return shard.size, 0


PARTS_BY_NUMBER = ("train", "test")  # their numbers are seeds


def tokenize(texts_of: "Iterator[Sequence[str]]", left_out: "set[int]", tokenizer: Tokenizer) -> Tuple[Documents, int]:
    """Return the tokens of all documents but those left out, without empty ones, and how many are unknown."""
    pieces: List[np.ndarray] = []
    ends, firsts = [0], [0]
    unknown = 0
    for number, document in enumerate(texts_of):
        if number in left_out:
            continue
        for sentence in document:
            ids = tokenizer.encode(sentence).ids
            if ids:
                pieces.append(np.array(ids, np.uint16))
                ends.append(ends[-1] + len(ids))
                unknown += ids.count(tokenizer.vocabulary.unk)
        if len(ends) - 1 > firsts[-1]:
            firsts.append(len(ends) - 1)
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)
    return Documents(tokens, ends, firsts), unknown
