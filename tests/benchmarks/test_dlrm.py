"""DLRM: preparation of Criteo's logs, placement of the tables, and quality on real clicks."""

import gzip
import tarfile
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.dlrm import blocks, criteo, writer
from benchmarks.dlrm.placement import place
from encore import data, paths
from tests import preparing
from tests.conftest import Encore, only_run, records

CRITEO = paths.ROOT.parent / "shared" / "data" / "criteo.tar.xz"
CONSTANT_RATE_LOSS = 0.5269  # Log loss on the sample's test rows if the prediction is always the click rate
INDEX_LIMIT = 40_000_000

prepare = partial(preparing.here, "dlrm")


def row(number: int) -> str:
    # Row ``number`` in Criteo's format
    numbers = [str(number % (column + 2) - 1) if number % 5 else "" for column in range(13)]
    hashes = [f"{(number * 7919 + column) % (40 + column):08x}" for column in range(26)]
    return "\t".join([str(number % 3 // 2), *numbers, *hashes]) + "\n"


def write_days(folder: Path, days: int, rows: int) -> Path:
    folder.mkdir()
    for day in range(days):
        text = "".join(row(day * rows + number) for number in range(rows))
        (folder / f"day_{day}").write_text(text, encoding="ascii")
    return folder


# -- parsing ----------------------------------------------------------------------------------------------

LINE = "1" + "\t5" * 13 + "\tab" * 26


@pytest.mark.parametrize(
    ("line", "label", "integers", "indices"),
    [
        (LINE, 1, [5] * 13, [0xAB] * 26),
        ("0" + "\t" * 39, 0, [0] * 13, [0] * 26),
        (LINE.replace("5", "-2", 1), 1, [-2] + [5] * 12, [0xAB] * 26),
        (LINE.replace("5", "2147483647", 1), 1, [2147483647] + [5] * 12, [0xAB] * 26),
        (LINE[:-2] + "2625a00", 1, [5] * 13, [0xAB] * 25 + [0]),
        (LINE[:-2] + "2625a01", 1, [5] * 13, [0xAB] * 25 + [1]),
        (LINE[:-2] + "ffffffff", 1, [5] * 13, [0xAB] * 25 + [0xFFFFFFFF % INDEX_LIMIT]),
    ],
    ids=["plain", "empty fields", "negative", "largest", "limit", "limit + 1", "32 bits"],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_line_is_parsed(line: str, label: int, integers: list[int], indices: list[int], line_end: str) -> None:
    parsed = criteo.parse((line + line_end).encode() * 2, INDEX_LIMIT)
    assert (parsed.lines, parsed.malformed, parsed.first_malformed) == (2, 0, -1)
    assert parsed.columns.T.tolist() == [[label, *integers, *indices]] * 2


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("2" + LINE[1:], id="label 2"),
        pytest.param(LINE[1:], id="no label"),
        pytest.param(LINE[:-3], id="25 indices"),
        pytest.param(LINE + "\tab", id="27 indices"),
        pytest.param(LINE[:-2] + "-5", id="negative index"),
        pytest.param(LINE[:-2] + "123456789", id="nine digits"),
        pytest.param(LINE[:-2] + "xy", id="not hexadecimal"),
        pytest.param(LINE.replace("5", "a", 1), id="not an integer"),
        pytest.param(LINE.replace("5", "4294967296", 1), id="33 bits"),
        pytest.param(LINE.replace("5", "-", 1), id="sign without digits"),
        pytest.param("", id="empty"),
    ],
)
def test_malformed_line_is_counted_and_skipped(line: str) -> None:
    parsed = criteo.parse(f"{LINE}\n{line}\n{LINE.replace('5', '-2', 1)}\n".encode(), INDEX_LIMIT)
    assert (parsed.lines, parsed.malformed, parsed.first_malformed) == (3, 1, 1)
    assert parsed.columns[1].tolist() == [5, -2]


# -- placement --------------------------------------------------------------------------------------------

# Rows of the tables in NVIDIA's v0.7 submission (dlrm/config/mlperf_40m.limit.json)
SUBMITTED_SIZES = (
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
    *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
)


@pytest.mark.parametrize(
    ("ranks", "max_rows"),
    [(1, 187767399), (2, 104601359), (3, 78258119), (4, 64189544), (8, 39981989), (16, 39979771), (40, 39979771)],
)
def test_placement_is_balanced(ranks: int, max_rows: int) -> None:
    placement = place(SUBMITTED_SIZES, ranks)
    assert sorted(table for tables in placement for table in tables) == list(range(26))
    # Lookups, messages and updates of a rank are proportional to its number of tables
    assert all(abs(len(tables) - 26 / ranks) < 1 for tables in placement)
    assert max(sum(SUBMITTED_SIZES[table] for table in tables) for tables in placement) == max_rows


def test_placement_keeps_within_memory() -> None:
    assert [len(tables) for tables in place([10, 3, 3, 3], 2)] == [2, 2]
    # Two tables per rank would need 13 rows on the first rank.
    assert place([10, 3, 3, 3], 2, row_bytes=4, memory=40) == ((0,), (1, 2, 3))
    with pytest.raises(Problem, match=r"(?s)512\.0 GB on the fullest of 8 ranks.*lower --index-limit"):
        place((10**9, *[5] * 25), 8, 512, 36e9)
    with pytest.raises(Problem, match="use more ranks"):
        place([10**7] * 26, 1, 512, 36e9)


# -- preparation ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_days_are_split_shuffled_and_encoded(tmp_path: Path) -> None:
    raw = write_days(tmp_path / "raw", 3, 1501)
    prepare(raw, "-o", tmp_path / "one")
    manifest = preparing.manifest(tmp_path / "one")
    assert {split: content["count"] for split, content in manifest["splits"].items()} == {"train": 3002, "val": 751}
    assert (manifest["name"], manifest["facts"]["table_sizes"]) == ("criteo-3-days", [*range(40, 66)])
    assert preparing.called("dlrm", raw, "-o", tmp_path / "two", "--workers", 2)[0] == 0
    prepare(raw, "-o", tmp_path / "three", "--seed", 1)
    ids = [preparing.manifest(tmp_path / name)["id"] for name in ("one", "two", "three")]
    assert ids[0] == ids[1] != ids[2], "the number of workers does not change the data, the seed does"
    prepare("--verify", tmp_path / "one")
    # The label, the 26 indices, log(1 + x) of the 13 integers
    fields = [row(number)[:-1].split("\t") for number in range(3753)]
    labels_and_indices = np.array([[int(columns[0]), *(int(x, 16) for x in columns[14:])] for columns in fields])
    numbers = np.log1p(np.array([[max(0, int(x or 0)) for x in columns[1:14]] for columns in fields], np.float32))
    source = np.float32(np.column_stack((labels_and_indices, numbers)))
    for split, rows in (("train", source[:3002]), ("val", source[3002:])):
        content = blocks.open_blocks(tmp_path / "one" / f"{split}.bin", len(rows))
        columns = content.transpose(1, 0, 2).reshape(blocks.COLUMNS, -1)[:, : len(rows)]
        table = np.float32(np.column_stack((columns[0], columns[14:].T, columns[1:14].view(np.float32).T)))
        assert sorted(map(tuple, table)) == sorted(map(tuple, rows))
        assert not np.array_equal(table, rows), "in random order"


def test_disk_space_is_allocated_before_the_first_row(tmp_path: Path) -> None:
    # Otherwise a full disk kills a worker that writes through the memory map
    blocks.create(tmp_path / "train.bin", 5000)
    status = (tmp_path / "train.bin").stat()
    assert status.st_blocks * 512 >= status.st_size == blocks.file_bytes(5000)


def test_rare_values_share_a_row(tmp_path: Path) -> None:
    prepare(write_days(tmp_path / "raw", 2, 300), "-o", tmp_path / "to", "--frequency-threshold", 8)
    # 300 training rows: every value occurs 7 or 8 times in the table with 40 values, 4 or 5 times in that with 65
    assert preparing.manifest(tmp_path / "to")["facts"]["table_sizes"] == [21, 14, 7] + [1] * 23
    frequent = np.array([3, 5, 9])
    plan = writer.Plan(tmp_path, 100, 8, 0)
    for repeats in (1, 10):  # fewer values than the limit, and more
        values = np.tile([9, 4, 3], repeats)
        assert writer.indices_of(values, frequent, plan).tolist() == [3, 0, 1] * repeats
        assert writer.indices_of(values, frequent[:0], plan).tolist() == [0] * len(values)
    assert writer.indices_of(frequent, frequent, plan._replace(threshold=0)).tolist() == [0, 1, 2]


@pytest.mark.slow
def test_interrupted_preparation_continues(tmp_path: Path) -> None:
    raw = write_days(tmp_path / "raw", 6, 1000)
    prepare(raw, "-o", tmp_path / "uninterrupted")
    with mock.patch.object(writer, "list_values", side_effect=KeyboardInterrupt):
        assert "run the same command again to resume" in prepare(raw, "-o", tmp_path / "to", code=130)
    assert list((tmp_path / "to").glob("parts/train-*.json"))
    assert not (tmp_path / "to" / "dataset.json").exists()
    prepare(raw, "-o", tmp_path / "to")
    first, second = (preparing.manifest(tmp_path / name)["id"] for name in ("uninterrupted", "to"))
    assert first == second
    assert "nothing to do" in prepare(raw, "-o", tmp_path / "to")


@pytest.mark.slow
def test_bad_sources_are_rejected(tmp_path: Path) -> None:
    raw, to = write_days(tmp_path / "raw", 3, 200), ("-o", tmp_path / "to")
    cut = raw / "day_1"
    text = cut.read_text(encoding="ascii")
    cut.write_text(text[:-50], encoding="ascii")
    assert "day_1 ends within a row" in prepare(raw, *to, code=2)
    cut.unlink()
    assert "day_1 missing below day_2" in prepare(raw, *to, code=2)
    # Negative ids: an export of signed hashes
    cut.write_text(text.replace("\t000000", "\t-00000"), encoding="ascii")
    assert "are malformed; the first is line 1 of" in prepare(raw, *to, code=2)
    prepare(raw, *to, "--skip-corrupt")
    assert preparing.manifest(tmp_path / "to")["facts"]["malformed"] == 200
    assert "holds the data set criteo-3-days, prepared from another source" in prepare(raw, *to, "--seed", 5, code=2)
    (tmp_path / "empty").mkdir()
    assert "no day_0 and no train.txt" in prepare(tmp_path / "empty", *to, code=2)
    output = prepare(raw, *to, "--name", "criteo-1tb", "--overwrite", "--skip-corrupt", code=2)
    assert "4,195,197,692 + 89,137,319" in output


def list_source(folder: Path) -> criteo.Source:
    return criteo.list_source(folder, None, lambda size: None, lambda text: None)


TEXT = "".join(map(row, range(70)))


@pytest.mark.parametrize(
    "text",
    [TEXT, TEXT[:-1], TEXT + "\n" * 70_000, TEXT + "\r\n\r\n", TEXT[:-1] + "\r"],
    ids=["newline", "no newline", "70,000 newlines", "carriage returns", "carriage return"],
)
def test_end_of_the_text_does_not_matter(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.txt").write_bytes(text.encode())
    source = list_source(tmp_path)
    splits = [
        b"".join(line for part in criteo.ranges(split, 1000) for line in criteo.read_lines(part))
        for split in (source.train, source.val)
    ]
    assert [split.count(b"\n") for split in splits] == [60, 10]
    assert b"".join(splits).replace(b"\r", b"") == TEXT.encode()


@pytest.mark.parametrize("number", [41, 65], ids=["in training", "held out"])
def test_malformed_row_is_reported_with_its_line_in_the_file(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_BYTES", 2000)
    rows = TEXT.splitlines(keepends=True)
    (tmp_path / "train.txt").write_text("".join([*rows[:number], "x\n", *rows[number + 1 :]]))
    parts = writer.cut(list_source(tmp_path), writer.Plan(tmp_path, 100, 0, 0))
    for part in (*parts["train"], *parts["val"]):
        writer.parse_part(part, lambda done, size: None)
    with pytest.raises(Problem, match=f"the first is line {number + 1} of {tmp_path / 'train.txt'}"):
        writer.check_malformed(parts, False, Progress(as_json=True))


def test_constant_labels_and_unused_files_are_reported(tmp_path: Path) -> None:
    rows = TEXT.splitlines(keepends=True)
    (tmp_path / "train.txt").write_text("".join([*rows[:60], *("0" + line[1:] for line in rows[60:])]))
    (tmp_path / "test.txt").write_text("".join(line[2:] for line in rows))
    output = prepare(tmp_path, "-o", f"{tmp_path}-to", code=2)
    assert f"all rows to evaluate on, in {tmp_path / 'train.txt'}, have label 0" in output
    assert f"{tmp_path / 'test.txt'} is not used: its first row has 39 fields" in output


@pytest.mark.parametrize(
    ("compressed", "others", "message"),
    [
        ("train.txt", (), r"(?s)train\.txt is compressed by gzip.*gunzip \S*train\.txt\.gz"),
        ("test.txt", ("train.txt",), r"(?s)test\.txt is compressed by gzip.*gunzip \S*test\.txt\.gz"),
        ("day_0.gz", (), r"day_0\.gz is compressed"),
    ],
)
def test_compressed_text_is_rejected(tmp_path: Path, compressed: str, others: tuple[str, ...], message: str) -> None:
    (tmp_path / compressed).write_bytes(gzip.compress(TEXT.encode()))
    for name in others:
        (tmp_path / name).write_text(TEXT)
    with pytest.raises(Problem, match=message):
        list_source(tmp_path)


# -- real clicks ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(not CRITEO.exists(), reason=f"{CRITEO.name} is missing; it is not part of the project")
def test_real_clicks_beat_the_constant_rate(pytorch_python: Path, encore: Encore, tmp_path: Path) -> None:
    with tarfile.open(CRITEO) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / "criteo" / "wide_resdnn" / "criteo"
    data.prepare("dlrm", tmp_path / "data", data.Preparation(source=source), pytorch_python)
    folders = ("--data", str(tmp_path / "data"), "--results", str(tmp_path / "results"))
    encore("run", "dlrm", "1", "--system", "criteo-sample", "--seed", "1", *folders, code=0)
    (evaluation,) = records(only_run(tmp_path / "results") / "experiment_0" / "metrics.jsonl", "eval")
    assert evaluation["log_loss"] < CONSTANT_RATE_LOSS - 0.03
