"""A line or file of text that would fill the memory is rejected by its name, before it is read completely."""

import bz2
import gzip
import io
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bert import texts, wikipedia
from benchmarks.bert_squad import squad
from benchmarks.common.data import text_files
from benchmarks.common.data.problem import Problem
from benchmarks.dlrm import criteo
from benchmarks.language import vocabulary
from benchmarks.llama import sources
from benchmarks.minigo import sgf
from benchmarks.ncf import paper, ratings
from benchmarks.translation import stages, wmt

LONGEST = 1 << 12  # for these tests
LONG = b"x" * (LONGEST + 1)


def _ignore(*arguments: object) -> None: ...


def _zip(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("ml-1m/ratings.dat", content)
    return file.getvalue()


def _criteo(path: Path) -> list[bytes]:
    return list(criteo.read_lines(criteo.Range(str(path), 0, 9)))


def _offsets(path: Path) -> tuple[int, list[int]]:
    return stages.line_offsets(path, 3, _ignore, str(path))


def _extract(path: Path) -> tuple[int, int]:
    return wmt.extract(wmt.Extraction(str(path), ("train.en",), str(path.parent)), _ignore)


def _dump(path: Path) -> list[Any]:
    return list(wikipedia.read(path, 0, path.stat().st_size, Counter(), _ignore))


@pytest.mark.parametrize(
    ("read", "name", "content", "reason"),
    [
        (text_files.lines, "a.txt", b"a\n" + LONG, "line 2: longer than"),
        (text_files.lines, "a.txt.gz", gzip.compress(LONG), "line 1: longer than"),
        (sources.documents, "a.jsonl.bz2", bz2.compress(LONG), "line 1: longer than"),
        (sources.documents, "a.txt", b"a\n\n" + b"word\n" * LONGEST, "line 822: a document longer than"),
        (lambda path: [text_files.not_utf8((path, str(path)))], "a.txt", b"\xff\n" + LONG, "line 2: longer than"),
        (lambda path: ratings.read(path, None), "ratings.dat", LONG, "line 1: longer than"),
        (lambda path: ratings.read(path, None), "ratings.dat", b"1::2::3::4\n" + LONG, "line 2: longer than"),
        (lambda path: ratings.read(path, None), "a.zip", _zip(b"1::2::3::4\n" + LONG), "line 2: longer than"),
        (paper._lines, "a.train.rating", b"1\t2\n" + LONG, "line 2: longer than"),
        (_criteo, "day_0", LONG * 2, "line 1: longer than"),
        (_criteo, "day_0", b"1\n2\n" + LONG * 2, "line 3: longer than"),
        (_offsets, "train.en", b"a\n" + LONG, "line 2: longer than"),
        (_extract, "train.en.gz", gzip.compress(b"a\n" + LONG), "line 2: longer than"),
        (wmt.read_sgm, "a.sgm", LONG, "more than 4,096 bytes"),
        (sgf.read, "a.sgf", b"(;C[" + LONG + b"])", "more than 4,096 bytes"),
        (vocabulary.read, "vocab.txt", LONG, "more than 4,096 bytes"),
        (squad.read, squad.TRAIN, LONG, "more than 4,096 bytes"),
        (lambda path: texts.read(path, texts.SENTENCES, 0, len(LONG)), "a.txt", LONG, "a document longer than"),
        (_dump, "a.xml", b"<mediawiki><page>" + LONG, "a page of over"),
        (_dump, "a.xml.bz2", bz2.compress(b"<mediawiki><page>" + LONG), "a page of over"),
    ],
)
def test_long_line_is_rejected(
    read: Callable[[Path], Iterable[object]],
    name: str,
    content: bytes,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, limit in (
        (text_files, "LONGEST_LINE"),
        (wikipedia, "LONGEST_LINE"),
        (wmt, "LONGEST_LINE"),
        (texts, "_LONGEST"),
    ):
        monkeypatch.setattr(module, limit, LONGEST)
    monkeypatch.setattr(squad, "LONGEST", LONGEST)
    monkeypatch.setattr(text_files.read_bytes, "__defaults__", (LONGEST,))
    monkeypatch.setattr(criteo, "CHUNK", 16)
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(Problem) as raised:
        list(read(path))
    assert reason in raised.value.found and str(path) in raised.value.found


def test_line_of_a_gibibyte_needs_little_memory(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress(b"x" * (1 << 24)) * 64)
    command = (
        "import resource, sys; from pathlib import Path; from benchmarks.llama.sources import documents\n"
        "try: next(documents(Path(sys.argv[1])))\n"
        "except Exception as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, str(tmp_path / "text.jsonl.gz")], capture_output=True, text=True, check=True
    )
    *message, kib = done.stdout.splitlines()
    assert "line 1: longer than 67,108,864 bytes" in message[0]
    assert int(kib) < 512 * 1024
