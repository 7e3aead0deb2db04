"""NCF's ratings in any form, DLRM's preparation of Criteo's logs and placement of tables, and bad input of both."""

import gzip
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.dlrm import blocks, criteo, writer
from benchmarks.dlrm.placement import place
from encore import data, paths
from tests import preparing
from tests.conftest import Encore, only_run, records
from tests.preparing import check_refusal, notes, prepared, write_files

RATINGS = [(user, item, 4, 1000 + 10 * user + item) for user in range(1, 7) for item in range(user, user + 5)]
HEADER = "userId,movieId,rating,timestamp\n"
prepare_ratings = partial(preparing.run, "ncf", workers=0)


def rows(separator: str, ratings: Sequence[tuple[object, ...]] = RATINGS) -> str:
    return "".join(separator.join(map(str, row)) + "\n" for row in ratings)


def change_ids(prefix: str) -> str:
    # RATINGS with other ids in the same order
    return rows(",", [(f"{prefix}{user:02}", f"{prefix}{item:02}", *rest) for user, item, *rest in RATINGS])


def arrays_of(folder: Path) -> dict[str, list[Any]]:
    return {path.stem: np.load(path).tolist() for path in folder.glob("*.npy")}


EQUIVALENT = {
    "plain": ("ratings.csv", HEADER + rows(",")),
    "ml-1m": ("ratings.dat", rows("::")),
    "ml-100k": ("u.data", rows("\t")),
    "no header": ("ratings.csv", rows(",")),
    "other column order": (
        "ratings.csv",
        "movieId,userId,timestamp,rating\n"
        + "".join(f"{item},{user},{time},{stars}\n" for user, item, stars, time in RATINGS),
    ),
    "byte order mark": ("ratings.csv", "\ufeff" + HEADER + rows(",")),
    "quotes and CRLF": (
        "ratings.csv",
        HEADER + "".join(f'"{user}","{item}","{stars}","{time}"\r\n' for user, item, stars, time in RATINGS),
    ),
    "additional columns": (
        "ratings.csv",
        "n,user_id,ITEM_ID,rating,timestamp,note\n"
        + "".join(f'{n},{user},{item},{stars},{time},"a, b"\n' for n, (user, item, stars, time) in enumerate(RATINGS)),
    ),
    "blank lines": ("ratings.csv", "\n" + HEADER + "\n" + rows(",") + "\n\n"),
    "leading zeros": ("ratings.csv", HEADER + change_ids("0")),
    "ids above 2**53": ("ratings.csv", HEADER + change_ids("900719925474099")),
    "ids of text": ("ratings.csv", HEADER + change_ids("film-")),
    "any positive scale": ("ratings.csv", HEADER + rows(",", [(u, i, 100, time) for u, i, _, time in RATINGS])),
}


