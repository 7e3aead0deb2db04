"""MLPerf's own prepared samples: TFRecord files of the reference, HDF5 files of NVIDIA's submissions.

Both have samples padded to the same length: ``input_ids``, ``input_mask``, ``segment_ids``, ``masked_lm_positions``,
``masked_lm_ids`` and ``next_sentence_labels``. Where the first padding is and where the second segment begins is read
from the tokens themselves: create_pretraining_data.py of NVIDIA v0.7 leaves ``input_mask`` and ``segment_ids`` of its
HDF5 files zero.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from benchmarks.bert import buckets, overlap, tfrecord
from benchmarks.bert.masking import stream
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.workers import Report
from benchmarks.language import wordpiece
from benchmarks.language.arrays import Samples
from benchmarks.language.wordpiece import Vocabulary

TFRECORD, HDF5 = "tfrecord", "hdf5"
ENDINGS = {".tfrecord": TFRECORD, ".tfrecords": TFRECORD, ".hdf5": HDF5, ".h5": HDF5}
CHUNK_SAMPLES = 4096
"""Converted at once."""
SHARD_CHUNKS = 8
"""Of a shard: 32,768 samples of 512 tokens are 33 MB."""
_KEYS = ("input_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
_CHECKED = ("input_mask", "segment_ids")
_SEED = 3
"""Behind those of masking and of the buckets."""

Rows = Dict[str, np.ndarray]
"""[samples, length] by the key."""


class Packed(NamedTuple):
    """One file of samples."""

    number: int
    part: str
    path: str
    form: str
    size: int
    """Bytes."""
    stem: str
    vocabulary: str
    buckets: int
    seed: int
    compared: str = ""
    """File of the runs of the evaluation set, sorted; empty for the evaluation set itself."""

    @property
    def facts_path(self) -> Path:
        """The file that says that it is done."""
        return Path(f"{self.stem}.convert.json")

    @property
    def seen_path(self) -> Path:
        """Which of those runs it has: bool [runs]."""
        return Path(f"{self.stem}.seen")


def form_of(path: Path) -> str:
    """Return the form of a file of samples, or nothing; the reference's files have no ending."""
    form = ENDINGS.get(path.suffix.lower(), "")
    if form or not path.name.startswith("part"):
        return form
    with path.open("rb") as file:
        head = file.read(12)
    return TFRECORD if len(head) == 12 and _is_framed(head) else HDF5 if head.startswith(b"\x89HDF") else ""


def _is_framed(head: bytes) -> bool:
    return int(tfrecord.masked(tfrecord.crc32c([head[:8]]))[0]) == int.from_bytes(head[8:], "little")


