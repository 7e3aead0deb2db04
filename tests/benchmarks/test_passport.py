"""The passport: written last, equal for equal data, and every change of the files is found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.common import passport as passports
from benchmarks.common.passport import Passport, Split
from benchmarks.common.recordio import ImageHeader, RecordWriter, pack


def make(folder: Path, **changes: object) -> Passport:
    """A data folder of 3 + 3 records with its passport."""
    folder.mkdir(exist_ok=True)
    splits = {}
    for name in ("train", "val"):
        rec, idx = folder / f"{name}.rec", folder / f"{name}.idx"
        with RecordWriter(rec, idx) as writer:
            for key in range(3):
                writer.write(key, pack(ImageHeader(float(key % 2), key), b"image" * (key + 1)))
        count, first, last, _ = passports.inspect(rec, idx)
        files = passports.describe_file(rec), passports.describe_file(idx)
        splits[name] = Split(count, *files, first, last, 0, ())
    classes = ("cat", "dog")
    facts = {
        "schema": passports.SCHEMA,
        "benchmark": "resnet",
        "name": "pets",
        "id": passports.data_id("resnet", classes, splits),
        "classes": classes,
        "splits": splits,
        "options": {"resize": None},
        "source": "0" * 64,
        "tool": {"name": "test"},
    }
    passport = Passport(**{**facts, **changes})
    passports.write(passport, folder)
    return passport


def test_what_is_written_is_read(tmp_path):
    assert make(tmp_path) == passports.read(tmp_path)


def test_equal_data_have_equal_ids_wherever_they_lie(tmp_path):
    here, there = make(tmp_path / "here"), make(tmp_path / "there", name="other", source="1" * 64)
    assert here.id == there.id
    with_other_classes = passports.data_id("resnet", ("cat", "cow"), here.splits)
    assert here.id != with_other_classes


@pytest.mark.parametrize("quick", [True, False])
def test_a_whole_data_set_has_no_findings(tmp_path, quick):
    make(tmp_path)
    assert passports.verify(tmp_path, quick) == []


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
    quick, full = passports.verify(tmp_path, quick=True), passports.verify(tmp_path)
    assert full
    assert bool(quick) == seen_quickly
    finding = (quick or full)[0]
    assert told in finding.found
    assert finding.expected
    assert finding.remedy


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


def test_an_edited_passport_is_found(tmp_path):
    make(tmp_path)
    facts = json.loads((tmp_path / "dataset.json").read_text())
    facts["classes"] = ["dog", "cat"]
    (tmp_path / "dataset.json").write_text(json.dumps(facts))
    assert "edited" in passports.verify(tmp_path)[0].found


def test_the_data_set_of_another_benchmark_is_named(tmp_path):
    make(tmp_path)
    assert "data set of resnet" in passports.verify(tmp_path, benchmark="ssd")[0].found


def test_imagenet_has_its_counts(tmp_path):
    counts = dict(passports.IMAGENET_COUNTS)
    assert counts == {"train": 1_281_167, "val": 50_000}
    assert passports.check_counts("imagenet", 1000, counts) == []
    assert len(passports.check_counts("imagenet", 999, {"train": 1_281_166})) == 3
    assert passports.check_counts("pets", 2, {"train": 3}) == []
    make(tmp_path, name="imagenet")
    assert "imagenet with 2 classes" in [finding.found for finding in passports.verify(tmp_path)]


def test_skipped_images_count_towards_imagenet(tmp_path):
    passport = make(tmp_path, name="imagenet")
    split = dataclasses.replace(passport.splits["val"], skipped=49_997)
    passports.write(dataclasses.replace(passport, splits={**passport.splits, "val": split}), tmp_path)
    assert not [finding for finding in passports.verify(tmp_path) if "in val" in finding.found]
