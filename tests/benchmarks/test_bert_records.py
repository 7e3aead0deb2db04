"""BERT's samples: masks and pairs of segments, and their conversion from records of other programs."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bert import masking, overlap, records
from benchmarks.bert.masking import Documents, Settings
from benchmarks.bert.sources import TFRECORD
from benchmarks.common.data.problem import Problem
from benchmarks.language import ARRAYS, vocabulary
from benchmarks.language.arrays import Samples, open_data
from encore import paths
from tests.bert_data import (
    NUMBERS,
    drawn_samples,
    padded,
    run,
    take,
    write_packed,
    write_records,
)
from tests.preparing import Lines, refused


@pytest.fixture(scope="module")
def drawn() -> Samples:
    return drawn_samples()


# -- masks ----------------------------------------------------------------------------------------------------


def test_samples_of_a_seed_are_the_recorded_ones(drawn: Samples) -> None:
    # Segments and masks were checked when the digest was recorded; the streams of RandomState do not change
    content = b"".join(getattr(drawn, name).astype(kind).tobytes() for name, kind in ARRAYS.items())
    assert hashlib.md5(content).hexdigest() == "cd71c3aecfdebfc52ae4e0fd012facd2"
    # 80 % of the masked tokens are [MASK], 10 % are unchanged; five standard deviations of 20,000 draws are 0.014
    shown = np.concatenate([drawn[number][drawn.masked(number)[0]] for number in range(len(drawn))])
    assert abs((shown == NUMBERS.mask).mean() - 0.8) < 0.014
    assert abs((shown == drawn.masked_labels).mean() - 0.1) < 0.011


@pytest.mark.parametrize("sizes", [(10, 10), (30, 3), (3, 30), (21, 20), (1, 40)])
def test_longer_segment_is_truncated(sizes: tuple[int, int]) -> None:
    random = masking.stream(0, 0)
    for length in range(2, 20):
        lengths = list(sizes)
        while sum(lengths) > length:
            lengths[0 if lengths[0] > lengths[1] else 1] -= 1
        first, first_end, second, second_end = masking._cut(100, 100 + sizes[0], 500, 500 + sizes[1], length, random)
        assert [first_end - first, second_end - second] == lengths
        assert 100 <= first <= first_end <= 100 + sizes[0] and 500 <= second <= second_end <= 500 + sizes[1]


# -- records --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tmp_path_factory.mktemp("packed"))


def convert(folder: Path, to: Path, *words: object) -> tuple[int, Lines]:
    options = ("--evaluation", folder / "eval", "--vocabulary", folder / "vocab.txt", *words)
    return run(folder / "train", "-o", to, *options, workers=2)


def by_content(samples: Samples) -> list[tuple[Any, ...]]:
    return sorted(
        (
            bytes(samples[number]),
            int(samples.second[number]),
            int(samples.next[number]),
            *samples.masked(number)[1].tolist(),
        )
        for number in range(len(samples))
    )


@pytest.mark.slow
def test_records_of_tensorflow_are_converted(packed: Path, drawn: Samples, tmp_path: Path) -> None:
    assert convert(packed, tmp_path / "to")[0] == 0
    data = open_data(tmp_path / "to")
    assert (data.sequence_length, data.max_predictions, data.passport["facts"]["kind"]) == (64, 9, "records")
    assert by_content(data.train) == by_content(take(drawn, 0, 90))
    # Evaluation reads the samples in the order of the files
    held = take(drawn, 90, 120)
    assert [bytes(data.test[number]) for number in range(30)] == [bytes(held[number]) for number in range(30)]


MAKE_HDF5 = """
import sys, h5py, numpy as np
rows = np.load(sys.argv[1])
with h5py.File(sys.argv[2], "w") as file:
    for key in rows.files:
        file.create_dataset(key, data=rows[key])
