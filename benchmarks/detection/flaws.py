"""Which flaws of a set are refused, which are left out on demand and which are only reported.

Refused always: JSON files that are not COCO's, categories that differ between the parts, an id that comes twice.
Refused unless ``--skip-flawed`` leaves them out: images without a file, files without an entry, damaged images, images
of another size than their entry has, and annotations with a flaw that objects.py names.

Only reported, because published COCO has them: images without objects (1,021 of train2017), boxes that reach out of
their image by a pixel or less, images that are no JPEG but can be read. In COCO 2017 itself, which its counts identify,
the flaws of single objects that TOLERATED names are reported too: training leaves out what cannot be used, and the
evaluation judges by the file as published.
"""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, Mapping, Sequence

from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.detection import objects
from benchmarks.detection.annotations import PARTS
from benchmarks.detection.sources import AGAIN, Source
from benchmarks.detection.tables import STICKS_OUT, Header

TOLERATED = (objects.OUTSIDE, objects.NO_AREA, objects.FEW_POINTS)
SHOWN = 5
"""Flaws of one kind that a message names."""
SKIP = "fix them, or add --skip-flawed to leave them out: what is done already is kept"

Names = Dict[str, FrozenSet[str]]
"""Names of images by part."""


def judge_headers(source: Source, headers: Mapping[str, Header]) -> None:
    """Refuse parts with different categories."""
    first, second = (headers[part].categories for part in PARTS)
    if first != second:
        different = sorted(set(first) ^ set(second))
        found = f"train and val have different categories: {_some([f'{number} {name}' for number, name in different])}"
        remedy = f"give {source.annotations['train']} and {source.annotations['val']} one list of categories"
        raise Problem(found, "the same ids and names in both JSON files", remedy)


def judge_names(source: Source, headers: Mapping[str, Header], skips: bool, progress: Progress) -> Names:
    """Compare entries with files; return the names of the entries that have none, where they are left out."""
    missing: Names = {}
    lines: List[str] = []
    for part in PARTS:
        files, entries = source.images[part].sizes, {entry.name for entry in headers[part].entries}
        missing[part] = frozenset(entries - files.keys())
        place = source.images[part].container
        lines += _line(f"images without file in {place}", sorted(missing[part]))
        lines += _line(f"files in {place} without entry in {source.annotations[part]}", sorted(files.keys() - entries))
    _refuse(lines, "one entry in the JSON file for each image file", skips, progress)
    for part in PARTS:
        if len(missing[part]) == len(headers[part].entries):
            container = source.images[part].container
            raise Problem(f"{container} has none of the images of {source.annotations[part]}", "all of them", AGAIN)
    return missing


def judge_objects(arrays: Mapping[str, Mapping[str, Any]], is_published: bool, skips: bool, progress: Progress) -> None:
    """Refuse annotations with flaws, or report them."""
    lines: List[str] = []
    for part in PARTS:
        facts = arrays[part]
        for kind, count in sorted(facts["flaw_counts"].items()):
            line = _line(f"{part}: {kind}", [what for _, what in facts["flaws"][kind]], count)
            if is_published and kind in TOLERATED:
                progress.note(f"published so, and kept for the evaluation: {line[0]}")
            else:
                lines += line
        count, farthest = facts[STICKS_OUT]
        if count:
            progress.note(f"{part}: {count:,} boxes reach out of their image, by {farthest:g} pixels at most")
        empty = facts["images"] - facts["with_objects"]
        if empty:
            progress.note(f"{part}: {empty:,} of {facts['images']:,} images have no object")
    _refuse(lines, "objects within images and categories that the file has", skips, progress)
    for part in PARTS:
        if not arrays[part]["objects"]:
            raise Problem(f"{part} has no object that can be used", "at least one", "look at its annotations")


def judge_pictures(found: Mapping[str, Mapping[str, Any]], skips: bool, progress: Progress) -> Names:
    """Refuse images that cannot be read or have another size, or return their names."""
    damaged = {part: {name: why for name, why in found[part].items() if isinstance(why, str)} for part in PARTS}
    lines = [
        line
        for part in PARTS
        for line in _line(f"{part}: images with flaws", [f"{name}: {why}" for name, why in damaged[part].items()])
    ]
    _refuse(lines, "images that can be decoded, of the size that their entries have", skips, progress)
    return {part: frozenset(damaged[part]) for part in PARTS}


def _refuse(lines: Sequence[str], expected: str, skips: bool, progress: Progress) -> None:
    if not lines:
        return
    if not skips:
        raise Problem("\n    ".join(lines), expected, SKIP, keeps=True)
    for line in lines:
        progress.note(f"left out: {line}")


def _line(what: str, names: Sequence[str], count: int = -1) -> List[str]:
    count = len(names) if count < 0 else count
    return [f"{count:,} {what}: {_some(names, count)}"] if count else []


def _some(names: Sequence[str], count: int = -1) -> str:
    shown = "; ".join(names[:SHOWN])
    more = (len(names) if count < 0 else count) - SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown


def count(headers: Mapping[str, Header], arrays: Mapping[str, Mapping[str, Any]]) -> Dict[str, int]:
    """Return the counts that the passport states, by the names of PUBLISHED."""
    counts = {"categories": len(headers["train"].categories)}
    for part in PARTS:
        facts = arrays[part]
        counts[f"images in {part}"] = facts["images"]
        counts[f"images with annotations in {part}"] = facts["annotated"]
        counts[f"objects in {part}"] = facts["objects"]
        counts[f"crowds in {part}"] = facts["crowds"]
    return counts


def summary(arrays: Mapping[str, Mapping[str, Any]], left_out: Mapping[str, FrozenSet[str]]) -> Dict[str, Any]:
    """Return what the passport keeps of the flaws of each part: their counts, and the names of images left out."""
    return {
        part: {
            **arrays[part]["flaw_counts"],
            "boxes that reach out by rounding, and by how many pixels": arrays[part][STICKS_OUT],
            "images left out": sorted(left_out[part])[:SHOWN],
            "number of images left out": len(left_out[part]),
        }
        for part in PARTS
    }
