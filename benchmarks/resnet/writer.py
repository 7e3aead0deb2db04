"""Writes images as RecordIO: worker processes convert parts, which are then joined into one file per split."""

import argparse
import hashlib
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List, Optional

import PIL

from benchmarks.common.data import recordio, source_checks
from benchmarks.common.data.images import CorruptImage
from benchmarks.common.data.manifest import File
from benchmarks.common.data.prepare import Content, Listing, Split, check_room
from benchmarks.common.data.progress import Progress
from benchmarks.common.data.workers import Workers
from benchmarks.resnet.parts import Encoding, Finished, Part, encode, finished, join, plan, write_part
from benchmarks.resnet.prepare import check_counts
from benchmarks.resnet.sources import Source, check_classes, list_images, read_item

VERSION = "2"  # raise it when the same source and options give other bytes: unfinished parts are then made again
SAMPLED_IMAGES = 32  # images encoded on trial to estimate the room needed
BYTES_OF_RECORD = 64  # record frame 8, image header 24, padding up to 3, index line and part facts: rounded up


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    def report(count: int, total: Optional[int] = None) -> None:
        progress.update("index", count, total, unit="files")

    source = list_images(args.origin, args.seed, args.validation_fraction, report)
    source = source._replace(name=args.name or source.name)
    report(sum(source.counts.values()), sum(source.counts.values()))
    for problem in check_counts(source.name, len(source.classes), source.counts):
        raise problem
    if source.left_out:
        progress.note(f"{source.left_out:,} files left out: no images by their suffix")
    return Listing(source, fingerprint_of(source, Encoding(args.resize, args.quality, args.trust)))


def fingerprint_of(source: Source, encoding: Encoding) -> str:
    """Hash of all that decides what is written: version, options and listing, but not the place."""
    digest = hashlib.sha256(repr((VERSION, tuple(encoding), source.name, source.classes)).encode())
    labels = source.labels
    for items in source.images.values():
        digest.update(b"split\n")
        for item in items:
            # The bytes of a generated image follow from its name; its encoder's version must not matter here.
            facts = (0, 0) if item.payload else (item.size, item.changed)
            text = repr((item.name, labels[item.kind], item.offset, *facts))
            digest.update(text.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    source, encoding = listing.source, Encoding(args.resize, args.quality, args.trust)
    parts = {split: plan(source, split, scratch, encoding) for split in source.images}
    room = partial(estimate_bytes, source, encoding)
    facts = convert(room, parts, Workers(args.workers, scratch.parent, progress), scratch)
    skipped = judge_corrupt(source, facts, args.skip_corrupt, progress)
    listed = source.images["val"]
    held = [(listed[at].name, key) for fact in facts["val"].values() for (at, _), key in zip(fact.index, fact.keys)]
    trained = (key for fact in facts["train"].values() for key in fact.keys)
    common = source_checks.overlap(held, trained, "images", args.allow_overlap, progress)
    add = progress.counter("join", sum(fact.bytes for split in facts.values() for fact in split.values()))
    splits: Dict[str, Split] = {}
    described: List[File] = []
    for split, names in skipped.items():
        records = scratch / f"{split}.rec"
        files = join(facts[split], records, add)
        count, first, last, _ = recordio.inspect(records, records.with_suffix(".idx"))
        shown = sorted(names)[: source_checks.LISTED]
        kept = {"first": first, "last": last, "skipped": len(names), "skipped_names": shown}
        splits[split] = Split(count, [file["name"] for file in files], kept)
        described += files
    options = {"resize": encoding.resize, "quality": encoding.quality, "decoded": not encoding.trust}
    return Content(
        name=source.name,
        splits=splits,
        summary=" + ".join(f"{count:,}" for count in source.counts.values()) + " images listed",
        how={"options": {"made": source.made, **options, "seed": args.seed}, "in_both": common},
        tool={"version": VERSION, "pillow": PIL.__version__},
        classes=source.classes,
        described=described,
    )


def convert(
    room: Callable[[], int], parts: Dict[str, List[Part]], workers: Workers, scratch: Path
) -> Dict[str, Finished]:
    """Write all parts that are not there yet, and return what is known about all of them, by split and in order.

    ``room`` returns the bytes that all of them need, which are looked for before the first one.
    """

    def find() -> Dict[str, Finished]:
        return {split: finished(own, scratch / f"{split}.rec") for split, own in parts.items()}

    every = [part for own in parts.values() for part in own]
    done = {path for facts in find().values() for path in facts}
    if len(done) < len(every):
        present = sum(path.stat().st_size for path in scratch.glob("*.rec"))
        check_room(scratch.parent, room() - present)
    workers.run("convert", "images", write_part, every, lambda part: len(part.items), lambda part: part.records in done)
    return find()


def estimate_bytes(source: Source, encoding: Encoding) -> int:
    """Size of the data set, from what some images of the training split become."""
    every = [item for items in source.images.values() for item in items]
    train = source.images["train"]
    before = after = 0
    for item in train[:: max(1, len(train) // SAMPLED_IMAGES)]:
        before += item.size
        try:
            after += len(encode(read_item(item), encoding))
        except CorruptImage:
            after += item.size
    return round(sum(item.size for item in every) * after / max(1, before)) + len(every) * BYTES_OF_RECORD


def judge_corrupt(source: Source, facts: Dict[str, Finished], skip: bool, progress: Progress) -> Dict[str, List[str]]:
    """Names of the corrupt images in each split, when they may be skipped."""
    corrupt = {split: dict(pair for fact in facts[split].values() for pair in fact.corrupt) for split in facts}
    lines = [f"{split}: {name}: {why}" for split, images in corrupt.items() for name, why in images.items()]
    source_checks.damaged(lines, "corrupt images", "images that can be decoded", skip, progress, keeps=True)
    left = {
        split: [item for item in items if item.name not in corrupt[split]] for split, items in source.images.items()
    }
    check_classes(source._replace(images=left))
    return {split: list(images) for split, images in corrupt.items()}
