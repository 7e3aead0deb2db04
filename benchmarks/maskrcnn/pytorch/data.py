"""Batches of images and objects: read, decoded, resized, flipped and padded in threads, in a seeded order.

Pillow decodes with libjpeg-turbo and releases the GIL, so threads are sufficient; for measurements see the README.
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
from benchmarks.maskrcnn.pytorch.operators import Outlines, make_outlines


class Batch(NamedTuple):
    images: torch.Tensor  # uint8 (B, 3, H, W), in channels_last
    sizes: torch.Tensor  # float32 (B, 2): width and height before the padding
    boxes: torch.Tensor  # float32 (B, G, 4): left, top, right, bottom in pixels
    labels: torch.Tensor  # int64 (B, G): 1 to C; 0 where no object is
    edges: torch.Tensor  # the objects' outlines: see operators.Outlines
    polygons: torch.Tensor
    offsets: torch.Tensor
    seeds: torch.Tensor  # int64 (B,): seeds for sampling

    @property
    def outlines(self) -> Outlines:
        return Outlines(self.edges, self.polygons, self.offsets)

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device, from pinned memory without waiting for it."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def pin_memory(self, device: torch.device) -> "Batch":
        """Move to pinned memory, for asynchronous copies to ``device``."""
        if device.type == "cpu":
            return self
        torch.cuda.set_device(device)  # for this thread, otherwise the process would get a context on the first GPU
        return Batch(*(tensor.pin_memory() for tensor in self))


class Image8(NamedTuple):
    """Decoded image with objects."""

    pixels: np.ndarray  # uint8 (h, w, 3)
    boxes: np.ndarray = np.zeros((0, 4), np.float32)
    labels: np.ndarray = np.zeros(0, np.int64)
    polygons: Sequence[List[np.ndarray]] = ()


def read_image(part: Part, position: int, size: Tuple[int, int], mirrored: bool, config: Config) -> np.ndarray:
    """Return an image as uint8 (h, w, 3), resized to ``size`` (width, height)."""
    with Image.open(part.path(position)) as opened:
        image = to_rgb(opened).resize(size, Image.BILINEAR)
    pixels = np.asarray(image)
    pixels = pixels[:, ::-1] if mirrored else pixels
    return pixels[:, :, ::-1] if config.bgr else pixels


def read_objects(part: Part, position: int, size: Tuple[int, int], mirrored: bool, config: Config) -> Image8:
    """Return an image's objects, without crowds, in pixels of the resized image; the pixels are empty.

    As in the submissions, objects without area after clipping are dropped, and with inclusive_corners a box's last
    pixel position is resized and flipped (BoxList).
    """
    first, last = int(part.offsets[position]), int(part.offsets[position + 1])
    numbers = [number for number in range(first, last) if not part.crowds[number]]
    scale = (np.array(size) / part.sizes[position]).astype(np.float32)
    boxes, edge = np.asarray(part.boxes[numbers], dtype=np.float32).reshape(-1, 4), np.float32(config.edge)
    ltrb = np.concatenate((boxes[:, :2], boxes[:, :2] + (boxes[:, 2:] - edge).clip(0)), axis=1)
    ltrb = ltrb.clip(0, np.tile(part.sizes[position].astype(np.float32) - edge, 2)) * np.tile(scale, 2)
    polygons = [[points * scale for points in part.polygons(number)] for number in numbers]
    if mirrored:
        right = np.float32(size[0]) - edge
        ltrb = np.stack((right - ltrb[:, 2], ltrb[:, 1], right - ltrb[:, 0], ltrb[:, 3]), axis=1)
        polygons = [[np.stack((right - points[:, 0], points[:, 1]), 1) for points in outline] for outline in polygons]
    valid = np.flatnonzero((ltrb[:, 2] > ltrb[:, 0]) & (ltrb[:, 3] > ltrb[:, 1]))[: config.objects]
    ltrb[:, 2:] += edge
    labels = np.asarray(part.labels[numbers], dtype=np.int64)[valid]
    return Image8(np.zeros((0, 0, 3), np.uint8), ltrb[valid], labels, [polygons[number] for number in valid])


def collate(images: List[Image8], shape: order.Shape, seeds: np.ndarray, config: Config) -> Batch:
    """Pad images and objects to a batch. Images are padded with the mean colour, which is 0 after normalization."""
    count = len(images)
    pixels = np.empty((count, *shape, 3), dtype=np.uint8)
    pixels[:] = np.rint(np.clip(config.pixel_mean, 0, 255)).astype(np.uint8)
    boxes = np.zeros((count, config.objects, 4), dtype=np.float32)
    labels = np.zeros((count, config.objects), dtype=np.int64)
    polygons: List[List[torch.Tensor]] = []
    for number, image in enumerate(images):
        height, width, _ = image.pixels.shape
        pixels[number, :height, :width] = image.pixels
        boxes[number, : len(image.boxes)] = image.boxes
        labels[number, : len(image.labels)] = image.labels
        polygons += [
            [torch.from_numpy(np.ascontiguousarray(p)) for p in polygon_list] for polygon_list in image.polygons
        ]
        polygons += [[] for _ in range(config.objects - len(image.boxes))]
    sizes = np.array([image.pixels.shape[1::-1] for image in images], dtype=np.float32).reshape(-1, 2)
    return Batch(
        torch.from_numpy(pixels).permute(0, 3, 1, 2),
        torch.from_numpy(sizes),
        torch.from_numpy(boxes),
        torch.from_numpy(labels),
        *make_outlines(polygons),
        torch.from_numpy(seeds),
    )


class Orders:
    """Batches of this rank by epoch, computed only from the sizes of the training images."""

    def __init__(self, config: Config, part: Part, ranks: Ranks) -> None:
        self.config, self.part, self._ranks = config, part, ranks
        self.resized = order.resize(np.asarray(part.sizes), config.short_side, config.long_side)
        self.shapes = order.shapes(self.resized, config.short_side, config.long_side, config.bucket_step)
        self.size = config.batch_size * ranks.size
        self.of_epoch: Callable[[int], List[order.ImageBatch]] = lru_cache(maxsize=2)(self._of_epoch)

        self.steps = -(-len(part.with_objects) // self.size)  # steps per epoch, the same on all ranks

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
    """Read this rank's images for a step, into pinned memory if the device is a GPU."""
    config, part = orders.config, orders.part
    epoch, number = divmod(step, orders.steps)
    batch = orders.of_epoch(epoch)[number]
    random = np.random.RandomState([config.seed & 0xFFFFFFFF, 1, step])
    local = slice(ranks.rank * config.batch_size, (ranks.rank + 1) * config.batch_size)
    flip_values = random.random_sample(orders.size)[local]
    seeds = random.randint(0, 1 << 31, orders.size)[local]
    images = []
    for position, value in zip(batch.positions.tolist(), flip_values):
        size, mirrored = tuple(orders.resized[position].tolist()), bool(value < config.flip)
        objects = read_objects(part, position, size, mirrored, config)
        images.append(objects._replace(pixels=read_image(part, position, size, mirrored, config)))
    return collate(images, batch.shape, seeds.astype(np.int64), config).pin_memory(ranks.context)