def test_form_of_the_ratings_does_not_matter(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "ml-mine.zip", "w") as archive:
        archive.writestr("ml-mine/ratings.csv", EQUIVALENT["plain"][1])
    sources = {name: write_files(tmp_path / name, {file: text}) for name, (file, text) in EQUIVALENT.items()}
    ids = {
        name: data.read_passport(prepared("ncf", source, tmp_path / f"{name} set", "--name", "mine", workers=0)).id
        for name, source in {**sources, "zip": tmp_path / "ml-mine.zip"}.items()
    }
    manifest = data.check_data(tmp_path / "zip set", "ncf")
    assert ids == dict.fromkeys(ids, manifest.id) and manifest == data.read_passport(tmp_path / "zip set")
    # A user rates 5 successive items, the last one last in time; the negatives are the other items, repeated.
    arrays = arrays_of(tmp_path / "zip set")
    negatives = [(len(row), set(row)) for row in arrays["test_negatives"]]
    assert {**arrays, "test_negatives": negatives} == {
        "train_users": [user for user in range(6) for _ in range(4)],
        "train_items": [user + number for user in range(6) for number in range(4)],
        "test_items": [4, 5, 6, 7, 8, 9],
        "test_negatives": [(999, {*range(10)} - {*range(user, user + 5)}) for user in range(6)],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [*rows[:-1], "6::10::4"], "line 30: '6::10::4'"),
        (lambda rows: [*rows, "-7::1::4::99"], "line 31: '-7::1::4::99'"),
        (lambda rows: [*rows, "1::1::4::99"], "line 31: user 1 rates item 1 again, as in line 1"),
        (lambda rows: [*rows, "9::1::4::99"], "1 users with a single rating, the first is user 9 in line 31"),
        (lambda rows: [*rows, *(f"9::{item}::4::{item}" for item in range(1, 11))], "user 9 has rated all 10 items"),
        (lambda rows: [*rows[:5], "1::77::4::9::5", "1::78::4", *rows[5:]], "line 7: '1::78::4'"),
        (lambda rows: [*rows, "2::99::nan::99"], "line 31: '2::99::nan::99'"),
        (lambda rows: [*rows, "2::99::0::99"], "line 31: '2::99::0::99'"),
        (lambda rows: [*rows, "2::99::inf::99"], "line 31: '2::99::inf::99'"),
        (lambda rows: [*rows, "2::99::4::nan"], "line 31: '2::99::4::nan'"),
        (lambda rows: [*rows, "2::99::4::-1"], "line 31: '2::99::4::-1'"),
        (lambda rows: [*rows, "::99::4::99"], "line 31: '::99::4::99'"),
        (lambda rows: ["userId::movieId::timestamp", *rows], "no column rating in its header"),
        (lambda rows: ["nothing here"], "begins with 'nothing here"),
        (lambda rows: ["1::2::3::2024-05-01"], "number the lines in a column timestamp"),
        (lambda rows: ["user::item::rating", "1::2::3"], "number the lines in a column timestamp"),
    ],
)  # fmt: skip
def test_bad_ratings_are_rejected(tmp_path: Path, change: Callable[[list[str]], list[str]], message: str) -> None:
    text = "\n".join(change(rows("::").splitlines())) + "\n"
    check_refusal("ncf", tmp_path / "raw", {"ratings.dat": text}, [message], "--name", "mine")


@pytest.mark.parametrize(
    ("folder", "file", "options", "parts"),
    [
        ("raw", "ratings.csv.gz", (), ("ratings.csv.gz is compressed by gzip", "gunzip")),
        ("ml-20m", "ratings.dat", (), ("30 ratings of 6 users on 10 items",
                                       "20,000,263 ratings of 138,493 users on 26,744 items, as ml-20m has")),
        ("other", "ratings.dat", ("--name", "ml-1m"), ("1,000,209 ratings of 6,040 users on 3,706 items, as ml-1m",)),
    ],
)  # fmt: skip
def test_compressed_ratings_and_parts_of_a_release_are_rejected(
    tmp_path: Path, folder: str, file: str, options: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    content = gzip.compress(b"1,2,3,4\n") if file.endswith(".gz") else rows("::")
    check_refusal("ncf", tmp_path / folder, {file: content}, parts, *options)


PAPER = {
    "x.train.rating": "0\t1\t5\t9\n0\t2\t5\t9\n1\t0\t5\t9\n1\t3\t5\t9\n",
    "x.test.rating": "0\t3\t5\t9\n1\t4\t5\t9\n",
    "x.test.negative": "(0,3)\t0\t4\t5\n(1,4)\t1\t2\t5\n",
}


def test_files_of_the_paper(tmp_path: Path) -> None:
    noted = notes(prepare_ratings(write_files(tmp_path / "raw", PAPER), "-o", tmp_path / "to"))
    assert "1 of 6 items are held out and never trained on (the first is 4)" in noted
    manifest = data.read_passport(tmp_path / "to")
    assert (manifest.name, manifest.counts) == ("x", {"train": 4, "test": 2})
    notes(prepare_ratings("--verify", tmp_path / "to"))
    assert arrays_of(tmp_path / "to") == {
        "train_users": [0, 0, 1, 1], "train_items": [1, 2, 0, 3], "test_items": [3, 4],
        "test_negatives": [[0, 4, 5], [1, 2, 5]],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("x.test.rating", "0\t3\n0\t4\n", "lists user 0 2 times"),
        ("x.test.rating", "1\t3\n2\t4\n", "does not list the users 0, 1, 2 ... in order"),
        ("x.test.rating", "0\t3\n1\t-4\n", "line 2: '1\\t-4'"),
        ("x.train.rating", "0\t1\n1\t0\n0\t1\n", "line 3: user 0 with item 1, as in line 1"),
        ("x.train.rating", "0\t1\n1\t4294967297\n", "line 2: '1\\t4294967297'"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,4)\t1\t2\t4294967297\n", "line 2 does not fit"),
        ("x.train.rating", "0\t1\n2\t1\n", "has user 2"),
        ("x.train.rating", "0\t3\n1\t1\n", "trains on 1 of the held-out pairs"),
        ("x.train.rating", "0 1\n", "user TAB item"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n", "has 1 lines"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,3)\t1\t2\t5\n", "line 2 does not fit"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,4)\t1\t2\n", "line 2 does not fit"),
    ],
)
def test_bad_files_of_the_paper_are_rejected(tmp_path: Path, file: str, text: str, message: str) -> None:
    check_refusal("ncf", tmp_path / "raw", {**PAPER, file: text}, [message])


