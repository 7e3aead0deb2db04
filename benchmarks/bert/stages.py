"""Worker process stages: text to clean sentences, sentences to samples.

A block is a source file range. Cleaning writes its documents as shards with bounded size: ``.text`` (one sentence
per line, an empty line between documents) and ``.md5`` (16 bytes per document). Samples are built per shard: a
random second segment is from the same shard, like from the same of the 500 files in the reference. A stage writes a
file with facts at the end, which marks it as done.
"""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from benchmarks.bert import masking, shards, texts, wikipedia
from benchmarks.common.data.files import in_one_step, write_facts
from benchmarks.common.data.workers import Report
from benchmarks.language import PARTS, vocabulary
from benchmarks.language.wordpiece import Tokenizer

SHARD_BYTES = 8 << 20  # approximate text per shard; a worker needs about 40 times this memory
DIGEST_BYTES = 16


class Block(NamedTuple):
    part: str
    form: str
    path: str
    begin: int
    end: int
    stem: str  # path of the output files without suffix
    shard_bytes: int  # approximate text per shard

    @property
    def done_path(self) -> Path:
        return Path(f"{self.stem}.clean.json")


class Shard(NamedTuple):
    # Clean text with bounded size, and its sample settings.

    number: int
    part: str
    stem: str
    size: int  # bytes of text
    left_out: Tuple[int, ...]  # excluded documents: the evaluation set
    settings: masking.Settings
    seed: int
    vocabulary: str

    @property
    def done_path(self) -> Path:
        return Path(f"{self.stem}.mask.json")


# -- clean ---------------------------------------------------------------------------------------------------


def clean(block: Block, report: Report) -> Tuple[int, int]:
    counts: Counter[str] = Counter()
    shard_counts: List[Dict[str, int]] = []
    path, span = Path(block.path), (block.begin, block.end)
    if block.form == wikipedia.DUMP:
        all_documents = wikipedia.read(path, *span, counts, lambda done: report(done, 0))
    else:
        all_documents = texts.read(path, block.form, *span)
    for documents in _of_bounded_size(all_documents, block.shard_bytes):
        stem = f"{block.stem}-{len(shard_counts):04}"
        digests = b"".join(hashlib.md5(document.raw.encode("utf-8")).digest() for document in documents)
        for suffix, content in (("text", shard_text(document.sentences for document in documents)), ("md5", digests)):
            with in_one_step(Path(f"{stem}.{suffix}")) as file:
                file.write(content)
        sentences = sum(len(document.sentences) for document in documents)
        size = sum(document.size for document in documents)
        shard_counts.append({"documents": len(documents), "sentences": sentences, "bytes": size})
    write_facts(block.done_path, {"shards": shard_counts, "counts": counts})
    return block.end - block.begin, 0


def _of_bounded_size(documents: Iterable[texts.Document], size: int) -> Iterator[List[texts.Document]]:
    group: List[texts.Document] = []
    group_bytes = 0
    for document in documents:
        group.append(document)
        group_bytes += document.size
        if group_bytes >= size:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group


def shard_text(documents: Iterable[Sequence[str]]) -> bytes:
    # Return a ``.text`` file's content.
    return "\n\n".join("\n".join(document) for document in documents).encode("utf-8")


def read_shard(stem: str) -> Iterator[List[str]]:
    for document in Path(f"{stem}.text").read_bytes().decode("utf-8").split("\n\n"):
        yield document.split("\n")


def read_digests(stem: str) -> List[bytes]:
    # Return the MD5 digests of a shard's documents.
    content = Path(f"{stem}.md5").read_bytes()
    return [content[offset : offset + DIGEST_BYTES] for offset in range(0, len(content), DIGEST_BYTES)]


# -- mask ----------------------------------------------------------------------------------------------------


def mask(shard: Shard, report: Report) -> Tuple[int, int]:
    # Write a shard's samples, shuffled if they are for training.
    tokenizer, passes = Tokenizer(vocabulary.read(Path(shard.vocabulary))), []
    documents, unknown = tokenize(read_shard(shard.stem), set(shard.left_out), tokenizer)
    count = len(documents.documents) - 1
    for number in range(shard.settings.duplication if count else 0):
        random = masking.stream(shard.seed, PARTS.index(shard.part), shard.number, number)
        passes.append(masking.make_samples(documents, range(count), shard.settings, tokenizer.vocabulary, random))
        report(shard.size * number // shard.settings.duplication, 0)
    samples = shards.join(passes)
    if shard.part == "train":
        samples = shards.shuffled(samples, shard.seed, shard.part, shard.number)
    shards.write(shard.stem, samples)
    write_facts(shard.done_path, {"unknown": unknown, "documents": count})
    return shard.size, 0


def tokenize(
    texts_of: "Iterator[Sequence[str]]", left_out: "set[int]", tokenizer: Tokenizer
) -> Tuple[masking.Documents, int]:
    """Return the tokens of all documents but the excluded ones, without empty documents, and the number of unknown
    tokens.
    """
    pieces: List[np.ndarray] = [np.zeros(0, np.uint16)]
    ends, firsts = [0], [0]
    for number, document in enumerate(texts_of):
        for sentence in document if number not in left_out else ():
            ids = tokenizer.encode(sentence).ids
            if ids:
                pieces.append(np.array(ids, np.uint16))
                ends.append(ends[-1] + len(ids))
        if len(ends) - 1 > firsts[-1]:
            firsts.append(len(ends) - 1)
    tokens = np.concatenate(pieces)
    return masking.Documents(tokens, ends, firsts), int((tokens == tokenizer.vocabulary.unk).sum())
