"""Images in class folders: ``train/`` and ``val/``, or one tree that is split here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.resnet.sources.listing import Item, Report, Source, by_label, some

VAL_FOLDERS = ("val", "validation", "test")
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


def list_folders(origin: Path, seed: int, fraction: float, report: Report) -> Source:
    """List ``train/`` and ``val/`` (or ``validation/``, ``test/``), or one tree of class folders."""
    name = origin.resolve().name
    if not (origin / "train").is_dir():
        items, found, left_out = walk_classes(origin, report, 0)
        images = hold_out(label_by_folder(items, found), found, seed, fraction)
        made = f"one tree of class folders, {fraction:g} of every class held out here"
        return Source(name, tuple(found), images, made, left_out)
    val = find_val(origin)
    if val is None:
        raise Problem(
            f"{origin} has train/ but no held-out images",
            "a folder val/, validation/ or test/ next to train/",
            f"add one, or prepare {origin / 'train'} to hold images of each class out",
        )
    train, trained, left_out = walk_classes(origin / "train", report, 0)
    held, seen, left_out_val = walk_classes(val, report, len(train))
    classes = tuple(sorted({*trained, *seen}))
    images = {"train": label_by_folder(train, classes), "val": label_by_folder(held, classes)}
    made = f"class folders, split into train and {val.name} by the source"
    return Source(name, classes, images, made, left_out + left_out_val)


def find_val(origin: Path) -> Optional[Path]:
    """Find the folder of held-out images by its usual names."""
    return next((origin / name for name in VAL_FOLDERS if (origin / name).is_dir()), None)


def walk_classes(root: Path, report: Report, before: int) -> Tuple[List[Item], List[str], int]:
    """List the images below each class folder of ``root``, not labelled yet; the classes; the files left out."""
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise Problem(
            f"{root} has no class folders",
            "one folder of images for each class",
            "name the folder above the class folders, or the one that holds ImageNet's tars",
        )
    items: List[Item] = []
    left_out = 0
    for name in classes:
        for path in _files(root, name):
            if os.path.splitext(path)[1].lower() not in SUFFIXES:  # noqa: PTH122 - a million times
                left_out += 1
                continue
            facts = os.stat(os.path.join(root, path))  # noqa: PTH116,PTH118
            items.append(Item(path, -1, str(root), -1, facts.st_size, facts.st_mtime_ns))
            if len(items) % 256 == 0:
                report(before + len(items))
    report(before + len(items))
    if not items:
        raise Problem(
            f"the folders {some(classes)} in {root} hold no images",
            "files with the suffixes " + " ".join(SUFFIXES),
            "name the folder above the class folders",
        )
    return items, classes, left_out


def _files(root: Path, folder: str) -> Iterator[str]:
    with os.scandir(root / folder) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    for name, is_folder in found:
        path = f"{folder}/{name}"
        if is_folder:
            yield from _files(root, path)
        else:
            yield path


def label_by_folder(items: List[Item], classes: Sequence[str]) -> List[Item]:
    """Label images by the class folder that their name begins with."""
    labels = {name: label for label, name in enumerate(classes)}
    return [item._replace(label=labels[item.name.split("/", 1)[0]]) for item in items]


def hold_out(items: List[Item], classes: Sequence[str], seed: int, fraction: float) -> Dict[str, List[Item]]:
    """Hold the same fraction of every class out, at least one image, chosen by seed and name."""
    images: Dict[str, List[Item]] = {"train": [], "val": []}
    for group in by_label(items, seed):
        if len(group) < 2:
            raise Problem(
                f"the class {classes[group[0].label]} has a single image",
                "at least two: one to train on, one to hold out",
                "add images to it or take its folder away",
            )
        count = min(max(1, round(len(group) * fraction)), len(group) - 1)
        images["val"] += group[:count]
        images["train"] += group[count:]
    return images
