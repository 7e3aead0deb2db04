"""DLRM: preparation of Criteo's logs, placement of the tables, and quality on real clicks."""

import gzip
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.dlrm import blocks, criteo, writer
from benchmarks.dlrm.placement import place
from encore import data, paths
from tests import preparing
from tests.conftest import Encore, only_run, records
from tests.preparing import check_refusal, notes, write_files

CRITEO = paths.ROOT.parent / "shared" / "data" / "criteo.tar.xz"
CONSTANT_RATE_LOSS = 0.5269  # Log loss on the sample's test rows if the prediction is always the click rate
INDEX_LIMIT = 40_000_000

run = partial(preparing.run, "dlrm", workers=0)


def row(number: int) -> str:
    # Row ``number`` in Criteo's format
    numbers = [str(number % (column + 2) - 1) if number % 5 else "" for column in range(13)]
    hashes = [f"{(number * 7919 + column) % (40 + column):08x}" for column in range(26)]
    return "\t".join([str(number % 3 // 2), *numbers, *hashes]) + "\n"


def days(count: int, rows: int) -> dict[str, str]:
    return {f"day_{day}": "".join(map(row, range(day * rows, (day + 1) * rows))) for day in range(count)}


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
    assert (parsed.lines, parsed.malformed, parsed.first_malformed, parsed.columns[1].tolist()) == (3, 1, 1, [5, -2])


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
    raw = write_files(tmp_path / "raw", days(3, 1501))
    for name, seed, workers in (("one", 0, 0), ("two", 0, 2), ("three", 1, 0)):
        notes(run(raw, "-o", tmp_path / name, "--seed", seed, workers=workers))
    manifest, same, reseeded = (preparing.manifest(tmp_path / name) for name in ("one", "two", "three"))
    assert {split: content["count"] for split, content in manifest["splits"].items()} == {"train": 3002, "val": 751}
    assert (manifest["name"], manifest["facts"]["table_sizes"]) == ("criteo-3-days", [*range(40, 66)])
    assert same["id"] == manifest["id"] != reseeded["id"], "workers do not change it, the seed does"
    # The label, log(1 + x) of the 13 integers, the 26 indices
    fields = [row(number)[:-1].split("\t") for number in range(3753)]
    source = [
        (
            int(label),
            *np.log1p(np.float32([max(0, int(x or 0)) for x in values[:13]])),
            *(int(x, 16) for x in values[13:]),
        )
        for label, *values in fields
    ]
    for split, rows in (("train", source[:3002]), ("val", source[3002:])):
        content = blocks.open_blocks(tmp_path / "one" / f"{split}.bin", len(rows))
        columns = content.transpose(1, 0, 2).reshape(blocks.COLUMNS, -1)[:, : len(rows)]
        written = [*zip(columns[0], *columns[1:14].view(np.float32), *columns[14:], strict=True)]
        assert (sorted(written), written == rows) == (sorted(rows), False), "in random order"


def test_disk_space_is_allocated_before_the_first_row(tmp_path: Path) -> None:
    # Otherwise a full disk kills a worker that writes through the memory map
    blocks.create(tmp_path / "train.bin", 5000)
    status = (tmp_path / "train.bin").stat()
    assert status.st_blocks * 512 >= status.st_size == blocks.file_bytes(5000)


def test_rare_values_share_a_row(tmp_path: Path) -> None:
    raw = write_files(tmp_path / "raw", days(2, 300))
    notes(run(raw, "-o", tmp_path / "to", "--frequency-threshold", 8))
    # 300 training rows: every value occurs 7 or 8 times in the table with 40 values, 4 or 5 times in that with 65
    assert preparing.manifest(tmp_path / "to")["facts"]["table_sizes"] == [21, 14, 7] + [1] * 23
    frequent = np.array([3, 5, 9])
    plan = writer.Plan(tmp_path, 100, 8, 0)
    for repeats in (1, 10):  # fewer values than the limit, and more
        values = np.tile([9, 4, 3], repeats)
        assert writer.indices_of(values, frequent, plan).tolist() == [3, 0, 1] * repeats
        assert writer.indices_of(values, frequent[:0], plan).tolist() == [0] * len(values)
    assert writer.indices_of(frequent, frequent, plan._replace(threshold=0)).tolist() == [0, 1, 2]


TEXT = "".join(map(row, range(70)))


@pytest.mark.parametrize(
    "text",
    [TEXT, TEXT[:-1], TEXT + "\n" * 70_000, TEXT + "\r\n\r\n", TEXT[:-1] + "\r"],
    ids=["newline", "no newline", "70,000 newlines", "carriage returns", "carriage return"],
)
def test_end_of_the_text_does_not_matter(tmp_path: Path, text: str) -> None:
    write_files(tmp_path, {"train.txt": text, "test.txt": TEXT[2:]})
    noted: list[str] = []
    source = criteo.list_source(tmp_path, None, lambda size: None, noted.append)
    splits = [
        b"".join(line for part in criteo.ranges(split, 1000) for line in criteo.read_lines(part))
        for split in (source.train, source.val)
    ]
    assert [split.count(b"\n") for split in splits] == [60, 10]
    assert b"".join(splits).replace(b"\r", b"") == TEXT.encode()
    assert len(noted) == 1 and f"{tmp_path / 'test.txt'} is not used: its first row has 39 fields" in noted[0]


DAYS, LINES, PACKED = days(3, 200), TEXT.splitlines(keepends=True), gzip.compress(TEXT.encode())
# Negative ids: an export of signed hashes
SIGNED = {**DAYS, "day_1": DAYS["day_1"].replace("\t000000", "\t-00000")}
BAD: dict[str, tuple[preparing.Files, tuple[str, ...], str]] = {
    "cut": ({**DAYS, "day_1": DAYS["day_1"][:-50]}, (), "day_1 ends within a row"),
    "missing day": ({**DAYS, "day_1": None}, (), "day_1 missing below day_2"),
    "signed": (SIGNED, (), "are malformed; the first is line 1 of"),
    "nothing": ({"readme": ""}, (), "no day_0 and no train.txt"),
    "too few rows": (SIGNED, ("--name", "criteo-1tb", "--skip-corrupt"), "4,195,197,692 + 89,137,319"),
    "row of train": ({"train.txt": [*LINES[:41], "x\n", *LINES[42:]]}, (), "the first is line 42 of {raw}/train.txt"),
    "row of val": ({"train.txt": [*LINES[:65], "x\n", *LINES[66:]]}, (), "the first is line 66 of {raw}/train.txt"),
    "constant labels": (
        {"train.txt": [*LINES[:60], *("0" + line[1:] for line in LINES[60:])]}, (),
        "all rows to evaluate on, in {raw}/train.txt, have label 0"),
    "packed train": ({"train.txt": PACKED}, (), "{raw}/train.txt is compressed by gzip"),
    "packed test": ({"test.txt": PACKED, "train.txt": TEXT}, (), "gunzip {raw}/test.txt.gz"),
    "packed day": ({"day_0.gz": PACKED}, (), "day_0.gz is compressed"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_source_is_rejected(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, options, message = BAD[case]
    monkeypatch.setattr(writer, "PART_BYTES", 2000)
    check_refusal("dlrm", tmp_path / "raw", files, [message], *options)


def test_malformed_rows_are_skipped_on_request(tmp_path: Path) -> None:
    notes(run(write_files(tmp_path / "raw", SIGNED), "-o", tmp_path / "to", "--skip-corrupt"))
    assert preparing.manifest(tmp_path / "to")["facts"]["malformed"] == 200


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
