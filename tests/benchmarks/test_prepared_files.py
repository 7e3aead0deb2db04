"""Files of prepared data sets: RecordIO, as MXNet writes it, and the manifest, written last and verified."""

import copy
import functools
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.data import manifest as manifests
from benchmarks.common.data import published, recordio
from benchmarks.common.data.recordio import (
    MAGIC_BYTES,
    RecordIOError,
    frame,
    index_line,
    pack,
    read_index,
    read_record,
    unpack,
)
from benchmarks.resnet.prepare import check
from encore import catalogue, data

PAYLOADS = [
    b"",
    b"a",
    b"abcd",
    MAGIC_BYTES,
    MAGIC_BYTES * 3,
    b"x" + MAGIC_BYTES * 2,
    b"1234" + MAGIC_BYTES + b"56",
    b"12345678" + MAGIC_BYTES + MAGIC_BYTES + b"9abc" + MAGIC_BYTES,
    bytes(range(256)) * 40,
]

# Byte strings with the magic number, or half of it, at any alignment
payloads = st.lists(st.one_of(st.just(MAGIC_BYTES), st.just(MAGIC_BYTES[:2]), st.binary(max_size=9)), max_size=8).map(
    b"".join
)


def write(folder: Path, records: list[bytes], name: str = "a") -> tuple[Path, Path]:
    rec, idx = folder / f"{name}.rec", folder / f"{name}.idx"
    with rec.open("wb") as file, idx.open("w") as index:
        for key, record in enumerate(records):
            index.write(index_line(key, file.tell()))
            file.write(frame(record))
    return rec, idx


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(payloads, max_size=5))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, records: list[bytes]) -> None:
    rec, idx = write(tmp_path_factory.mktemp("round"), records)
    with rec.open("rb") as file:
        assert ([read_record(file, file.tell()) for _ in records], file.tell()) == (records, rec.stat().st_size)
        by_index = [(key, read_record(file, offset)) for key, offset in read_index(idx)]
    assert (by_index, rec.stat().st_size % 4) == (list(enumerate(records)), 0)


def test_files_are_those_of_mxnet(tmp_path: Path) -> None:
    # Recorded when MXNet's MXIndexedRecordIO wrote the same bytes (test_files_equal_those_of_mxnet at commit cc96aff8)
    files = write(tmp_path, [pack(key, key, payload) for key, payload in enumerate(PAYLOADS)])
    assert [hashlib.md5(path.read_bytes()).hexdigest() for path in files] == [
        "4bf3e4867394b695699683619d6dad0f",
        "fc0811da634373b1196edbd5d6afc8db",
    ]
    assert [unpack(pack(key, key, payload)) for key, payload in enumerate(PAYLOADS)] == [*enumerate(PAYLOADS)]


SPLIT = frame(b"1234" + MAGIC_BYTES + b"5678")


@pytest.mark.parametrize(
    ("content", "begin", "offset", "problem"),
    [
        *((frame(b"second!!")[:-cut], 0, 0, r"end of file|bytes of \d+ are there") for cut in (1, 4, 7, 11)),
        (frame(b"only"), len(frame(b"only")), len(frame(b"only")), "end of file instead of the next frame"),
        (frame(b"first") + frame(b"second"), 4, 4, "where the magic"),
        (SPLIT[:12] + frame(b"next"), 0, 12, "before the split one is complete"),
        (SPLIT[:12], 0, 12, "end of file instead of the next frame"),
        (SPLIT, 12, 12, "the middle of a split record"),
    ],
)
def test_broken_file_is_named_with_the_offset(
    tmp_path: Path, content: bytes, begin: int, offset: int, problem: str
) -> None:
    rec = tmp_path / "a.rec"
    rec.write_bytes(content)
    with rec.open("rb") as file, pytest.raises(RecordIOError, match=problem) as caught:
        read_record(file, begin)
    assert (caught.value.offset, str(rec) in str(caught.value)) == (offset, True)


@pytest.mark.parametrize("line", ["1 2 3\n", "a\t5\n", "0\t-4\n", "7\t88"])
def test_broken_index_line_is_named_with_the_offset(tmp_path: Path, line: str) -> None:
    idx = tmp_path / "a.idx"
    idx.write_text("0\t0\n" + line)
    with pytest.raises(RecordIOError) as caught:
        list(read_index(idx))
    assert caught.value.offset == 4


