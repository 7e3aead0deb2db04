"""Batches of images and objects: read, decoded, resized, mirrored and padded on threads, in the order of a seed.

Pillow decodes with libjpeg-turbo and resizes without holding Python's lock, so threads suffice; see the benchmark's
README for what was measured.
"""

from contextlib import closing
from functools import lru_cache, partial
from typing import Callable, Generator, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from PIL import Image

from benchmarks.common.data.images import to_rgb
from benchmarks.common.data.read_ahead import read_ahead
from benchmarks.common.run.ranks import Ranks
from benchmarks.detection.annotations import DataSet, Part
from benchmarks.maskrcnn import order
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.operators import Outlines, outlines_of


class Batch(NamedTuple):
    images: torch.Tensor  # uint8 (B, 3, H, W), in channels_last
    sizes: torch.Tensor  # float32 (B, 2): width and height before the padding
    boxes: torch.Tensor  # float32 (B, G, 4): left, top, right, bottom in pixels
    labels: torch.Tensor  # int64 (B, G): 1 to C; 0 where no object is
    edges: torch.Tensor  # the objects' outlines: see operators.Outlines
    polygons: torch.Tensor
    offsets: torch.Tensor
    seeds: torch.Tensor  # int64 (B,): of what is sampled of each image

    @property
    def outlines(self) -> Outlines:
        return Outlines(self.edges, self.polygons, self.offsets)

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device, from ``pinned`` memory without waiting for it."""
        return Batch(*(each.to(device, non_blocking=True) for each in self))

    def pinned(self, device: torch.device) -> "Batch":
        """Move to memory from which ``device`` copies by itself."""
        if device.type == "cpu":
            return self
        torch.cuda.set_device(device)  # for this thread: else the first GPU would get a context of this process
        return Batch(*(each.pin_memory() for each in self))


class Image8(NamedTuple):
    """One image that is ready for a batch, and its objects."""

    pixels: np.ndarray  # uint8 (h, w, 3)
    boxes: np.ndarray = np.zeros((0, 4), np.float32)
    labels: np.ndarray = np.zeros(0, np.int64)
    polygons: Sequence[List[np.ndarray]] = ()


def read_image(part: Part, position: int, size: Tuple[int, int], mirrored: bool, config: Config) -> np.ndarray:
    """Return uint8 (h, w, 3) of an image, resized to ``size`` (width, height)."""
    with Image.open(part.path(position)) as opened:
        image = to_rgb(opened).resize(size, Image.BILINEAR)
    pixels = np.asarray(image)
    pixels = pixels[:, ::-1] if mirrored else pixels
    return pixels[:, :, ::-1] if config.bgr else pixels


def read_objects(part: Part, position: int, size: Tuple[int, int], mirrored: bool, config: Config) -> Image8:
    """Return the objects of an image but crowds, in pixels of the resized image, without its pixels.

    Objects that are empty once their boxes are cut to the image are left out, as the submissions do. With
    inclusive_corners what is resized and mirrored is the place of a box's last pixel, as their BoxList does.
    """
    first, last = int(part.offsets[position]), int(part.offsets[position + 1])
    kept = [number for number in range(first, last) if not part.crowds[number]]
    scale = (np.array(size) / part.sizes[position]).astype(np.float32)
    boxes, edge = np.asarray(part.boxes[kept], dtype=np.float32).reshape(-1, 4), np.float32(config.edge)
    ltrb = np.concatenate((boxes[:, :2], boxes[:, :2] + (boxes[:, 2:] - edge).clip(0)), axis=1)
    ltrb = ltrb.clip(0, np.tile(part.sizes[position].astype(np.float32) - edge, 2)) * np.tile(scale, 2)
    polygons = [[each * scale for each in part.polygons(number)] for number in kept]
    if mirrored:
        right = np.float32(size[0]) - edge
        ltrb = np.stack((right - ltrb[:, 2], ltrb[:, 1], right - ltrb[:, 0], ltrb[:, 3]), axis=1)
        polygons = [[np.stack((right - each[:, 0], each[:, 1]), 1) for each in some] for some in polygons]
    there = np.flatnonzero((ltrb[:, 2] > ltrb[:, 0]) & (ltrb[:, 3] > ltrb[:, 1]))[: config.objects]
    ltrb[:, 2:] += edge
    labels = np.asarray(part.labels[kept], dtype=np.int64)[there]
    return Image8(np.zeros((0, 0, 3), np.uint8), ltrb[there], labels, [polygons[number] for number in there])


def assembled(images: List[Image8], shape: order.Shape, seeds: np.ndarray, config: Config) -> Batch:
    """Pad images and objects to a batch; the padding has the mean colour, which the network takes for 0."""
    count = len(images)
    pixels = np.empty((count, *shape, 3), dtype=np.uint8)
    pixels[:] = np.rint(np.clip(config.pixel_mean, 0, 255)).astype(np.uint8)
    boxes = np.zeros((count, config.objects, 4), dtype=np.float32)
    labels = np.zeros((count, config.objects), dtype=np.int64)
    polygons: List[List[torch.Tensor]] = []
    for number, each in enumerate(images):
        height, width, _ = each.pixels.shape
        pixels[number, :height, :width] = each.pixels
        boxes[number, : len(each.boxes)] = each.boxes
        labels[number, : len(each.labels)] = each.labels
        polygons += [[torch.from_numpy(np.ascontiguousarray(p)) for p in some] for some in each.polygons]
        polygons += [[] for _ in range(config.objects - len(each.boxes))]
    sizes = np.array([each.pixels.shape[1::-1] for each in images], dtype=np.float32).reshape(-1, 2)
    return Batch(
        torch.from_numpy(pixels).permute(0, 3, 1, 2),
        torch.from_numpy(sizes),
        torch.from_numpy(boxes),
        torch.from_numpy(labels),
        *outlines_of(polygons),
        torch.from_numpy(seeds),
    )


class Orders:
    """This rank's batches of each epoch, from the sizes of the training images alone."""

    def __init__(self, config: Config, part: Part, ranks: Ranks) -> None:
        self.config, self.part, self._ranks = config, part, ranks
        self.resized = order.resized(np.asarray(part.sizes), config.short_side, config.long_side)
        self.shapes = order.shapes(self.resized, config.short_side, config.long_side, config.bucket_step)
        self.size = config.batch_size * ranks.size
        self.of_epoch: Callable[[int], List[order.ImageBatch]] = lru_cache(maxsize=2)(self._of_epoch)

        self.steps = -(-len(part.with_objects) // self.size)  # steps of an epoch, the same on all ranks

    def _of_epoch(self, epoch: int) -> List[order.ImageBatch]:
        config, listed = self.config, self.part.with_objects
        return order.batches(self.resized, self.shapes, listed, config.batch_size, config.seed, epoch, self._ranks)


def training_input(orders: Orders, ranks: Ranks, position: int) -> Generator[Batch, None, None]:
    """Yield this rank's batches on the device, from the step ``position`` on; ``close`` ends the threads."""
    config = orders.config
    tasks = range(position, config.epochs * orders.steps)
    with closing(read_ahead(partial(read_batch, orders, ranks), tasks, config.prefetch, config.threads)) as batches:
        for batch in batches:
            yield batch.to(ranks.context)


def read_batch(orders: Orders, ranks: Ranks, step: int) -> Batch:
    """Read this rank's share of a step's images, into pinned memory where a GPU is to copy it."""
    config, part = orders.config, orders.part
    epoch, number = divmod(step, orders.steps)
    batch = orders.of_epoch(epoch)[number]
    random = np.random.RandomState([config.seed & 0xFFFFFFFF, 1, step])
    mine = slice(ranks.rank * config.batch_size, (ranks.rank + 1) * config.batch_size)
    drawn = random.random_sample(orders.size)[mine]
    seeds = random.randint(0, 1 << 31, orders.size)[mine]
    images = []
    for position, value in zip(batch.positions.tolist(), drawn):
        size, mirrored = tuple(orders.resized[position].tolist()), bool(value < config.flip)
        found = read_objects(part, position, size, mirrored, config)
        images.append(found._replace(pixels=read_image(part, position, size, mirrored, config)))
    return assembled(images, batch.shape, seeds.astype(np.int64), config).pinned(ranks.context)


class EvaluationBatch(NamedTuple):
    """Images of a rank that are evaluated; those behind ``positions`` only fill the batch."""

    images: torch.Tensor
    sizes: torch.Tensor
    positions: np.ndarray  # int64: of the images in ``data.val``


def evaluation_input(config: Config, data: DataSet, ranks: Ranks) -> Iterator[EvaluationBatch]:
    """Yield this rank's batches, as many as every rank has; each image comes once over all ranks."""
    part = data.val
    sizes = order.resized(np.asarray(part.sizes), config.short_side, config.long_side)
    wanted = order.shapes(sizes, config.short_side, config.long_side, config.bucket_step)

    def make(batch: order.ImageBatch) -> EvaluationBatch:
        mine = batch.positions[ranks.rank :: ranks.size]
        fills = config.eval_batch_size - len(mine) if config.device == "gpu" else int(len(mine) == 0)
        read = np.concatenate((mine, np.resize(batch.positions, fills)))
        images = [
            Image8(read_image(part, position, tuple(sizes[position].tolist()), False, config))
            for position in read.tolist()
        ]
        made = assembled(images, batch.shape, np.zeros(len(read), np.int64), config)
        return EvaluationBatch(made.images, made.sizes, mine)

    listed = order.evaluation(wanted, config.eval_batch_size * ranks.size)
    for each in read_ahead(make, listed, config.prefetch, config.threads):
        yield each._replace(images=each.images.to(ranks.context), sizes=each.sizes.to(ranks.context))


def synthetic_batch(
    config: Config, classes: int, shape: order.Shape, device: torch.device, objects: int = 7, edges: int = 0
) -> Batch:
    """One batch of noise of ``shape``, laid out as a real one, with objects in the form of diamonds.

    There are at least ``edges`` edges, of which those behind the objects' belong to none.
    """
    random = np.random.RandomState(config.seed & 0xFFFFFFFF)
    height, width = shape
    objects = min(objects, config.objects)
    images = []
    for _ in range(config.batch_size):
        pixels = random.randint(0, 256, (height, width, 3)).astype(np.uint8)
        corner = random.rand(objects, 2) * (width / 2, height / 2)
        size = (0.1 + 0.4 * random.rand(objects, 2)) * (width, height)
        boxes = np.concatenate((corner, corner + size), 1).astype(np.float32)
        labels = random.randint(1, classes, objects).astype(np.int64)
        (left, top), (right, bottom) = boxes[:, :2].T, boxes[:, 2:].T
        x, y = (left + right) / 2, (top + bottom) / 2
        diamonds = np.stack((x, top, right, y, x, bottom, left, y), 1).reshape(-1, 4, 2)
        images.append(Image8(pixels, boxes, labels, [[diamond] for diamond in diamonds]))
    seeds = random.randint(0, 1 << 31, config.batch_size).astype(np.int64)
    made = assembled(images, shape, seeds, config)
    more = max(0, edges - len(made.edges))
    padded = made._replace(
        edges=torch.nn.functional.pad(made.edges, (0, 0, 0, more)),
        polygons=torch.nn.functional.pad(made.polygons, (0, more)),
    )
    return padded.to(device)