"""


@pytest.mark.long
def test_hdf5_files_of_the_submission_are_converted(
    packed: Path, drawn: Samples, pytorch_python: Path, tmp_path: Path
) -> None:
    (tmp_path / "train").mkdir()
    for name, samples in (("train/part_0.hdf5", take(drawn, 0, 50)), ("eval.hdf5", take(drawn, 90, 120))):
        rows = padded(samples, 64, 9, is_hdf5=True)
        rows["next_sentence_labels"] = rows["next_sentence_labels"][:, 0]
        np.savez(tmp_path / "rows.npz", **rows)
        words = [str(pytorch_python), "-c", MAKE_HDF5, str(tmp_path / "rows.npz"), str(tmp_path / name)]
        subprocess.run(words, check=True)
    argv = (tmp_path / "train", "--evaluation", tmp_path / "eval.hdf5", "--vocabulary", packed / "vocab.txt")
    program = (pytorch_python, "-m", "benchmarks.bert.prepare", *argv, "-o")
    subprocess.run([*program, tmp_path / "to"], cwd=paths.ROOT, check=True)
    assert by_content(open_data(tmp_path / "to").train) == by_content(take(drawn, 0, 50))
    assert "h5py is not installed" in refused(run(*argv, "-o", tmp_path / "a"))
    whole = (tmp_path / "train" / "part_0.hdf5").read_bytes()
    (tmp_path / "train" / "part_0.hdf5").write_bytes(whole[: len(whole) // 2])
    done = subprocess.run([*program, tmp_path / "b"], cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "part_0.hdf5 cannot be read" in done.stderr) == (2, True)


# Array, index and new value of a change
ROWS = {
    "mask": ("input_mask", (7, 63), 1),
    "place": ("masked_lm_positions", (5, 0), 64),
    "id": ("masked_lm_ids", (3, 1), 65535),
}


def damage(path: Path, change: str, drawn: Samples) -> None:
    content = bytearray(path.read_bytes())
    if change in ROWS:
        rows = padded(take(drawn, 50, 90), 64, 9)
        name, index, value = ROWS[change]
        rows[name][index] = value
        write_records(path, rows)
        return
    if change == "content":
        content[len(content) // 2] ^= 1
    elif change == "length":
        content[0] ^= 1
    path.write_bytes({"truncated": content[:-7], "none": b"", "text": b"no record at all"}.get(change, content))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("content", r"b.tfrecord, record \d+ at byte [\d,]+ is damaged: another checksum"),
        ("truncated", r"b.tfrecord, record 39 at byte [\d,]+ is truncated"),
        ("length", r"b.tfrecord, record 0 at byte 0 is damaged"),
        ("text", r"b.tfrecord, record 0 at byte 0 is damaged"),
        ("none", r"b.tfrecord holds no sample"),
        ("id", r"record 3: an id beyond the 60,005 entries of the vocabulary\n.*\n.*--vocabulary FILE"),
        ("mask", r"record 7: input_mask that its tokens do not have"),
        ("place", r"record 5: a masked place outside of the row"),
    ],
)
def test_damaged_record_is_named(change: str, problem: str, packed: Path, drawn: Samples, tmp_path: Path) -> None:
    path = Path(shutil.copy(packed / "train" / "b.tfrecord", tmp_path))
    damage(path, change, drawn)
    task = records.Packed(0, "train", str(path), TFRECORD, 1, str(tmp_path / "x"), str(packed / "vocab.txt"), 0)
    with pytest.raises(Problem) as caught:
        records.convert(task, lambda count, size: None)
    assert re.search(problem, str(caught.value)), caught.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("same file", "part-00000-of-00500 and .*b.tfrecord hold the same samples"),
        ("other width", "b.tfrecord: 70 tokens, 9 masked; .*: 64 tokens, 9 masked"),
        ("small vocabulary", r"record \d+: an id beyond the 5,000 entries"),
        ("other vocabulary", r"record 0: no \[CLS\] a \[SEP\] b \[SEP\]"),
        ("trained on", "30 of 30 evaluation samples are in the training data as well, the first is sample 0"),
    ],
)
def test_records_that_do_not_fit_together_are_refused(
    change: str, problem: str, packed: Path, drawn: Samples, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "copy"))
    path = folder / "train" / "b.tfrecord"
    if change == "same file":
        shutil.copy(folder / "train" / "part-00000-of-00500", path)
    elif change == "other width":
        write_records(path, padded(take(drawn, 50, 90), 70, 9))
    elif change == "trained on":
        # Samples of 64 tokens are too short to be compared
        text = np.random.RandomState(0).randint(5, 60000, size=40000).astype(np.uint16)
        numbered = Documents(text, list(range(0, 40001, 400)), list(range(0, 101, 50)))
        long = masking.make_samples(numbered, [0, 1], Settings(512, 76, 1), NUMBERS, masking.stream(0, 0))
        for name, samples in (("train/part-00000-of-00500", long), ("eval/eval.tfrecord", take(long, 10, 40))):
            write_records(folder / name, padded(samples, 512, 76))
        path.unlink()
    else:
        entries = NUMBERS.entries[:5000] if change == "small vocabulary" else sorted(NUMBERS.entries)
        vocabulary.write(folder / "vocab.txt", entries)
    assert re.search(problem, refused(convert(folder, tmp_path / "to")))


def test_same_text_in_other_samples_is_found() -> None:
    text = np.random.RandomState(0).randint(5, 60000, size=40000).astype(np.uint16)
    documents = Documents(text, list(range(0, 40001, 20)), [0, 1000, 2000])
    # Samples without a random second segment have text of one document
    train, again, other = (
        _only_following(
            masking.make_samples(documents, numbers, Settings(512, 76, 1), NUMBERS, masking.stream(seed, 0))
        )
        for seed, numbers in ((0, [0] * 20), (1, [0]), (2, [1]))
    )
    for held, share in ((again, 1.0), (other, 0.0)):
        runs = np.unique(overlap.runs_of(held, NUMBERS)[0])
        in_training = np.zeros(len(runs), bool)
        overlap.mark_seen(in_training, runs, train, NUMBERS)
        assert abs(in_training.mean() - share) < 0.02
        assert bool(overlap.find(held, NUMBERS, runs, in_training)) == bool(share)


def _only_following(samples: Samples) -> Samples:
    return samples.take(np.flatnonzero(samples.next == 0))