@pytest.mark.parametrize("record", [b"short", struct.pack("<IfQQ", 2, 0.0, 0, 0) + b"12345678"])
def test_record_without_a_header_of_one_label_is_refused(record: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        unpack(record)


def make(folder: Path, **changes: object) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    splits = {}
    for name in ("train", "val"):
        rec, idx = write(folder, [pack(key % 2, key, b"image" * (key + 1)) for key in range(3)], name)
        count, first, last, _ = recordio.inspect(rec, idx)
        files = [manifests.describe_file(path) for path in (rec, idx)]
        splits[name] = {"count": count, "files": files, "first": first, "last": last, "skipped": 0, "skipped_names": []}
    facts = {
        "benchmark": "resnet",
        "name": "pets",
        "classes": ["cat", "dog"],
        "splits": splits,
        "facts": {},
        "how": {"source": "0" * 64, "options": {"resize": None}, "tool": {"name": "test"}},
        **changes,
    }
    manifests.write(facts, folder)
    return {**facts, "id": manifests.data_id(facts)}


def verify(folder: Path, quick: bool = False) -> list[str]:
    problems = manifests.verify(folder, quick, check=check)
    assert all(problem.expected and problem.hint for problem in problems)
    return [problem.found for problem in problems]


@pytest.mark.slow
def test_manifest_is_read_and_any_changed_byte_is_found(tmp_path: Path) -> None:
    assert make(tmp_path) == manifests.read(tmp_path) and verify(tmp_path) == verify(tmp_path, quick=True) == []
    path, accepted = tmp_path / manifests.FILE_NAME, []
    content = path.read_bytes()
    for offset in range(len(content)):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        if not verify(tmp_path, quick=True):
            accepted.append(content[max(offset - 20, 0) : offset + 20])
    assert len(content) > 1000 and not accepted


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new, 1))


@pytest.mark.parametrize(
    ("change", "problem", "is_found_quickly"),
    [
        (lambda folder: (folder / "val.idx").unlink(), "val.idx: No such file", True),
        (lambda folder: os.truncate(folder / "val.rec", 4), "val.rec has 4 bytes", True),
        (lambda folder: replace_bytes(folder / "train.rec", b"image", b"imAge"), "the first record is", True),
        (lambda folder: replace_bytes(folder / "val.idx", b"0\t0", b"0\t4"), "where the magic", True),
        (lambda folder: replace_bytes(folder / "val.rec", b"eima", b"eImA"), "val.rec has changed", False),
        (lambda folder: (folder / "dataset.json").unlink(), "no dataset.json", True),
        (lambda folder: (folder / "dataset.json").rename(folder / "parts"), "incomplete", True),
        (lambda folder: folder.rename(folder.parent / "moved"), "no folder", True),
        *(
            (lambda folder, text=text: (folder / "dataset.json").write_text(text), "dataset.json", True)
            for text in ("", "[]", "{}", '{"schema": 99}', '{"schema": 1}', '{"schema": 1, "spli')
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage_is_found(
    tmp_path: Path, change: Callable[[Path], object], problem: str, is_found_quickly: bool
) -> None:
    make(tmp_path / "data")
    change(tmp_path / "data")
    quick, full = verify(tmp_path / "data", quick=True), verify(tmp_path / "data")
    assert (bool(quick), bool(full), problem in (quick or full)[0]) == (is_found_quickly, True, True)


SETS = published.load()


def write_manifest(folder: Path, name: str, change: int = 0, **sha256: str) -> dict[str, Any]:
    # The manifest of a data set with the counts of a published one plus ``change``
    published_set = SETS[name]
    facts: dict[str, Any] = {"benchmark": "any", "name": name, "classes": [], "splits": {}, "facts": {}}
    for path, number in {**published_set["exactly"], **published_set.get("at_least", {})}.items():
        *keys, last = path.split(".")
        parent = functools.reduce(lambda parent, key: parent.setdefault(key, {}), keys, facts)
        parent[last] = [str(n) for n in range(number + change)] if path == "classes" else number + change
    checksums = {path.split(".")[-1]: digest for path, digest in published_set.get("checksums", {}).items()}
    facts["how"] = {"sha256": {**checksums, **sha256}} if checksums else {}
    facts["splits"].setdefault("train", {"count": 1})
    for split in facts["splits"].values():
        split["files"] = []
    manifests.write(copy.deepcopy(facts), folder)
    return facts


@pytest.mark.parametrize("change", [-1, 0])
@pytest.mark.parametrize("name", sorted(SETS))
def test_name_needs_the_published_counts(name: str, change: int, tmp_path: Path) -> None:
    facts = write_manifest(tmp_path, name, change)
    is_short = change < 0 or not SETS[name]["exactly"]
    assert bool(published.shortfall(facts)) == bool(data.read_passport(tmp_path).unearned) == is_short


def test_name_needs_the_published_checksums(tmp_path: Path) -> None:
    facts = write_manifest(tmp_path, "squad-v1.1", test="0" * 64)
    shortfall = f"how.sha256.test {'0' * 64} for {SETS['squad-v1.1']['checksums']['how.sha256.test']}"
    assert published.shortfall(facts) == data.read_passport(tmp_path).unearned == shortfall


def test_full_data_set_of_every_benchmark_has_counts() -> None:
    assert {catalogue.choose(name).benchmark.full_data.name for name in catalogue.benchmarks()} <= set(SETS)
