"""The manifest of a data set: written last, equal for equal data, and verified against the files."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.data import manifest as manifests
from benchmarks.common.data import published, recordio
from benchmarks.common.data.recordio import frame, index_line, pack
from benchmarks.resnet.prepare import IMAGENET_COUNTS, check, check_counts
from encore import catalogue, data


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
        files = [manifests.describe_file(rec), manifests.describe_file(idx)]
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
    assert make(tmp_path) == manifests.read(tmp_path)
    assert verify(tmp_path) == verify(tmp_path, quick=True) == []
    path = tmp_path / manifests.FILE_NAME
    content, accepted = path.read_bytes(), []
    for offset in range(len(content)):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        if not verify(tmp_path, quick=True):
            accepted.append(content[max(offset - 20, 0) : offset + 20])
    assert len(content) > 1000 and not accepted


def test_id_depends_on_the_data_only(tmp_path: Path) -> None:
    first, second = make(tmp_path / "first"), make(tmp_path / "second", name="other", how={"source": "1" * 64})
    assert first["id"] == second["id"]
    others = ({"classes": ["cat", "cow"]}, {"facts": {"side": 32}}, {"facts": {"side": 32}, "classes": []})
    assert len({first["id"], *(manifests.data_id({**first, **change}) for change in others)}) == 4


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new, 1))


DAMAGES: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "missing": (lambda folder: (folder / "val.idx").unlink(), "val.idx: No such file", True),
    "short": (lambda folder: os.truncate(folder / "val.rec", 4), "val.rec has 4 bytes", True),
    "first": (lambda folder: replace_bytes(folder / "train.rec", b"image", b"imAge"), "the first record is", True),
    "index": (lambda folder: replace_bytes(folder / "val.idx", b"0\t0", b"0\t4"), "where the magic", True),
    "middle": (lambda folder: replace_bytes(folder / "val.rec", b"eima", b"eImA"), "val.rec has changed", False),
    "no manifest": (lambda folder: (folder / "dataset.json").unlink(), "no dataset.json", True),
    "incomplete": (
        lambda folder: (folder / "dataset.json").unlink() or (folder / "parts").mkdir(), "incomplete", True
    ),
    "no folder": (lambda folder: folder.rename(folder.parent / "moved"), "no folder", True),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    make(tmp_path / "data")
    change, problem, is_found_quickly = DAMAGES[damage]
    change(tmp_path / "data")
    quick, full = verify(tmp_path / "data", quick=True), verify(tmp_path / "data")
    assert bool(quick) == is_found_quickly
    assert problem in (quick or full)[0] and full


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1}', '{"schema": 1, "spli'])
def test_unreadable_manifest_is_a_problem(tmp_path: Path, text: str) -> None:
    make(tmp_path)
    (tmp_path / "dataset.json").write_text(text)
    assert len(verify(tmp_path)) == 1


def test_counts_of_imagenet(tmp_path: Path) -> None:
    assert dict(IMAGENET_COUNTS) == {"train": 1_281_167, "val": 50_000}
    assert check_counts("imagenet", 1000, dict(IMAGENET_COUNTS)) == []
    assert len(check_counts("imagenet", 999, {"train": 1_281_166})) == 3
    assert check_counts("pets", 2, {"train": 3}) == []
    facts = make(tmp_path, name="imagenet")
    assert "data set of resnet" in manifests.verify(tmp_path, benchmark="ssd")[0].found
    assert "imagenet with 2 classes" in verify(tmp_path)
    # Skipped images are counted
    facts["splits"]["val"]["skipped"] = 49_997
    manifests.write(facts, tmp_path)
    assert "imagenet with 3 images in train" in verify(tmp_path)
    assert not [problem for problem in verify(tmp_path) if "in val" in problem]


SETS = published.load()


def write_manifest(folder: Path, name: str, change: int = 0, **sha256: str) -> dict[str, Any]:
    # The manifest of a data set with the counts of a published one plus ``change``
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
    manifests.write(copy.deepcopy(facts), folder)
    return facts


@pytest.mark.parametrize("name", sorted(SETS))
def test_name_needs_the_published_counts(name: str, tmp_path: Path) -> None:
    for change in (-1, 0):
        facts = write_manifest(tmp_path, name, change)
        is_short = change < 0 or not SETS[name]["exactly"]
        assert bool(published.shortfall(facts)) == bool(data.read_passport(tmp_path).unearned) == is_short


def test_name_needs_the_published_checksums(tmp_path: Path) -> None:
    facts = write_manifest(tmp_path, "squad-v1.1", test="0" * 64)
    shortfall = f"how.sha256.test {'0' * 64} for {SETS['squad-v1.1']['checksums']['how.sha256.test']}"
    assert published.shortfall(facts) == data.read_passport(tmp_path).unearned == shortfall


def test_full_data_set_of_every_benchmark_has_counts() -> None:
    assert {catalogue.choose(name).benchmark.full_data.name for name in catalogue.benchmarks()} <= set(SETS)