CRITEO = paths.ROOT.parent / "shared" / "data" / "criteo.tar.xz"
INDEX_LIMIT = 40_000_000


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
    found = parsed.lines, parsed.malformed, parsed.first_malformed, parsed.columns.T.tolist()
    assert found == (2, 0, -1, [[label, *integers, *indices]] * 2)


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
    fullest = max(sum(SUBMITTED_SIZES[table] for table in tables) for tables in placement)
    assert (sorted(table for tables in placement for table in tables), fullest) == ([*range(26)], max_rows)
    # Lookups, messages and updates of a rank are proportional to its number of tables
    assert all(abs(len(tables) - 26 / ranks) < 1 for tables in placement)


def test_placement_keeps_within_memory() -> None:
    # Two tables per rank would need 13 rows on the first rank.
    placements = [place([10, 3, 3, 3], 2, **limits) for limits in ({}, {"row_bytes": 4, "memory": 40})]
    assert (list(map(len, placements[0])), placements[1]) == ([2, 2], ((0,), (1, 2, 3)))
    for rows, ranks, message in (
        ([10**9, *[5] * 25], 8, r"(?s)512\.0 GB on the fullest of 8 ranks.*lower --index-limit"),
        ([10**7] * 26, 1, "use more ranks"),
    ):
        with pytest.raises(Problem, match=message):
            place(rows, ranks, 512, 36e9)


# -- preparation ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_days_are_split_shuffled_and_encoded(tmp_path: Path) -> None:
    raw = write_files(tmp_path / "raw", days(3, 1501))
    manifest, same, reseeded = (
        preparing.manifest(prepared("dlrm", raw, tmp_path / name, "--seed", seed, workers=workers))
        for name, seed, workers in (("one", 0, 0), ("two", 0, 2), ("three", 1, 0))
    )
    assert same["id"] == manifest["id"] != reseeded["id"], "workers do not change it, the seed does"
    assert (manifest["name"], manifest["facts"]["table_sizes"]) == ("criteo-3-days", [*range(40, 66)])
    # The label, log(1 + x) of the 13 integers, the 26 indices
    source = [
        (
            int(label),
            *np.log1p(np.float32([max(0, int(x or 0)) for x in values[:13]])),
            *(int(x, 16) for x in values[13:]),
        )
        for label, *values in (row(number)[:-1].split("\t") for number in range(3753))
    ]
    for split, rows in (("train", source[:3002]), ("val", source[3002:])):
        assert manifest["splits"][split]["count"] == len(rows)
        content = blocks.open_blocks(tmp_path / "one" / f"{split}.bin", len(rows))
        columns = content.transpose(1, 0, 2).reshape(blocks.COLUMNS, -1)[:, : len(rows)]
        written = [*zip(columns[0], *columns[1:14].view(np.float32), *columns[14:], strict=True)]
        assert (sorted(written), written == rows) == (sorted(rows), False), "in random order"