def convert(packed: Packed, report: Report) -> Tuple[int, int]:
    """Write the samples of a file as shards, grouped by bucket."""
    vocabulary = _vocabulary(packed.vocabulary)
    random = stream(packed.seed, _SEED, packed.number)
    digest = hashlib.md5()
    width = predictions = count = 0
    shards: List[str] = []
    waiting: List[Samples] = []

    def flush() -> None:
        samples = buckets.join(waiting)
        stem = f"{packed.stem}-{len(shards):04}"
        buckets.write_grouped(stem, samples, random.randint(packed.buckets, size=len(samples)), packed.buckets)
        shards.append(stem)
        waiting.clear()

    wanted = np.fromfile(packed.compared, np.uint64) if packed.compared else np.zeros(0, np.uint64)
    seen = np.zeros(len(wanted), bool)
    for rows in _rows(Path(packed.path), packed.form):
        width, predictions = rows["input_ids"].shape[1], rows["masked_lm_positions"].shape[1]
        samples = to_samples(rows, vocabulary, packed.path, count)
        digest.update(samples.tokens.tobytes() + samples.masked_labels.tobytes())
        overlap.mark_seen(seen, wanted, samples, vocabulary)
        waiting.append(samples)
        count += len(samples)
        if len(waiting) == SHARD_CHUNKS:
            flush()
        report(packed.size * count // (count + CHUNK_SAMPLES), 0)
    if not count:
        raise Problem(f"{packed.path} holds no sample", "MLPerf's records", "remove it, or get it again")
    if waiting:
        flush()
    buckets.write_in_one_step(packed.seen_path, seen.tobytes())
    facts = {"shards": shards, "samples": count, "width": width, "predictions": predictions, "md5": digest.hexdigest()}
    buckets.write_in_one_step(packed.facts_path, json.dumps(facts).encode())
    return packed.size, 0


@lru_cache(maxsize=1)
def _vocabulary(path: str) -> Vocabulary:
    return wordpiece.read(Path(path))


# -- rows ------------------------------------------------------------------------------------------------------


def _rows(path: Path, form: str) -> Iterator[Rows]:
    return _rows_of_hdf5(path) if form == HDF5 else _rows_of_records(path)


def _rows_of_records(path: Path) -> Iterator[Rows]:
    waiting: List[tfrecord.Record] = []
    first = 0
    for record in tfrecord.read(path):
        waiting.append(record)
        if len(waiting) == CHUNK_SAMPLES:
            yield _parse(path, waiting, first)
            first += len(waiting)
            waiting = []
    if waiting:
        yield _parse(path, waiting, first)


def _parse(path: Path, records: Sequence[tfrecord.Record], first: int) -> Rows:
    tfrecord.check(path, records, first)
    found: List[Dict[str, np.ndarray]] = []
    for number, record in enumerate(records, first):
        try:
            features = tfrecord.features(record.content)
        except ValueError as error:
            raise Problem(f"{path}, record {number:,}: {error}", "a tf.train.Example", tfrecord.REMEDY) from None
        missing = [key for key in _KEYS if key not in features]
        if missing:
            raise Problem(f"{path}, record {number:,} lacks {missing[0]}", ", ".join(_KEYS), _NOT_OURS)
        if found and any(len(features[key]) != len(found[0][key]) for key in _KEYS):
            raise Problem(f"{path}, record {number:,} has another length", "records of one length", _NOT_OURS)
        found.append(features)
    keys = [key for key in (*_KEYS, *_CHECKED) if key in found[0]]
    return {key: np.stack([each[key] for each in found]) for key in keys}


_NOT_OURS = "name a folder of records that create_pretraining_data.py wrote"


def _rows_of_hdf5(path: Path) -> Iterator[Rows]:
    """Yield the rows of an HDF5 file.

    Raises:
        Problem: h5py is missing, or the file cannot be read.
    """
    try:
        import h5py
    except ImportError:
        remedy = "use the Python of the framework's environment, which has it, or prepare from TFRecord or text"
        raise Problem(f"{path} is HDF5, and h5py is not installed in this Python", "h5py", remedy) from None
    try:
        with h5py.File(str(path), "r") as file:
            missing = [key for key in _KEYS if key not in file]
            if missing:
                raise Problem(f"{path} lacks {missing[0]}", ", ".join(_KEYS), _NOT_OURS)
            keys = [key for key in (*_KEYS, *_CHECKED) if key in file]
            counts = {len(file[key]) for key in keys}
            if len(counts) > 1:
                raise Problem(f"{path}: arrays of {sorted(counts)} samples", "equal numbers", tfrecord.REMEDY)
            for begin in range(0, counts.pop(), CHUNK_SAMPLES):
                yield {key: np.asarray(file[key][begin : begin + CHUNK_SAMPLES]) for key in keys}
    except (OSError, KeyError, RuntimeError) as error:
        raise Problem(f"{path} cannot be read: {error}", "a whole HDF5 file", tfrecord.REMEDY) from None


# -- samples ---------------------------------------------------------------------------------------------------


def to_samples(rows: Rows, vocabulary: Vocabulary, path: str, first: int) -> Samples:
    """Return padded rows without their padding; the first one has the number ``first`` in its file.

    Raises:
        Problem: an id is beyond the vocabulary, or a row is no sample of two segments.
    """
    tokens, labels = rows["input_ids"], rows["masked_lm_ids"]
    places = rows["masked_lm_positions"].astype(np.int64)
    count, width = tokens.shape
    if count == 0:
        return buckets.join([])
    _refuse(((tokens >= vocabulary.size) | (tokens < 0)).any(1), path, first, _beyond(tokens, vocabulary), vocabulary)
    _refuse(((labels >= vocabulary.size) | (labels < 0)).any(1), path, first, _beyond(labels, vocabulary), vocabulary)
    # [CLS] is at place 0, so that is where padding points to.
    is_masked = places > 0
    _refuse((places >= width).any(1) | (places < 0).any(1), path, first, "a masked place outside of the row")
    original = tokens.copy()
    row = np.repeat(np.arange(count), is_masked.sum(1))
    original[row, places[is_masked]] = labels[is_masked]
    is_end = original == vocabulary.sep
    _refuse((original[:, 0] != vocabulary.cls) | (is_end.sum(1) != 2), path, first, "no [CLS] a [SEP] b [SEP]")
    seconds = is_end.argmax(1) + 1
    lengths = width - is_end[:, ::-1].argmax(1)
    is_token = np.arange(width) < lengths[:, None]
    _refuse((np.where(is_masked, places, 0) >= lengths[:, None]).any(1), path, first, "a masked place in the padding")
    _refuse((np.diff(np.where(is_masked, places, width), axis=1) < 0).any(1), path, first, "masked places out of order")
    _compare(rows, path, first, is_token, seconds)
    counts = is_masked.sum(1)
    return Samples(
        tokens[is_token].astype(np.uint16),
        np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        seconds.astype(np.uint16),
        places[is_masked].astype(np.uint16),
        labels[is_masked].astype(np.uint16),
        np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
        rows["next_sentence_labels"].reshape(count).astype(np.uint8),
    )


def _beyond(ids: np.ndarray, vocabulary: Vocabulary) -> str:
    wrong = ids[(ids >= vocabulary.size) | (ids < 0)]
    return f"id {int(wrong[0]):,}" if len(wrong) else ""


def _compare(rows: Rows, path: str, first: int, is_token: np.ndarray, seconds: np.ndarray) -> None:
    """Compare with ``input_mask`` and ``segment_ids`` where the file has them."""
    mask, segments = (rows.get(key) for key in _CHECKED)
    if mask is not None and mask.any():
        _refuse((mask.astype(bool) != is_token).any(1), path, first, "an input_mask that is not that of its tokens")
    if segments is not None and segments.any():
        wanted = is_token & (np.arange(is_token.shape[1]) >= seconds[:, None])
        _refuse((segments.astype(bool) != wanted).any(1), path, first, "segment_ids that are not those of its tokens")


def _refuse(wrong: Any, path: str, first: int, what: str, vocabulary: Optional[Vocabulary] = None) -> None:
    if wrong.any():
        found = f"{path}, record {first + int(np.flatnonzero(wrong)[0]):,}: {what}"
        if vocabulary is not None:
            remedy = "name the vocabulary that the records were made with: --vocabulary FILE"
            raise Problem(found, f"ids below {vocabulary.size:,}, the size of the vocabulary", remedy)
        raise Problem(
            found, "a sample of create_pretraining_data.py, and its vocabulary", f"{_NOT_OURS}, or its vocab.txt"
        )


def refuse_equal_files(facts: Sequence[Tuple[str, Dict[str, Any]]]) -> None:
    """Refuse files with the same samples: a published round had all of its shards the same.

    Raises:
        Problem: two have.
    """
    seen: Dict[str, str] = {}
    for path, each in facts:
        other = seen.setdefault(each["md5"], path)
        if other != path:
            found = f"{path} and {other} hold the same samples"
            raise Problem(found, "other samples in every file", "make the files again, each from its own text")
