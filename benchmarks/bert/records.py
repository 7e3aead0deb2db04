"""Convert MLPerf's prepared samples: TFRecord files of the reference, HDF5 files of NVIDIA's submissions.

Both have samples padded to the same length: ``input_ids``, ``input_mask``, ``segment_ids``, ``masked_lm_positions``,
``masked_lm_ids`` and ``next_sentence_labels``. The start of the padding and of the second segment are computed from
the tokens: in HDF5 files of NVIDIA v0.7 (create_pretraining_data.py), ``input_mask`` and ``segment_ids`` are zero.
The padding is removed, and training and evaluation samples are compared.
"""

import hashlib
from itertools import chain, islice
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from benchmarks.bert import shards
from benchmarks.bert.masking import stream
from benchmarks.bert.sources import HDF5, TFRECORD, File, Prepared, Task
from benchmarks.common.data import source_checks
from benchmarks.common.data.files import in_one_step, read_facts, write_facts
from benchmarks.common.data.prepare import check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.workers import Report
from benchmarks.language import tensorflow_files, vocabulary
from benchmarks.language.arrays import Samples
from benchmarks.language.vocabulary import Vocabulary

SHARD_SAMPLES = 8192  # samples per conversion step: with 512 tokens, about 200 MB of memory per worker
_KEYS = ("input_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
_CHECKED = ("input_mask", "segment_ids")
_SEED = 3  # after the seeds of masking and shuffling

Rows = Dict[str, np.ndarray]  # [samples, length] by the key


class Packed(NamedTuple):
    number: int
    part: str
    path: str
    form: str
    size: int  # bytes
    stem: str
    vocabulary: str
    seed: int
    compared: str = ""  # file with the sorted run hashes of the evaluation set; empty for the evaluation set

    @property
    def done_path(self) -> Path:
        return Path(f"{self.stem}.convert.json")


def write(task: Task) -> Prepared:
    """Write the shards of both parts and the vocabulary.

    Raises:
        Problem: records are damaged, differ in vocabulary or length, or the parts overlap.
    """
    if task.source.vocabulary is None:
        raise Problem("records without a vocabulary", "the vocabulary used for them", "add --vocabulary FILE")
    check_room(task.scratch, 2 * sum(file.path.stat().st_size for file in task.source.train))
    entries = vocabulary.read(task.source.vocabulary)
    vocabulary.write(task.vocabulary, entries.entries)
    held_facts = _convert_all(task, "test", task.source.test)
    # First samples in file order, like run_pretraining.py (NVIDIA v0.7).
    test_samples = shards.join(map(shards.read, chain.from_iterable(file_facts["shards"] for file_facts in held_facts)))
    test_samples = test_samples.take(np.arange(min(task.most, len(test_samples))))
    runs = task.scratch / "runs"
    test_hashes = np.unique(runs_of(test_samples, entries)[0])
    with in_one_step(runs) as file:
        file.write(test_hashes.tobytes())
    train_facts = _convert_all(task, "train", task.source.train, str(runs))
    all_facts = [*train_facts, *held_facts]
    width = _width(all_facts)
    refuse_equal_files(all_facts)
    is_in_train = np.any([np.fromfile(file_facts["seen"], bool) for file_facts in train_facts], axis=0)
    overlaps = _overlapping(test_samples, entries, test_hashes, is_in_train)
    common = source_checks.overlapping(
        overlaps, len(test_samples), "samples", task.allows_overlap, task.workers.progress
    )
    train = [stem for file_facts in train_facts for stem in file_facts["shards"]]
    return Prepared(train, test_samples, width, {"kind": "records"}, {"files": len(all_facts), "in_both": common})


def _convert_all(task: Task, part: str, files: Sequence[File], compared: str = "") -> List[Dict[str, Any]]:
    packed = []
    for number, file in enumerate(files):
        stem, size = str(task.scratch / f"{part}-{number:06}"), file.path.stat().st_size
        how = stem, str(task.vocabulary), task.seed, compared
        packed.append(Packed(number, part, str(file.path), file.form, size, *how))
    task.workers.run("convert", "bytes", convert, packed, lambda item: item.size)
    return [read_facts(item.done_path) for item in packed]


def _width(file_facts: Sequence[Mapping[str, Any]]) -> Tuple[int, int]:
    # Maximum number of tokens and masked tokens per sample: the same in all files.
    widths: Dict[Tuple[int, int], str] = {}
    for item in file_facts:
        widths.setdefault((item["width"], item["predictions"]), item["path"])
    if len(widths) > 1:
        raise Problem(
            "; ".join(f"{path}: {width} tokens, {masked} masked" for (width, masked), path in widths.items()),
            "records of equal length",
            "pass files of one phase: 128 or 512 tokens",
        )
    return next(iter(widths))


def refuse_equal_files(file_facts: Sequence[Mapping[str, Any]]) -> None:
    """Reject files with the same samples: in a published round, all shards were the same.

    Raises:
        Problem: two files have the same samples.
    """
    paths_by_md5: Dict[str, str] = {}
    for item in file_facts:
        other = paths_by_md5.setdefault(item["md5"], item["path"])
        if other != item["path"]:
            raise Problem(
                f"{item['path']} and {other} contain the same samples",
                "different samples in each file",
                "create the files again, each from a different text",
            )


# -- one file --------------------------------------------------------------------------------------------------


def convert(packed: Packed, report: Report) -> Tuple[int, int]:
    # Write a file's samples as shards, shuffled if they are for training.
    entries, random = vocabulary.read(Path(packed.vocabulary)), stream(packed.seed, _SEED, packed.number)
    digest = hashlib.md5()
    width = predictions = count = 0
    stems: List[str] = []
    test_hashes = np.fromfile(packed.compared, np.uint64) if packed.compared else np.zeros(0, np.uint64)
    is_in_train = np.zeros(len(test_hashes), bool)
    for rows in READERS[packed.form](Path(packed.path)):
        width, predictions = rows["input_ids"].shape[1], rows["masked_lm_positions"].shape[1]
        samples = to_samples(rows, entries, packed.path, count)
        digest.update(samples.tokens.tobytes() + samples.masked_labels.tobytes())
        if packed.compared:
            is_in_train |= np.isin(test_hashes, runs_of(samples, entries)[0])
        stems.append(f"{packed.stem}-{len(stems):04}")
        shards.write(stems[-1], samples.take(random.permutation(len(samples))) if packed.part == "train" else samples)
        count += len(samples)
        report(packed.size * count // (count + SHARD_SAMPLES), 0)
    if not count:
        raise Problem(f"{packed.path} contains no samples", "MLPerf's records", "delete it, or download it again")
    with in_one_step(Path(f"{packed.stem}.seen")) as file:
        file.write(is_in_train.tobytes())
    file_facts = {"path": packed.path, "width": width, "predictions": predictions, "md5": digest.hexdigest()}
    write_facts(packed.done_path, {**file_facts, "shards": stems, "seen": f"{packed.stem}.seen"})
    return packed.size, 0


# -- rows ------------------------------------------------------------------------------------------------------

_NOT_OURS = "name a folder of records that create_pretraining_data.py wrote"


def _rows_of_records(path: Path) -> Iterator[Rows]:
    numbered = enumerate(tensorflow_files.records(path))
    while True:
        features = [_features(path, number, content) for number, content in islice(numbered, SHARD_SAMPLES)]
        if not features:
            return
        keys = [key for key in (*_KEYS, *_CHECKED) if key in features[0]]
        try:
            yield {key: np.stack([sample[key] for sample in features]) for key in keys}
        except (KeyError, ValueError) as error:
            raise Problem(
                f"{path} has records of an unknown format: {error}", "records of equal length", _NOT_OURS
            ) from None


def _features(path: Path, number: int, content: bytes) -> Rows:
    try:
        features = tensorflow_files.features(content)
        missing = [key for key in _KEYS if key not in features]
    except (ValueError, IndexError) as error:
        location = f"{path}, record {number:,}"
        raise Problem(f"{location}: {error}", "a tf.train.Example", tensorflow_files.HINT) from None
    if missing:
        raise Problem(f"{path}, record {number:,} lacks {missing[0]}", ", ".join(_KEYS), _NOT_OURS)
    return features


def _rows_of_hdf5(path: Path) -> Iterator[Rows]:
    # Yield an HDF5 file's rows. Raises Problem if h5py is missing or the file cannot be read.
    try:
        import h5py
    except ImportError:
        raise Problem(
            f"{path} is HDF5, and h5py is not installed in this Python",
            "h5py",
            "use the Python of the framework's environment, which has it, or prepare from TFRecord or text",
        ) from None
    try:
        with h5py.File(str(path), "r") as file:
            keys = [key for key in (*_KEYS, *_CHECKED) if key in _KEYS or key in file]
            for start in range(0, len(file[keys[0]]), SHARD_SAMPLES):
                yield {key: np.asarray(file[key][start : start + SHARD_SAMPLES]) for key in keys}
    except KeyError as error:
        raise Problem(f"{path} lacks an array: {error}", ", ".join(_KEYS), _NOT_OURS) from None
    except (OSError, RuntimeError) as error:
        raise Problem(f"{path} cannot be read: {error}", "a whole HDF5 file", tensorflow_files.HINT) from None


READERS = {TFRECORD: _rows_of_records, HDF5: _rows_of_hdf5}


# -- samples ---------------------------------------------------------------------------------------------------


def to_samples(rows: Rows, vocabulary: Vocabulary, path: str, first: int) -> Samples:
    """Return padded rows without padding; the first row has number ``first`` in the file.

    Raises:
        Problem: an id is outside the vocabulary, or a row is not a sample with two segments.
    """
    tokens, labels = rows["input_ids"], rows["masked_lm_ids"]
    positions = rows["masked_lm_positions"].astype(np.int64)
    count, width = tokens.shape
    if {len(column) for column in rows.values()} != {count}:
        raise Problem(f"{path}: arrays have different numbers of samples", "equal numbers", tensorflow_files.HINT)
    # Padding positions are 0, the position of [CLS].
    is_masked = positions > 0
    beyond = f"an id beyond the {vocabulary.size:,} entries of the vocabulary"
    unknown = np.any([((ids < 0) | (ids >= vocabulary.size)).any(1) for ids in (tokens, labels)], axis=0)
    outside = ((positions < 0) | (positions >= width)).any(1)
    _refuse(path, first, {beyond: unknown, "a masked position outside the row": outside})
    original = tokens.copy()
    original[np.nonzero(is_masked)[0], positions[is_masked]] = labels[is_masked]
    is_end = original == vocabulary.sep
    seconds, lengths = is_end.argmax(1) + 1, width - is_end[:, ::-1].argmax(1)
    is_token = np.arange(width) < lengths[:, None]
    wrong: Dict[str, Any] = {
        "no [CLS] a [SEP] b [SEP]": (original[:, 0] != vocabulary.cls) | (is_end.sum(1) != 2),
        "a masked place in the padding": (np.where(is_masked, positions, 0) >= lengths[:, None]).any(1),
        "masked places out of order": (np.diff(np.where(is_masked, positions, width), axis=1) < 0).any(1),
    }
    for key, expected in zip(_CHECKED, (is_token, is_token & (np.arange(width) >= seconds[:, None]))):
        if key in rows and rows[key].any():
            wrong[f"{key} that its tokens do not have"] = (rows[key].astype(bool) != expected).any(1)
    _refuse(path, first, wrong)
    return Samples(
        tokens[is_token].astype(np.uint16),
        np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        seconds.astype(np.uint16),
        positions[is_masked].astype(np.uint16),
        labels[is_masked].astype(np.uint16),
        np.concatenate(([0], np.cumsum(is_masked.sum(1), dtype=np.int64))),
        rows["next_sentence_labels"].reshape(count).astype(np.uint8),
    )


def _refuse(path: str, first: int, wrong: Mapping[str, Any]) -> None:
    # Reject the first row with a problem; flags are bool [rows].
    for problem, is_wrong in wrong.items():
        if is_wrong.any():
            raise Problem(
                f"{path}, record {first + int(is_wrong.argmax()):,}: {problem}",
                "a sample of create_pretraining_data.py, and the vocabulary used for it",
                f"{_NOT_OURS}, and its vocab.txt with --vocabulary FILE",
            )


# -- overlap ---------------------------------------------------------------------------------------------------

# Evaluation samples are found in the training part by runs of equal tokens, as the articles are unknown. A run is 16
# consecutive tokens in one segment before masking. One in 16 runs is selected by its hash, so that the same text has
# the same selected runs in all samples. A sample with all runs in the training part was most likely trained on; a
# sentence that occurs in more than one article is not sufficient.
RUN = 16  # tokens
KEPT_BITS = 4  # one of 16 runs is kept
LEAST_RUNS = 8  # samples with fewer runs are not compared; about 150 tokens
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_RUN_SAMPLES = 1024  # samples per step


def runs_of(samples: Samples, entries: Vocabulary) -> Tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the selected runs, uint64 [runs], and their samples, int64 [runs]."""
    parts = [_runs_of(samples, start, entries) for start in range(0, max(1, len(samples)), _RUN_SAMPLES)]
    return np.concatenate([hashes for hashes, _ in parts]), np.concatenate([owners for _, owners in parts])


def _runs_of(samples: Samples, start: int, entries: Vocabulary) -> Tuple[np.ndarray, np.ndarray]:
    end = min(start + _RUN_SAMPLES, len(samples))
    offsets, masked = samples.offsets[start : end + 1], samples.masked_offsets[start : end + 1]
    tokens = np.array(samples.tokens[offsets[0] : offsets[-1]], np.uint64)
    starts = np.repeat(offsets[:-1] - offsets[0], np.diff(masked))
    tokens[starts + samples.masked_places[masked[0] : masked[-1]]] = samples.masked_labels[masked[0] : masked[-1]]
    count = len(tokens) - RUN + 1
    if count <= 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    hashes = np.zeros(count, np.uint64)
    for offset in range(RUN):
        hashes = (hashes + tokens[offset : offset + count] + np.uint64(1)) * _FACTOR
    # Samples start and end with a mark, so runs without marks are in one segment.
    marks = np.concatenate(([0], np.cumsum((tokens == entries.cls) | (tokens == entries.sep))))
    selected = np.flatnonzero((hashes >> np.uint64(64 - KEPT_BITS) == 0) & (marks[RUN:] == marks[:-RUN]))
    owners = np.searchsorted(offsets - offsets[0], selected, side="right") - 1 + start
    return hashes[selected], owners


def _overlapping(test: Samples, entries: Vocabulary, test_hashes: np.ndarray, is_in_train: np.ndarray) -> List[str]:
    """Return the indices of evaluation samples with all runs in the training part."""
    hashes, owners = runs_of(test, entries)
    runs = np.bincount(owners, minlength=len(test))
    common = np.bincount(owners[is_in_train[np.searchsorted(test_hashes, hashes)]], minlength=len(test))
    overlapping = np.flatnonzero((runs >= LEAST_RUNS) & (common == runs))
    return [f"sample {number:,}" for number in overlapping.tolist()]
