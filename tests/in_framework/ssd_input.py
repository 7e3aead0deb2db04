"""SSD's input: every image once for any number of ranks, boxes that follow their images, and an exact resume."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.detection.annotations import open_data
from benchmarks.ssd.pytorch.coding import decode, match
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.data import EvaluationInput, TrainingInput, steps_per_epoch
from benchmarks.ssd.pytorch.default_boxes import default_boxes

CPU = torch.device("cpu")
CONFIG = Config(device="cpu", precision="fp32", image_size=96, batch_size=8, eval_batch_size=7, dali_threads=1,
                pad_channels=False)  # fmt: skip
DATA = open_data(Path(sys.argv[1]))
# What is parsed after the clock has started are the boxes alone, and not the annotations as published.
DATA = dataclasses.replace(DATA, train=dataclasses.replace(DATA.train, json=Path("nothing")))


def rank(number: int, size: int) -> Ranks:
    return Ranks(number, size, number, size, CPU)


def evaluated(size: int) -> dict:
    """Which images all ranks evaluate together."""
    inputs = [EvaluationInput(CONFIG, DATA.val, rank(number, size)) for number in range(size)]
    passes = []
    for _ in range(2):
        batches = [[positions for _, positions in each.one_pass()] for each in inputs]
        assert len({len(each) for each in batches}) == 1, "all ranks run as many batches"
        passes.append(sorted(np.concatenate([position for each in batches for position in each]).tolist()))
    return {"each once": passes[0] == DATA.val.with_objects.tolist(), "again": passes[0] == passes[1]}


def same(batches: TrainingInput, others: TrainingInput, count: int) -> bool:
    pairs = [(batches.next(), others.next()) for _ in range(count)]
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def resumed(**changes) -> bool:
    config = dataclasses.replace(CONFIG, **changes)
    batches = TrainingInput(config, DATA.train, rank(1, 2))
    for _ in range(5):
        batches.next()
    return same(batches, TrainingInput(config, DATA.train, rank(1, 2), batches.content()), 4)


def unchanged() -> dict:
    """Without crop, colours and flip a batch has the objects of its images, as benchmarks/ssd/pytorch/coding.py."""
    config = dataclasses.replace(CONFIG, crop=False, colour=False, flip=False, batch_size=16)
    batches = TrainingInput(config, DATA.train, rank(0, 1))
    defaults = torch.from_numpy(default_boxes(96, config.box_scales)).float()
    wanted = []
    part = DATA.train
    for position in part.with_objects.tolist():
        of_image = slice(int(part.offsets[position]), int(part.offsets[position + 1]))
        width, height = part.sizes[position].tolist()
        x, y, w, h = (part.boxes[of_image] / np.array([width, height, width, height])).T
        labels = torch.from_numpy(part.labels[of_image].astype(np.int64))
        wanted.append(match(torch.from_numpy(np.stack((x, y, x + w, y + h), 1)).float(), labels, defaults)[1])
    table, found = torch.stack(wanted), 0
    for _ in range(steps_per_epoch(part, config, rank(0, 1))):
        batch = batches.next()
        close = (batch.labels[:, None] != table[None]).sum(-1).amin(1)
        found += int((close <= 2).sum())
    return {"share": found / (16 * steps_per_epoch(part, config, rank(0, 1)))}


def flipped() -> float:
    """Boxes follow a flipped image: both halves of a batch, decoded, have their objects at mirrored places."""
    plain, mirrored = (
        TrainingInput(dataclasses.replace(CONFIG, crop=False, colour=False, flip=flip), DATA.train, rank(0, 1))
        for flip in (False, True)
    )
    one, other = plain.next(), mirrored.next()
    defaults = torch.from_numpy(default_boxes(96, CONFIG.box_scales)).float()
    errors = []
    for image in range(len(one.images)):
        turned = torch.equal(one.images[image].flip(-1), other.images[image])
        boxes = [decode(each.offsets[image], defaults)[each.labels[image] > 0] for each in (one, other)]
        left = [float(each[:, 0].min()) for each in boxes]
        right = [float(each[:, 2].max()) for each in boxes]
        errors.append(abs(left[1] - (1 - right[0])) if turned else abs(left[1] - left[0]))
    return max(errors)


def smoothed() -> dict:
    """Without antialiasing training has other images, and evaluation the same."""
    configs = [
        dataclasses.replace(CONFIG, crop=False, colour=False, flip=False, antialias=way) for way in (True, False)
    ]
    trained = [TrainingInput(config, DATA.train, rank(0, 1)).next().images for config in configs]
    evaluated = [next(iter(EvaluationInput(config, DATA.val, rank(0, 1)).one_pass()))[0] for config in configs]
    return {"training": torch.equal(*trained), "evaluation": torch.equal(*evaluated)}


def cropped() -> dict:
    """Crops change the images, keep an object in each and differ between ranks and seeds."""
    inputs = [TrainingInput(dataclasses.replace(CONFIG, seed=seed), DATA.train, rank(0, 1)) for seed in (0, 0, 7)]
    first = [each.next() for each in inputs]
    return {
        "objects": bool((first[0].labels > 0).any(1).all()),
        "repeats": torch.equal(first[0].images, first[1].images),
        "differs": not torch.equal(first[0].images, first[2].images),
        "finite": bool(torch.isfinite(first[0].offsets).all() and torch.isfinite(first[0].images).all()),
    }


if __name__ == "__main__":
    print(json.dumps({
        "evaluated": {str(size): evaluated(size) for size in (1, 2, 3)},
        "resumed": [resumed(), resumed(dali_batches=3)],
        "unchanged": unchanged(),
        "flipped": flipped(),
        "cropped": cropped(),
        "smoothed": smoothed(),
    }))  # fmt: skip
