"""A data set has the name of a published one only with its counts and checksums, in encore/ and in benchmarks/."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bert_squad.prepare import DATA_SET
from benchmarks.common.data import passport as passports
from benchmarks.common.data import prepare, published
from benchmarks.common.data.progress import Progress
from benchmarks.language import vocabulary
from benchmarks.language.vocabulary import SPECIAL
from encore import catalogue, data

SETS = published.known()
QUESTION = {"id": "1", "question": "where ?", "answers": [{"text": "here", "answer_start": 0}]}
XQUAD = {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": "here", "qas": [QUESTION]}]}]}


def write_passport(folder: Path, name: str, change: int = 0, **sha256: str) -> dict[str, Any]:
    # The passport of a data set with the counts of a published one plus ``change``
    facts: dict[str, Any] = {"benchmark": "any", "name": name, "classes": [], "splits": {}, "facts": {}, "how": {}}
    for path, number in {**SETS[name]["exactly"], **SETS[name].get("at_least", {})}.items():
        *keys, last = path.split(".")
        parent = facts
        for key in keys:
            parent = parent.setdefault(key, {})
        parent[last] = [str(n) for n in range(number + change)] if path == "classes" else number + change
    checksums = {path.split(".")[-1]: digest for path, digest in SETS[name].get("checksums", {}).items()}
    if checksums:
        facts["how"]["sha256"] = {**checksums, **sha256}
    facts["splits"].setdefault("train", {"count": 1})
    for split in facts["splits"].values():
        split["files"] = []
    passports.write(copy.deepcopy(facts), folder)
    return facts


@pytest.mark.parametrize("name", sorted(SETS))
def test_name_needs_the_published_counts(name: str, tmp_path: Path) -> None:
    for change in (-1, 0):
        facts = write_passport(tmp_path, name, change)
        is_short = change < 0 or not SETS[name]["exactly"]
        assert bool(published.shortfall(facts)) == bool(data.read_passport(tmp_path).unearned) == is_short


def test_name_needs_the_published_checksums(tmp_path: Path) -> None:
    facts = write_passport(tmp_path, "squad-v1.1", test="0" * 64)
    shortfall = f"how.sha256.test {'0' * 64} for {SETS['squad-v1.1']['checksums']['how.sha256.test']}"
    assert published.shortfall(facts) == data.read_passport(tmp_path).unearned == shortfall


def test_full_data_set_of_every_benchmark_has_counts() -> None:
    assert {catalogue.choose(name).benchmark.full_data.name for name in catalogue.benchmarks()} <= set(SETS)


def test_other_data_in_the_format_of_squad_are_own_data(tmp_path: Path) -> None:
    raw, to = tmp_path / "xquad", tmp_path / "to"
    raw.mkdir()
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (raw / name).write_text(json.dumps(XQUAD))
    vocabulary.write(raw / "vocab.txt", [*SPECIAL, "here", "where", "?"])
    args = prepare.parse(DATA_SET, [str(raw), "-o", str(to), "--allow-overlap"])
    assert prepare.prepare(DATA_SET, args, Progress(as_json=True)) == 0
    manifest = passports.read(to)
    assert manifest["name"] == "own data"
    assert manifest["how"]["sha256"]["train"] == hashlib.sha256((raw / "train-v1.1.json").read_bytes()).hexdigest()
