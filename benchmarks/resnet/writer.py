"""Writes images as RecordIO: worker processes convert parts, which are then joined into one file per split."""

import argparse
import hashlib
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List, Optional

import PIL

from benchmarks.common.data import published, recordio, source_checks
from benchmarks.common.data.images import CorruptImage
from benchmarks.common.data.manifest import File
from benchmarks.common.data.prepare import Content, Listing, Split, check_room
from benchmarks.common.data.progress import Progress
from benchmarks.common.data.workers import Workers
from benchmarks.resnet.parts import Encoding, Part, PartFacts, encode, finished_parts, join, plan, write_part
from benchmarks.resnet.sources import Source, check_classes, list_images, read_item

VERSION = "2"  # increase it if the output changes for the same source and options; unfinished parts are then discarded
SAMPLED_IMAGES = 32  # images encoded on trial to estimate the room needed
BYTES_OF_RECORD = 64  # record frame 8, image header 24, padding up to 3, index line and part facts: rounded up


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    def report(count: int, total: Optional[int] = None) -> None:
        progress.update("index", count, total, unit="files")

    source = list_images(args.origin, args.seed, args.validation_fraction, report)
    source = source._replace(name=args.name or source.name)
    report(sum(source.counts.values()), sum(source.counts.values()))
    published.refuse(source.published_fields)
    if source.left_out:
        progress.note(f"{source.left_out:,} files skipped: their suffixes are not those of images")
    return Listing(source, fingerprint_of(source, Encoding(args.resize, args.quality, args.trust)))


def fingerprint_of(source: Source, encoding: Encoding) -> str:
    """Hash of everything that determines the output: version, options and listing, but not the location."""
    digest = hashlib.sha256(repr((VERSION, tuple(encoding), source.name, source.classes)).encode())
    labels = source.labels
    for items in source.images.values():
        digest.update(b"split\n")
        for item in items:
            # A generated image's bytes are determined by the name; the encoder version must not matter.
            stat = (0, 0) if item.payload else (item.size, item.changed)
            text = repr((item.name, labels[item.kind], item.offset, *stat))
            digest.update(text.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    source, encoding = listing.source, Encoding(args.resize, args.quality, args.trust)
    parts = {split: plan(source, split, scratch, encoding) for split in source.images}
    room = partial(estimate_bytes, source, encoding)
    parts_by_split = convert(room, parts, Workers(args.workers, scratch.parent, progress), scratch)
    skipped = check_corrupt(source, parts_by_split, args.skip_corrupt, progress)
    listed = source.images["val"]
    val_images = [
        (listed[index].name, key)
        for part in parts_by_split["val"].values()
        for (index, _), key in zip(part.index, part.keys)
    ]
    trained = (key for part in parts_by_split["train"].values() for key in part.keys)
    common = source_checks.overlap(val_images, trained, "images", args.allow_overlap, progress)
    add = progress.counter("join", sum(part.bytes for split in parts_by_split.values() for part in split.values()))
    splits: Dict[str, Split] = {}
    described: List[File] = []
    for split, names in skipped.items():
        records = scratch / f"{split}.rec"
        files = join(parts_by_split[split], records, add)
        count, first, last, _ = recordio.inspect(records, records.with_suffix(".idx"))
        listed_names = sorted(names)[: source_checks.LISTED]
        corrupt_summary = {"first": first, "last": last, "skipped": len(names), "skipped_names": listed_names}
        splits[split] = Split(count, [file["name"] for file in files], corrupt_summary)
        described += files
    options = {"resize": encoding.resize, "quality": encoding.quality, "decoded": not encoding.trust}
    return Content(
        name=source.name,
        splits=splits,
        summary=" + ".join(f"{count:,}" for count in source.counts.values()) + " images listed",
        how={"options": {"made": source.description, **options, "seed": args.seed}, "in_both": common},
        tool={"version": VERSION, "pillow": PIL.__version__},
        classes=source.classes,
        described=described,
    )


def convert(
    room: Callable[[], int], parts: Dict[str, List[Part]], workers: Workers, scratch: Path
) -> Dict[str, PartFacts]:
    """Write all missing parts, and return the metadata of all parts in order, by split.

    ``room`` returns the bytes needed in total; free space is checked before the first part is written.
    """

    def find() -> Dict[str, PartFacts]:
        return {split: finished_parts(split_parts, scratch / f"{split}.rec") for split, split_parts in parts.items()}

    all_parts = [part for split_parts in parts.values() for part in split_parts]
    done = {path for split_done in find().values() for path in split_done}
    if len(done) < len(all_parts):
        present = sum(path.stat().st_size for path in scratch.glob("*.rec"))
        check_room(scratch.parent, room() - present)
    workers.run(
        "convert", "images", write_part, all_parts, lambda part: len(part.items), lambda part: part.records in done
    )
    return find()


def estimate_bytes(source: Source, encoding: Encoding) -> int:
    """Estimate the size of the data set from a sample of training images."""
    all_items = [item for items in source.images.values() for item in items]
    train = source.images["train"]
    source_bytes = target_bytes = 0
    for item in train[:: max(1, len(train) // SAMPLED_IMAGES)]:
        source_bytes += item.size
        try:
            target_bytes += len(encode(read_item(item), encoding))
        except CorruptImage:
            target_bytes += item.size
    return (
        round(sum(item.size for item in all_items) * target_bytes / max(1, source_bytes))
        + len(all_items) * BYTES_OF_RECORD
    )


def check_corrupt(
    source: Source, parts_by_split: Dict[str, PartFacts], skip: bool, progress: Progress
) -> Dict[str, List[str]]:
    """Names of corrupt images by split, if they may be skipped."""
    corrupt = {
        split: dict(pair for fact in parts_by_split[split].values() for pair in fact.corrupt)
        for split in parts_by_split
    }
    lines = [f"{split}: {name}: {reason}" for split, images in corrupt.items() for name, reason in images.items()]
    source_checks.damaged(lines, "corrupt images", "images that can be decoded", skip, progress, keeps=True)
    remaining = {
        split: [item for item in items if item.name not in corrupt[split]] for split, items in source.images.items()
    }
    check_classes(source._replace(images=remaining))
    return {split: list(images) for split, images in corrupt.items()}
