"""The passport: written last, equal for equal data, and every change of the files is found."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.data import passport as passports
from benchmarks.common.data import recordio
from benchmarks.common.data.recordio import frame, index_line, pack
from benchmarks.resnet.prepare import IMAGENET_COUNTS, check, check_counts


def make(folder: Path, **changes: object) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    splits = {}
    for name in ("train", "val"):
        rec, idx = folder / f"{name}.rec", folder / f"{name}.idx"
        with rec.open("wb") as file, idx.open("w") as index:
            for key in range(3):
                index.write(index_line(key, file.tell()))
                file.write(frame(pack(key % 2, key, b"image" * (key + 1))))
        count, first, last, _ = recordio.inspect(rec, idx)
        files = [passports.describe_file(rec), passports.describe_file(idx)]
        ends = {"first": first, "last": last}
        splits[name] = {"count": count, "files": files, **ends, "skipped": 0, "skipped_names": []}
    facts = {
        "benchmark": "resnet",
        "name": "pets",
        "classes": ["cat", "dog"],
        "splits": splits,
        "facts": {},
        "how": {"source": "0" * 64, "options": {"resize": None}, "tool": {"name": "test"}},
    }
    facts.update(changes)
    passports.write(facts, folder)
    return {**facts, "id": passports.data_id(facts)}


def verify(folder: Path, quick: bool = False) -> list[passports.Problem]:
    return passports.verify(folder, quick, check=check)


def test_what_is_written_is_read(tmp_path):
    assert make(tmp_path) == passports.read(tmp_path)


@pytest.mark.slow
def test_no_byte_of_a_passport_changes_unnoticed(tmp_path):
    make(tmp_path)
    path = tmp_path / passports.FILE_NAME
    whole = path.read_bytes()
    unnoticed = []
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        if not verify(tmp_path, quick=True):
            unnoticed.append(whole[max(place - 20, 0) : place + 20])
    assert len(whole) > 1000 and not unnoticed


def test_equal_data_have_equal_ids_wherever_they_lie(tmp_path):
    here, there = make(tmp_path / "here"), make(tmp_path / "there", name="other", how={"source": "1" * 64})
    assert here["id"] == there["id"]
    assert here["id"] != passports.data_id({**here, "classes": ["cat", "cow"]})
    with_facts = {**here, "facts": {"side": 32}}
    assert len({passports.data_id(each) for each in (here, with_facts, {**with_facts, "classes": []})}) == 3


@pytest.mark.parametrize("quick", [True, False])
def test_a_whole_data_set_has_no_findings(tmp_path, quick):
    make(tmp_path)
    assert verify(tmp_path, quick) == []


def corrupt_first(folder: Path) -> None:
    data = bytearray((folder / "train.rec").read_bytes())
    data[8 + 24] ^= 1
    (folder / "train.rec").write_bytes(data)


def corrupt_middle(folder: Path) -> None:
    data = (folder / "val.rec").read_bytes()
    (folder / "val.rec").write_bytes(data.replace(b"imageimage", b"imageIMAGE", 1))


def shift_index(folder: Path) -> None:
    lines = (folder / "val.idx").read_text().splitlines()
    lines[0] = "0\t4"
    (folder / "val.idx").write_text("\n".join(lines) + "\n")


DAMAGES = {
    "missing": (lambda folder: (folder / "val.idx").unlink(), "val.idx: No such file", True),
    "short": (lambda folder: (folder / "val.rec").write_bytes(b"1234"), "val.rec has 4 bytes", True),
    "first": (corrupt_first, "the first record is", True),
    "index": (shift_index, "where the magic", True),
    "middle": (corrupt_middle, "val.rec has changed", False),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_found(tmp_path, damage):
    make(tmp_path)
    change, told, seen_quickly = DAMAGES[damage]
    change(tmp_path)
    quick, full = verify(tmp_path, quick=True), verify(tmp_path)
    assert full
    assert bool(quick) == seen_quickly
    finding = (quick or full)[0]
    assert told in finding.found
    assert finding.expected
    assert finding.hint


def test_without_a_passport_a_folder_is_no_data_set(tmp_path):
    make(tmp_path)
    (tmp_path / "dataset.json").unlink()
    assert "no dataset.json" in passports.verify(tmp_path)[0].found
    (tmp_path / "parts").mkdir()
    assert "half-written" in passports.verify(tmp_path)[0].found
    assert "no folder" in passports.verify(tmp_path / "nowhere")[0].found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1}', '{"schema": 1, "spli'])
def test_an_unreadable_passport_is_a_finding(tmp_path, text):
    make(tmp_path)
    (tmp_path / "dataset.json").write_text(text)
    assert len(passports.verify(tmp_path)) == 1


def test_the_data_set_of_another_benchmark_is_named(tmp_path):
    make(tmp_path)
    assert "data set of resnet" in passports.verify(tmp_path, benchmark="ssd")[0].found


def test_imagenet_has_its_counts(tmp_path):
    counts = dict(IMAGENET_COUNTS)
    assert counts == {"train": 1_281_167, "val": 50_000}
    assert check_counts("imagenet", 1000, counts) == []
    assert len(check_counts("imagenet", 999, {"train": 1_281_166})) == 3
    assert check_counts("pets", 2, {"train": 3}) == []
    make(tmp_path, name="imagenet")
    assert "imagenet with 2 classes" in [problem.found for problem in verify(tmp_path)]


def test_skipped_images_count_towards_imagenet(tmp_path):
    passport = make(tmp_path, name="imagenet")
    passport["splits"]["val"]["skipped"] = 49_997
    passports.write(passport, tmp_path)
    found = [problem.found for problem in verify(tmp_path)]
    assert "imagenet with 3 images in train" in found
    assert not [each for each in found if "in val" in each]