class EvaluationBatch(NamedTuple):
    """A rank's images for evaluation; images after ``positions`` are padding."""

    images: torch.Tensor
    sizes: torch.Tensor
    positions: np.ndarray  # int64: of the images in ``data.val``


def evaluation_input(config: Config, data: DataSet, ranks: Ranks) -> Iterator[EvaluationBatch]:
    """Yield the batches of this rank, the same number on all ranks; every image is evaluated on one rank."""
    part = data.val
    sizes = order.resize(np.asarray(part.sizes), config.short_side, config.long_side)
    padded_shapes = order.shapes(sizes, config.short_side, config.long_side, config.bucket_step)

    def make(batch: order.ImageBatch) -> EvaluationBatch:
        local = batch.positions[ranks.rank :: ranks.size]
        fills = config.eval_batch_size - len(local) if config.device == "gpu" else int(len(local) == 0)
        read = np.concatenate((local, np.resize(batch.positions, fills)))
        images = [
            Image8(read_image(part, position, tuple(sizes[position].tolist()), False, config))
            for position in read.tolist()
        ]
        padded = collate(images, batch.shape, np.zeros(len(read), np.int64), config)
        return EvaluationBatch(padded.images, padded.sizes, local)

    listed = order.evaluation(padded_shapes, config.eval_batch_size * ranks.size)
    for item in read_ahead(make, listed, config.prefetch, config.threads):
        yield item._replace(images=item.images.to(ranks.context), sizes=item.sizes.to(ranks.context))


def synthetic_batch(
    config: Config, classes: int, shape: order.Shape, device: torch.device, objects: int = 7, edges: int = 0
) -> Batch:
    """Return a batch of noise with ``shape`` in the layout of real batches, with diamonds as objects.

    The batch has at least ``edges`` edges; additional edges belong to no object.
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
        (x0, y0), (x1, y1) = boxes[:, :2].T, boxes[:, 2:].T
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        diamonds = np.stack((x, y0, x1, y, x, y1, x0, y), 1).reshape(-1, 4, 2)
        images.append(Image8(pixels, boxes, labels, [[diamond] for diamond in diamonds]))
    seeds = random.randint(0, 1 << 31, config.batch_size).astype(np.int64)
    batch = collate(images, shape, seeds, config)
    missing = max(0, edges - len(batch.edges))
    padded = batch._replace(
        edges=torch.nn.functional.pad(batch.edges, (0, 0, 0, missing)),
        polygons=torch.nn.functional.pad(batch.polygons, (0, missing)),
    )
    return padded.to(device)
