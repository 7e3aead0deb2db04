"""RecordIO: round trips, comparison with MXNet's reader and writer, and broken files."""

import hashlib
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

ROOT = Path(__file__).resolve().parents[2]
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


def write(folder: Path, records: list[bytes]) -> tuple[Path, Path]:
    rec, idx = folder / "a.rec", folder / "a.idx"
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
    assert by_index == list(enumerate(records))
    assert rec.stat().st_size % 4 == 0


def test_files_are_those_of_mxnet(tmp_path: Path) -> None:
    # Recorded when test_files_equal_those_of_mxnet passed
    files = write(tmp_path, [pack(key, key, payload) for key, payload in enumerate(PAYLOADS)])
    assert [hashlib.md5(path.read_bytes()).hexdigest() for path in files] == [
        "4bf3e4867394b695699683619d6dad0f",
        "fc0811da634373b1196edbd5d6afc8db",
    ]


@given(st.integers(0, 1000), payloads)
def test_label_and_image_round_trip(label: int, image: bytes) -> None:
    assert unpack(pack(label, 7, image)) == (label, image)


def test_files_equal_those_of_mxnet(tmp_path: Path, mxnet_python: Path) -> None:
    for number, payload in enumerate(PAYLOADS):
        (tmp_path / f"{number}.bin").write_bytes(payload)
    rec, idx = write(tmp_path, [pack(key, key, payload) for key, payload in enumerate(PAYLOADS)])
    script = (
        "import sys, pathlib, mxnet as mx\n"
        f"folder, count = pathlib.Path(sys.argv[1]), {len(PAYLOADS)}\n"
        "data = [(folder / f'{i}.bin').read_bytes() for i in range(count)]\n"
        "ours = mx.recordio.MXIndexedRecordIO(sys.argv[2], sys.argv[3], 'r')\n"
        "for i in range(count):\n"
        "    header, payload = mx.recordio.unpack(ours.read_idx(i))\n"
        "    assert (header.label, header.id, payload) == (float(i), i, data[i]), i\n"
        "theirs = mx.recordio.MXIndexedRecordIO(str(folder / 'b.idx'), str(folder / 'b.rec'), 'w')\n"
        "for i in range(count):\n"
        "    theirs.write_idx(i, mx.recordio.pack(mx.recordio.IRHeader(0, float(i), i, 0), data[i]))\n"
        "theirs.close()\n"
    )
    subprocess.run([mxnet_python, "-c", script, str(tmp_path), str(idx), str(rec)], check=True)
    assert (tmp_path / "b.rec").read_bytes() == rec.read_bytes()
    assert (tmp_path / "b.idx").read_bytes() == idx.read_bytes()


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
