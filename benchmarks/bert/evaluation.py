"""The evaluation set: source articles selected with MLPerf's rule, or a separate text; excluded from training.

MLPerf's rule (transparency_in_test_set_generation.py, NVIDIA v0.7): article 42, counted from 0, in each of the text's
500 parts, or the middle article in parts with fewer than 84. Here, all parts have an equal number of consecutive
documents, and a text too small for 500 parts has fewer.
"""

from itertools import chain
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

from benchmarks.bert import stages
from benchmarks.bert.sources import Task
from benchmarks.common.data import source_checks
from benchmarks.common.data.files import in_one_step, read_facts
from benchmarks.common.data.problem import Problem

PARTS, ARTICLE = 500, 42
LEAST_DOCUMENTS = 20  # minimum documents per part: up to one in 20 is for evaluation
Sized = Tuple[str, int]  # (shard stem, bytes of text)


class Chosen(NamedTuple):
    train: Tuple[Sized, ...]
    test: Tuple[Sized, ...]
    left_out: Dict[str, Tuple[int, ...]]  # documents excluded from a training shard
    copies: int  # number of excluded documents that are copies of evaluation documents
    rule: str
    common: int = 0  # documents in a separate evaluation text that are also in training


def chosen_places(documents: int) -> List[int]:
    # Return the numbers of the documents that are for evaluation.
    parts = max(1, min(PARTS, documents // LEAST_DOCUMENTS))
    indices = []
    for part in range(parts):
        start, end = documents * part // parts, documents * (part + 1) // parts
        indices.append(start + min(ARTICLE, (end - start) // 2))
    return indices


def choose(blocks: Sequence[stages.Block], task: Task) -> Chosen:
    """Select training and evaluation documents.

    Raises:
        Problem: the text or a listed article is missing, or evaluation and training text overlap.
    """
    train, test = _shards(blocks, "train"), _shards(blocks, "test")
    total = sum(1 for _ in _digests(train))
    if total < 2:
        paths = ", ".join(sorted({block.path for block in blocks}))
        raise Problem(f"{paths}: {total} documents with text", "at least two documents", "name another source")
    if test:
        test_keys = [
            (f"the one that starts with: {document[0][:80]}", digest)
            for stem, _ in test
            for document, digest in zip(stages.read_shard(stem), stages.read_digests(stem))
        ]
        common = source_checks.overlap(
            test_keys, _digests(train), "documents", task.allows_overlap, task.workers.progress
        )
        return Chosen(tuple(train), tuple(test), {}, 0, f"{len(test_keys):,} documents of a separate text", common)
    if task.source.listed is None:
        numbers = chosen_places(total)
        share = total // len(numbers)
        rule = f"{len(numbers):,} of {total:,} documents: of each {share:,} the one at {ARTICLE} or the middle"
    else:
        numbers = _listed_places(train, task.source.listed, total)
        rule = f"the {len(numbers):,} documents of {task.source.listed.name}"
    return _cut(train, numbers, rule, task.scratch)


def _shards(blocks: Sequence[stages.Block], part: str) -> List[Sized]:
    return [
        (f"{block.stem}-{number:04}", shard["bytes"])
        for block in blocks
        if block.part == part
        for number, shard in enumerate(read_facts(block.done_path)["shards"])
    ]


def _digests(shards: Sequence[Sized]) -> Iterator[bytes]:
    return chain.from_iterable(stages.read_digests(stem) for stem, _ in shards)


def _cut(train: Sequence[Sized], numbers: Sequence[int], rule: str, folder: Path) -> Chosen:
    # Write the selected articles as a shard; their copies are also excluded from training.
    selected = set(numbers)
    test_digests = {digest for number, digest in enumerate(_digests(train)) if number in selected}
    documents: List[List[str]] = []
    left_out = {}
    number = 0
    for stem, _ in train:
        digests = stages.read_digests(stem)
        here = {index for index in range(len(digests)) if number + index in selected}
        number += len(digests)
        if here:
            documents += [document for index, document in enumerate(stages.read_shard(stem)) if index in here]
        overlaps = tuple(index for index, digest in enumerate(digests) if digest in test_digests)
        if overlaps:
            left_out[stem] = overlaps
    stem = str(folder / "chosen")
    with in_one_step(Path(f"{stem}.text")) as file:
        file.write(stages.shard_text(documents))
    size = sum(len(sentence.encode("utf-8")) for sentences in documents for sentence in sentences)
    copies = sum(map(len, left_out.values())) - len(documents)
    return Chosen(tuple(train), ((stem, size),), left_out, copies, rule)


def _listed_places(train: Sequence[Sized], listed: Path, total: int) -> List[int]:
    # Index of the first document per digest in the list.
    hint = "take wiki_test_set_md5.txt of the submission"
    try:
        selected = {bytes.fromhex(line) for line in listed.read_text(encoding="utf-8").split()}
    except (OSError, ValueError) as error:
        raise Problem(f"{listed}: {error}", "32 hexadecimal digits per line", hint) from None
    if not selected or {len(digest) for digest in selected} != {16}:
        raise Problem(f"{listed} is not a list of MD5 sums", "32 hexadecimal digits per line", hint)
    missing, positions = set(selected), []
    for number, digest in enumerate(_digests(train)):
        if digest in missing:
            missing.remove(digest)
            positions.append(number)
    if missing:
        raise Problem(
            f"{len(missing):,} of {len(selected):,} documents of {listed} are not among the {total:,} of the source, "
            f"such as {min(missing).hex()}",
            "the text that the list was made from: results/part-* of process_wiki.sh, dump of 2020-01-01",
            "use that text as the raw data, or omit --evaluation-list to select the set by MLPerf's rule",
        )
    return positions
