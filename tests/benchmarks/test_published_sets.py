"""A published data set's name is earned by its counts and checksums, on both sides of the wall."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.data import passport as passports
from benchmarks.common.data import prepare, published
from benchmarks.common.data.progress import Progress
from benchmarks.language import vocabulary
from benchmarks.language.vocabulary import SPECIAL
from encore import catalogue, data

SETS = published.known()
QUESTION = {"id": "1", "question": "where ?", "answers": [{"text": "here", "answer_start": 0}]}
XQUAD = {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": "here", "qas": [QUESTION]}]}]}


def written(folder: Path, name: str, change: int) -> dict[str, Any]:
    """The passport of a data set with the counts that a published one has, and ``change`` more of each."""
    facts: dict[str, Any] = {"benchmark": "any", "name": name, "classes": [], "splits": {}, "facts": {}, "how": {}}
    for path, number in {**SETS[name]["exactly"], **SETS[name].get("at_least", {})}.items():
        *keys, last = path.split(".")
        place = facts
        for key in keys:
            place = place.setdefault(key, {})
        place[last] = [str(each) for each in range(number + change)] if path == "classes" else number + change
    for path, digest in SETS[name].get("checksums", {}).items():
        facts["how"].setdefault("sha256", {})[path.split(".")[-1]] = digest
    facts["splits"].setdefault("train", {"count": 1})
    for split in facts["splits"].values():
        split["files"] = []
    passports.write(copy.deepcopy(facts), folder)
    return facts


@pytest.mark.parametrize("name", sorted(SETS))
def test_a_name_is_earned_on_both_sides(name: str, tmp_path: Path) -> None:
    whole, wrong = (written(tmp_path, name, change) for change in (0, -1))
    assert bool(published.shortfall(whole)) == (not SETS[name]["exactly"])
    assert published.shortfall(wrong)
    assert data.read_passport(tmp_path).unearned
    written(tmp_path, name, 0)
    assert bool(data.read_passport(tmp_path).unearned) == (not SETS[name]["exactly"])


def test_a_name_is_not_earned_by_counts_where_there_are_checksums(tmp_path: Path) -> None:
    facts = written(tmp_path, "squad-v1.1", 0)
    facts["how"]["sha256"]["test"] = "0" * 64
    passports.write(copy.deepcopy(facts), tmp_path)
    wanted = SETS["squad-v1.1"]["checksums"]["how.sha256.test"]
    assert (
        published.shortfall(facts)
        == data.read_passport(tmp_path).unearned
        == f"how.sha256.test {'0' * 64} for {wanted}"
    )


def test_every_benchmark_states_the_counts_of_its_full_data_set() -> None:
    names = {name: catalogue.choose(name).benchmark.full_data.name for name in catalogue.benchmarks()}
    assert {name for name, full in names.items() if full not in SETS} == set()


def test_another_set_in_squads_format_is_own_data(tmp_path: Path) -> None:
    from benchmarks.bert_squad.prepare import DATA_SET

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