@pytest.mark.parametrize(
    ("values", "frequent", "threshold", "indices"),
    [
        ([9, 4, 3], [3, 5, 9], 8, [3, 0, 1]),
        ([9, 4, 3] * 10, [3, 5, 9], 8, [3, 0, 1] * 10),  # More values than the limit
        ([9, 4, 3] * 10, [], 8, [0] * 30),
        ([3, 5, 9], [3, 5, 9], 0, [0, 1, 2]),
    ],
)
def test_indices_of_frequent_values(values: list[int], frequent: list[int], threshold: int, indices: list[int]) -> None:
    plan = writer.Plan(Path("to"), 100, threshold, 0)
    assert writer.indices_of(np.array(values), np.array(frequent, np.int64), plan).tolist() == indices


TEXT = "".join(map(row, range(70)))


@pytest.mark.parametrize(
    "text",
    [TEXT, TEXT[:-1], TEXT + "\n" * 70_000, TEXT + "\r\n\r\n", TEXT[:-1] + "\r"],
    ids=["newline", "no newline", "70,000 newlines", "carriage returns", "carriage return"],
)
def test_end_of_the_text_does_not_matter(tmp_path: Path, text: str) -> None:
    noted: list[str] = []
    folder = write_files(tmp_path, {"train.txt": text, "test.txt": TEXT[2:]})
    source = criteo.list_source(folder, None, lambda size: None, noted.append)
    splits = [
        b"".join(line for part in criteo.ranges(split, 1000) for line in criteo.read_lines(part))
        for split in (source.train, source.val)
    ]
    assert [split.count(b"\n") for split in splits] == [60, 10]
    assert b"".join(splits).replace(b"\r", b"") == TEXT.encode()
    assert len(noted) == 1 and f"{folder / 'test.txt'} is not used: its first row has 39 fields" in noted[0]


DAYS, LINES, PACKED = days(3, 200), TEXT.splitlines(keepends=True), gzip.compress(TEXT.encode())
# Negative ids: an export of signed hashes
SIGNED = {**DAYS, "day_1": DAYS["day_1"].replace("\t000000", "\t-00000")}
BAD: dict[str, tuple[preparing.Files, tuple[str, ...], str]] = {
    "cut": ({**DAYS, "day_1": DAYS["day_1"][:-50]}, (), "day_1 ends within a row"),
    "missing day": ({**DAYS, "day_1": None}, (), "day_1 missing below day_2"),
    "signed": (SIGNED, (), "are malformed; the first is line 1 of"),
    "nothing": ({"readme": ""}, (), "no day_0 and no train.txt"),
    "too few rows": (SIGNED, ("--name", "criteo-1tb", "--skip-corrupt"), "splits.train.count 200 for 4,195,197,692"),
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
def test_bad_clicks_are_rejected(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, options, message = BAD[case]
    monkeypatch.setattr(writer, "PART_BYTES", 2000)
    check_refusal("dlrm", tmp_path / "raw", files, [message], *options)


def test_malformed_rows_are_skipped_and_rare_values_share_a_row_on_request(tmp_path: Path) -> None:
    raw, options = write_files(tmp_path / "raw", SIGNED), ("--skip-corrupt", "--frequency-threshold", 5)
    facts = preparing.manifest(prepared("dlrm", raw, tmp_path / "to", *options, workers=0))["facts"]
    # 200 training rows: of 40 + n values, 40 - 4 n occur five times, the others four times
    assert (facts["malformed"], facts["table_sizes"]) == (200, [*range(41, 0, -4), *[1] * 15])


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
    # The click rate as prediction has a log loss of 0.5269 on the sample's test rows
    assert evaluation["log_loss"] < 0.5269 - 0.03
