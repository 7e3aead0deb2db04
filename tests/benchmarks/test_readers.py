"""Damaged files are rejected by name; a line or file that would fill the memory, before it is read completely."""

import bz2
import gzip
import io
import json
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bert import texts, wikipedia
from benchmarks.bert_squad import squad
from benchmarks.common.data import text_files
from benchmarks.common.data.problem import Problem
from benchmarks.dlrm import criteo
from benchmarks.language import vocabulary
from benchmarks.llama import safetensors, sources
from benchmarks.minigo import sgf
from benchmarks.ncf import paper, ratings
from benchmarks.translation import segment, stages, wmt
from tests.benchmarks.test_bert import DUMP, STREAMS
from tests.preparing import ran

Read = Callable[[Path], Any]
LONGEST = 1 << 12  # for these tests
LONG = b"x" * (LONGEST + 1)


def _ignore(*arguments: object) -> None: ...


def _zip(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        # Without the time, which would differ between processes that collect the tests
        archive.writestr(zipfile.ZipInfo("ml-1m/ratings.dat"), content)
    return file.getvalue()


def _criteo(path: Path) -> list[bytes]:
    return list(criteo.read_lines(criteo.Range(str(path), 0, 9)))


def _extract(path: Path) -> tuple[int, int]:
    return wmt.extract(wmt.Extraction(str(path), ("train.en",), str(path.parent)), _ignore)


def _page(path: Path) -> Any:
    return wikipedia.read(path, 0, path.stat().st_size, Counter(), _ignore)


def _dump(path: Path) -> list[Any]:
    return [page for span in wikipedia.cut(path) for page in wikipedia.read(path, *span, Counter(), _ignore)]


def _tensors(path: Path) -> Any:
    # Next to a file with a tensor
    safetensors.write(path.with_name("one.safetensors"), {"a": np.ones(2)})
    return safetensors.tensors_of(path)


def refuses(read: Read, path: Path, content: bytes | str, message: str) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Problem) as raised:
        list(read(path))
    problem, text = raised.value, str(raised.value)
    assert re.search(message, text) and (path.name in text or str(path.parent) in text), text
    assert problem.hint and problem.code == 2


@pytest.mark.parametrize(
    ("read", "name", "content", "reason"),
    [
        (text_files.lines, "a.txt", b"a\n" + LONG, "line 2: longer than"),
        (text_files.lines, "a.txt.gz", gzip.compress(LONG, mtime=0), "line 1: longer than"),
        (sources.documents, "a.jsonl.bz2", bz2.compress(LONG), "line 1: longer than"),
        (sources.documents, "a.txt", b"a\n\n" + b"word\n" * LONGEST, "line 822: a document longer than"),
        (lambda path: [text_files.not_utf8((path, str(path)))], "a.txt", b"\xff\n" + LONG, "line 2: longer than"),
        (lambda path: ratings.read(path, None), "ratings.dat", LONG, "line 1: longer than"),
        (lambda path: ratings.read(path, None), "ratings.dat", b"1::2::3::4\n" + LONG, "line 2: longer than"),
        (lambda path: ratings.read(path, None), "a.zip", _zip(b"1::2::3::4\n" + LONG), "line 2: longer than"),
        (paper._lines, "a.train.rating", b"1\t2\n" + LONG, "line 2: longer than"),
        (_criteo, "day_0", LONG * 2, "line 1: longer than"),
        (_criteo, "day_0", b"1\n2\n" + LONG * 2, "line 3: longer than"),
        (lambda path: stages.line_offsets(path, 3, _ignore, str(path)), "train.en", b"a\n" + LONG, "line 2: longer"),
        (_extract, "train.en.gz", gzip.compress(b"a\n" + LONG, mtime=0), "line 2: longer than"),
        (wmt.read_sgm, "a.sgm", LONG, "more than 4,096 bytes"),
        (sgf.read, "a.sgf", b"(;C[" + LONG + b"])", "more than 4,096 bytes"),
        (vocabulary.read, "vocab.txt", LONG, "more than 4,096 bytes"),
        (squad.read, squad.TRAIN, LONG, "more than 4,096 bytes"),
        (lambda path: texts.read(path, texts.SENTENCES, 0, len(LONG)), "a.txt", LONG, "a document longer than"),
        (_page, "a.xml", b"<mediawiki><page>" + LONG, "a page of over"),
        (_page, "a.xml.bz2", bz2.compress(b"<mediawiki><page>" + LONG), "a page of over"),
    ],
)
def test_long_line_is_rejected(
    read: Read, name: str, content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, limit, value in (
        *((module, "LONGEST_LINE", LONGEST) for module in (text_files, wikipedia, wmt)),
        *((texts, "_LONGEST", LONGEST), (squad, "LONGEST", LONGEST), (criteo, "CHUNK", 16)),
        (text_files.read_bytes, "__defaults__", (LONGEST,)),
    ):
        monkeypatch.setattr(module, limit, value)
    refuses(read, tmp_path / name, content, reason)


def test_line_of_a_gibibyte_needs_little_memory(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress(b"x" * (1 << 24)) * 64)
    command = (
        "import sys; from pathlib import Path; from benchmarks.llama.sources import documents\n"
        "try: next(documents(Path(sys.argv[1])))\n"
        "except Exception as error: print(error)\n"
        # Not ru_maxrss, which a child takes over from the process that starts it
        "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    )
    *message, kib = ran(sys.executable, "-c", command, tmp_path / "text.jsonl.gz", check=True).stdout.splitlines()
    assert "line 1: longer than 67,108,864 bytes" in message[0] and int(kib) < 512 * 1024


def _squad(context: Any = "Ada lives in Old Bray.", begin: Any = 13, has_answer: bool = True, copies: int = 1) -> str:
    answers = [{"text": "Old Bray", "answer_start": begin}] * has_answer
    question = {"id": "q1", "question": "Where does Ada live?", "answers": answers}
    return json.dumps({"data": [{"title": "t", "paragraphs": [{"context": context, "qas": [question]}]}] * copies})


def _tensor(kind: str, shape: list[int], *offsets: int) -> str:
    return json.dumps({"a": {"dtype": kind, "shape": shape, "data_offsets": offsets}})


HEADERS = {
    _tensor("F32", [2], 0, 9): "at 0 to 9",
    _tensor("F32", [3], 0, 12): "at 0 to 12",
    _tensor("F32", [-2], 8, 0): "at 8 to 0",
    _tensor("I8", [2], 0, 2): "a tensor of F64",
    '{"a": 3}': "a tensor of F64",
    _tensor("F32", [4294967296, 4294967296], 0, 0): "at 0 to 0",
    "[]": "no JSON header",
    "[" * 200000: "no JSON header",
}
WEIGHT_MAPS = {
    '{"a": "../one.safetensors"}': "no weight_map of files next to it",
    '{"a": "two.safetensors"}': "cannot read",
    '{"b": "one.safetensors"}': r"b is not in one\.safetensors",
}
DAMAGED: dict[tuple[Read, str], dict[bytes | str, str]] = {
    (vocabulary.read, "vocab.txt"): {
        "a\nb\n": r"lacks \[PAD\]",
        "\n".join([*vocabulary.SPECIAL[:-1], "a"]): r"lacks \[MASK\]",
        "\n".join([*vocabulary.SPECIAL, "a", "b", "a"]): "line 8: 'a' again",
        b"[PAD]\n\xff\n": "not UTF-8",
        "\n".join([*vocabulary.SPECIAL, *map(str, range(1 << 16))]): "65,541 entries",
    },
    (_dump, "d.xml"): {
        DUMP[:4000]: "is truncated: there is no </mediawiki>",
        "<html></html>": "does not start like MediaWiki's XML does, with <mediawiki",
        "": "d.xml is empty",
        DUMP.replace("é".encode(), b"\xe9"): "page 'Page 0': byte 0xe9 of its text is not UTF-8",
    },
    (_dump, "d.xml.bz2"): {
        b"".join(STREAMS)[:-20]: "is truncated: the last bz2 stream is incomplete",
        b"".join(STREAMS[:4]): "d.xml.bz2 is truncated: ",
        b"".join([*STREAMS[:2], STREAMS[2][:60], b"xxxx", *STREAMS[3:]]): "damaged in the bz2 stream at byte",
        "<mediawiki>": "does not start like bz2 does",
    },
    (squad.read, squad.TRAIN): {
        "{": "is not JSON",
        '{"data": [{"paragraphs": [{"qas": []}]}]}': "context is missing",
        "[]": "is not in the format of SQuAD",
        _squad(begin=14): "'Old Bray' is not at character 14 of its paragraph",
        _squad(begin=-3): "is not at character -3",
        _squad(has_answer=False): "question q1 has no answer",
        _squad(copies=2): "two questions have the id q1",
        _squad(context="  "): "paragraph in 't' is empty",
        _squad(context="\ud800"): r"'t': context has an unpaired surrogate, U\+D800, at character 0",
        _squad(context=5): "paragraph in 't': context is int",
        _squad(begin="13"): "answer_start is '13', not an integer",
        _squad(begin=13.5): "answer_start is 13.5, not an integer",
        _squad(begin=float("inf")): "answer_start is inf, not an integer",
        '{"data": []}': "has no questions",
    },
    (_tensors, "model.safetensors"): {
        len(header).to_bytes(8, "little") + header.encode() + bytes(8): found for header, found in HEADERS.items()
    },
    (_tensors, "model.safetensors.index.json"): {
        f'{{"weight_map": {weights}}}': found for weights, found in WEIGHT_MAPS.items()
    },
    (sgf.read, "game.sgf"): {
        "(;SZ[9];B[ee];W[ee])": "move 2, white E5: there is a stone already",
        "(;SZ[9];B[ee];W[ed]": "ends within a game",
        "(;SZ[9];B[ee];W[e": "is not SGF",
        "(;SZ[9];B[zz])": r"\[zz\] is not a point on 9 x 9",
        "(;SZ[7];B[aa])": "a board of 7",
        "(;SZ[nine];B[aa])": r"SZ\[nine\]\n.*a number",
        "(;GM[2]SZ[9];B[aa])": "another game",
        "": "ends within a game",
        "\x00\x01 binary": "is not SGF",
    },
    (segment.check_codes, "codes"): {"#version: 0.2\na b\na b c\n": "line 3: 'a b c'", "": "line 1: ''"},
    (segment.read_dictionary, "dictionary"): {
        "'the_'\nthe_\n": "line 2: 'the_'",
        "'the_'\n'the_'\n": "line 2: \"'the_'\" again",
    },
    (wmt.read_sgm, "a.sgm"): {"nothing": "has no <seg>"},
}


@pytest.mark.parametrize(
    ("read", "name", "content", "message"),
    [(*reader, content, message) for reader, cases in DAMAGED.items() for content, message in cases.items()],
    ids=[f"{name}-{message[:40]}" for (_, name), cases in DAMAGED.items() for message in cases.values()],
)
def test_damaged_file_is_rejected(read: Read, name: str, content: bytes | str, message: str, tmp_path: Path) -> None:
    refuses(read, tmp_path / name, content, message)
