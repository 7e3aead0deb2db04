"""What is made of sampled points, RoIAlign of a pyramid and masks of polygons, and which implementation a run uses.

Here are PyTorch's operators alone. The Triton kernels are in kernels.py; torchvision's operators are in NGC's images,
and never required. benchmarks/common/torch/kernels.py compares and chooses; what gives other values is not used.
"""

import importlib
import sys
from functools import lru_cache
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.detection.pytorch import operators as suppression
from benchmarks.detection.pytorch.boxes import Found, overlaps
from benchmarks.maskrcnn.pytorch import regions
from benchmarks.maskrcnn.pytorch.config import Config

# Bins of RoIAlign for the two heads, and pixels of a mask, in each direction
BOX_BINS, MASK_BINS, MASK_SIZE = 7, 14, 28
SAMPLES = 2  # points of a bin in each direction (POOLER_SAMPLING_RATIO)
# A RoI of 224 x 224 takes the level of stride 16 (arXiv 1612.03144, equation 1)
CANONICAL_SIZE, CANONICAL_LEVEL = 224, 4
FIRST_LEVEL, POOLED_LEVELS = 2, 4  # strides 4 to 32; the fifth level has proposals alone


def levels_of(rois: torch.Tensor, edge: float = 0.0) -> torch.Tensor:
    """Return the level int64 (...), 0 for stride 4, from which RoIs (..., 4) are pooled; ``edge``: see roi_align."""
    size = ((rois[..., 2] - rois[..., 0] + edge) * (rois[..., 3] - rois[..., 1] + edge)).clamp(min=0).sqrt()
    level = torch.floor(CANONICAL_LEVEL + torch.log2(size / CANONICAL_SIZE + 1e-6))
    return level.clamp(FIRST_LEVEL, FIRST_LEVEL + POOLED_LEVELS - 1).long() - FIRST_LEVEL


def match(objects: torch.Tensor, present: torch.Tensor, boxes: torch.Tensor, high: float, low: float) -> torch.Tensor:
    """Return the object int64 (B, N) of each of ``boxes`` (N, 4), which all images have; see regions.match.

    Args:
        objects: (B, G, 4).
        present: bool (B, G), which objects are there.
        boxes: the anchors.
        high: least overlap of a match, but for those that overlap an object most.
        low: least overlap that is not background.
    """
    return regions.match(overlaps(objects, boxes.unsqueeze(0)), present, high, low, rescue=True)


# -- RoIAlign -----------------------------------------------------------------------------------------


def roi_align(
    features: Sequence[torch.Tensor], rois: torch.Tensor, images: torch.Tensor, bins: int, edge: float = 0.0
) -> torch.Tensor:
    """Pool each RoI from its level: means of bilinear samples (arXiv 1703.06870, section 3).

    A bin of a RoI is a sum of 16 pixels with weights: four points, each between four pixels. That is a row of
    embedding_bag, whose table are the pixels of all levels, so that nothing larger than the result exists.

    Args:
        features: of strides 4, 8, 16, 32, each (B, C, h, w), best in channels_last.
        rois: (R, 4) in pixels of the images.
        images: int64 (R,), the image of each RoI.
        bins: of the result in each direction.
        edge: by which the boxes are larger to the right and bottom, whose area decides on the level: 1 where ``rois``
            are inclusive ones (LevelMapper of modeling/poolers.py).

    Returns:
        (R, C, bins, bins), in channels_last.
    """
    channels = features[0].shape[1]
    shapes = [(each.shape[2], each.shape[3]) for each in features]
    places, weights = taps(rois, placed(rois, images, len(features[0]), shapes, edge), bins)
    pooled = functional.embedding_bag(
        places.view(-1, places.shape[-1]),
        pixels(features),
        per_sample_weights=weights.view(-1, weights.shape[-1]).to(features[0].dtype),
        mode="sum",
    )
    return pooled.view(len(rois), bins, bins, channels).permute(0, 3, 1, 2)


def pixels(features: Sequence[torch.Tensor]) -> torch.Tensor:
    """(pixels, C): all pixels of ``features`` (B, C, h, w), one level after the other, image by image, row by row."""
    return torch.cat([each.permute(0, 2, 3, 1).reshape(-1, each.shape[1]) for each in features])


class Placed(NamedTuple):
    """Where RoIs are in the table of ``pixels``, each (R,)."""

    start: torch.Tensor  # int64: row of the first pixel of the RoI's level and image
    height: torch.Tensor  # int64: of the level
    width: torch.Tensor
    scale: torch.Tensor  # the level's pixels per pixel of the image


def placed(
    rois: torch.Tensor, images: torch.Tensor, batch: int, shapes: Sequence[Tuple[int, int]], edge: float
) -> Placed:
    """Return where ``rois`` (R, 4) are; ``shapes`` are (h, w) of the levels, of ``batch`` images each."""
    level = levels_of(rois, edge)
    heights, widths, starts = (each[level] for each in _layout(batch, tuple(shapes), rois.device))
    start = starts + images * heights * widths
    return Placed(start, heights, widths, 0.25 / (1 << level).to(rois.dtype))


@lru_cache(maxsize=None)
def _layout(batch: int, shapes: Tuple[Tuple[int, int], ...], device: torch.device) -> Tuple[torch.Tensor, ...]:
    """Heights, widths and first rows, int64 (levels,) each, of the levels in the table of ``pixels``.

    Kept, since a copy of numbers to a device waits for it and no graph can hold one; as few as there are shapes.
    """
    starts = [0]
    for height, width in shapes[:-1]:
        starts.append(starts[-1] + batch * height * width)
    heights, widths = zip(*shapes)
    return tuple(torch.tensor(each, device=device) for each in (heights, widths, starts))


def taps(rois: torch.Tensor, where: Placed, bins: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return rows int64 and weights, each (R, bins, bins, 16), of the table of ``pixels``."""
    y, of_y = _axis_taps(rois[:, 1] * where.scale, rois[:, 3] * where.scale, where.height, bins)
    x, of_x = _axis_taps(rois[:, 0] * where.scale, rois[:, 2] * where.scale, where.width, bins)
    rows = where.start[:, None, None] + y * where.width[:, None, None]
    places = rows[:, :, None, :, None] + x[:, None, :, None, :]
    weights = of_y[:, :, None, :, None] * of_x[:, None, :, None, :]
    return places.flatten(3), weights.flatten(3)


def _axis_taps(
    low: torch.Tensor, high: torch.Tensor, length: torch.Tensor, bins: int
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Pixels int64 and weights, each (R, bins, 4), of an axis: two points a bin, each between two pixels.

    As ROIAlign of maskrcnn_benchmark has it: a RoI is at least 1 wide, a point is at most 1 outside, pixel n is at n.
    """
    size = (high - low).clamp(min=1)
    fractions = (torch.arange(bins * SAMPLES, device=low.device, dtype=low.dtype) + 0.5) / (bins * SAMPLES)
    points = (low.unsqueeze(-1) + size.unsqueeze(-1) * fractions).view(low.shape[0], bins, SAMPLES)
    last = (length - 1)[..., None, None]
    outside = (points < -1) | (points > last + 1)
    points = torch.minimum(points.clamp(min=0), last.to(points.dtype))
    before = torch.minimum(points.long(), last)
    after = torch.minimum(before + 1, last)
    share = points - before
    weights = torch.stack((1 - share, share), dim=-1).masked_fill(outside.unsqueeze(-1), 0.0) / SAMPLES
    return torch.stack((before, after), dim=-1).flatten(-2), weights.flatten(-2)


# -- masks of polygons --------------------------------------------------------------------------------


class Outlines(NamedTuple):
    """Polygons of a batch's objects as edges, in pixels of the resized images."""

    # An object's polygons and their edges follow each other.
    edges: torch.Tensor  # float32 (E, 4): x, y of an edge's beginning and end
    polygons: torch.Tensor  # int32 (E,): number of the edge's polygon in its object, from 0
    offsets: torch.Tensor  # int64 (B * G + 1,): edges of the objects


def project_masks(outlines: Outlines, rois: torch.Tensor, objects: torch.Tensor, size: int) -> torch.Tensor:
    """Draw the objects' outlines in the grids of RoIs: a pixel is 1 where its middle is inside one of the polygons.

    A ray to the left of each middle counts the edges that it crosses: odd is inside. Each edge crosses the middle of
    some rows, and switches what is right of that point: one addition per edge and row, then sums along the rows.

    Args:
        outlines: of the batch.
        rois: (R, 4) in pixels.
        objects: int64 (R,), the object of each RoI; -1 gives zeros.
        size: pixels of the grid in each direction.

    Returns:
        bool (R, size, size).
    """
    device, count = rois.device, len(rois)
    first = outlines.offsets[objects.clamp(min=0)]
    lengths = (outlines.offsets[objects.clamp(min=0) + 1] - first).masked_fill(objects < 0, 0)
    owner = torch.repeat_interleave(torch.arange(count, device=device), lengths)
    if not len(owner):
        return torch.zeros(count, size, size, dtype=torch.bool, device=device)
    edge = torch.arange(len(owner), device=device) - (lengths.cumsum(0) - lengths)[owner] + first[owner]
    corners, extent = rois[owner, :2], (rois[owner, 2:] - rois[owner, :2]).clamp(min=1)
    begins, ends = ((points - corners) / extent * size for points in outlines.edges[edge].split(2, 1))
    # Each pair of a RoI and a polygon has a plane of its own.
    polygon = outlines.polygons[edge].long()
    starts_plane = torch.ones_like(owner, dtype=torch.bool)
    starts_plane[1:] = (owner[1:] != owner[:-1]) | (polygon[1:] != polygon[:-1])
    plane = starts_plane.cumsum(0) - 1
    rows = torch.arange(size, device=device) + 0.5
    low = torch.minimum(begins[:, 1], ends[:, 1]).unsqueeze(1)
    high = torch.maximum(begins[:, 1], ends[:, 1]).unsqueeze(1)
    crosses = (low <= rows) & (rows < high)
    slope = (ends[:, 0] - begins[:, 0]) / (ends[:, 1] - begins[:, 1])
    x = begins[:, :1] + (rows - begins[:, 1:]) * slope.unsqueeze(1)
    which, row = crosses.nonzero(as_tuple=True)
    # The first pixel whose middle is not left of the crossing.
    column = (x[which, row] - 0.5).ceil().clamp(0, size).long()
    planes = starts_plane.sum()
    switches = torch.zeros(int(planes), size, size + 1, dtype=torch.int32, device=device)
    switches.index_put_((plane[which], row, column), torch.ones_like(column, dtype=torch.int32), accumulate=True)
    drawn = switches[..., :size].cumsum(-1) % 2
    result = torch.zeros(count, size, size, dtype=torch.int32, device=device)
    result.index_add_(0, owner[starts_plane], drawn.to(torch.int32))
    return result > 0


def outlines_of(objects: Sequence[Sequence[torch.Tensor]]) -> Outlines:
    """Return the edges of objects, each given by its polygons (points, 2)."""
    edges: List[torch.Tensor] = [torch.zeros(0, 4)]
    numbers: List[torch.Tensor] = [torch.zeros(0, dtype=torch.int32)]
    lengths = []
    for polygons in objects:
        lengths.append(sum(len(each) for each in polygons))
        for number, points in enumerate(polygons):
            edges.append(torch.cat((points, points.roll(-1, 0)), dim=1))
            numbers.append(torch.full((len(points),), number, dtype=torch.int32))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Outlines(torch.cat(edges), torch.cat(numbers), offsets)


# -- compared and chosen ------------------------------------------------------------------------------


def _align_example(
    align: Any, device: torch.device, dtype: torch.dtype, batch: int, rois: int, channels: int, side: int, bins: int
) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    levels = [
        torch.randn(batch, channels, side >> n, side >> n, generator=numbers, device=device)
        .to(dtype, memory_format=torch.channels_last)
        .requires_grad_()
        for n in range(POOLED_LEVELS)
    ]
    corner, size = (torch.rand(rois, 2, generator=numbers, device=device) * 4 * side for _ in range(2))
    boxes = torch.cat((corner - 8, corner + size * size / (4 * side) + 1), 1)
    images = torch.arange(rois, device=device) % batch
    gradient = torch.randn(rois, channels, bins, bins, generator=numbers, device=device).to(dtype)

    def call() -> kernels.Results:
        pooled = align(levels, boxes, images, bins)
        return [pooled.detach(), *torch.autograd.grad(pooled, levels, gradient)]

    return call


def _mask_example(
    project: Any, device: torch.device, dtype: torch.dtype, rois: int, points: int, size: int
) -> kernels.Call:
    numbers = torch.Generator().manual_seed(1)
    objects = []
    for polygons in (1, 2, 0, 1):
        outlines = [50 + 40 * torch.randn(points, 2, generator=numbers) for _ in range(polygons)]
        objects.append(outlines)
    drawn = Outlines(*(each.to(device) for each in outlines_of(objects)))
    corner = torch.rand(rois, 2, generator=numbers) * 60
    boxes = torch.cat((corner, corner + 3 + 70 * torch.rand(rois, 2, generator=numbers)), 1).to(device)
    which = (torch.arange(rois) % 5 - 1).to(device)
    return lambda: [project(drawn, boxes, which, size).to(dtype)]


def _match_example(
    match: Any, device: torch.device, dtype: torch.dtype, batch: int, objects: int, count: int
) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    made = []
    for shape in ((batch, objects, 2), (count, 2)):
        corner = torch.rand(*shape, generator=numbers, device=device) * 60
        made.append(torch.cat((corner, corner + 3 + 50 * torch.rand(*shape, generator=numbers, device=device)), -1))
    # One image has no object.
    present = torch.arange(objects, device=device) < torch.arange(batch, device=device).unsqueeze(1) * 3
    return lambda: [match(made[0], present, made[1], 0.7, 0.3).to(dtype)]


MODULE = "benchmarks.maskrcnn.pytorch.kernels"
OPERATORS: Dict[str, kernels.Operator] = {
    "matching": kernels.Operator(
        match,
        f"{MODULE}:match",
        _match_example,
        ({"batch": 3, "objects": 5, "count": 700}, {"batch": 2, "objects": 1, "count": 1}),
    ),
    "roi_align": kernels.Operator(
        roi_align,
        f"{MODULE}:roi_align",
        _align_example,
        (
            {"batch": 2, "rois": 7, "channels": 20, "side": 24, "bins": 3},
            {"batch": 1, "rois": 0, "channels": 16, "side": 8, "bins": 2},
        ),
    ),
    "project_masks": kernels.Operator(
        project_masks,
        f"{MODULE}:project_masks",
        _mask_example,
        ({"rois": 9, "points": 7, "size": 11}, {"rois": 0, "points": 3, "size": 4}),
    ),
}
EVERY = {**suppression.OPERATORS, **OPERATORS}


class Chosen(NamedTuple):
    names: Dict[str, str]
    suppress: suppression.Suppress = suppression.keep_of_groups
    match: Callable[..., torch.Tensor] = match
    roi_align: Callable[..., torch.Tensor] = roi_align
    project_masks: Callable[..., torch.Tensor] = project_masks
    detect: Callable[..., Found] = regions.detect


def torchvision_operators(found: Any) -> Dict[str, Any]:
    """Return the operators that the module ``found``, torchvision.ops, offers; empty where it is None."""
    if found is None:
        return {}

    def suppress(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
        group, place = alive.nonzero(as_tuple=True)
        # The order within a group is that of the scores; torchvision takes any number that falls.
        kept = found.batched_nms(boxes[group, place].float(), -place.float(), group, threshold)
        result = torch.zeros_like(alive)
        result[group[kept], place[kept]] = True
        return result

    def align(
        levels: Sequence[torch.Tensor], rois: torch.Tensor, images: torch.Tensor, bins: int, edge: float = 0.0
    ) -> torch.Tensor:
        level = levels_of(rois, edge)
        result = levels[0].new_zeros(len(rois), levels[0].shape[1], bins, bins)
        for number, feature in enumerate(levels):
            mine = (level == number).nonzero().squeeze(1)
            listed = torch.cat((images[mine].to(rois.dtype).unsqueeze(1), rois[mine]), 1).to(feature.dtype)
            scale = 0.25 / (1 << number)
            pooled = found.roi_align(feature, listed, bins, scale, SAMPLES, aligned=False)
            result = result.index_copy(0, mine, pooled.to(result.dtype))
        return result.contiguous(memory_format=torch.channels_last)

    return {"suppression": suppress, "roi_align": align}


def find_torchvision() -> Any:
    """Return the module torchvision.ops, or None where it is not installed or lacks its compiled part."""
    try:
        found = importlib.import_module("torchvision.ops")
        found.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    # Next to a PyTorch of another build it fails in many ways.
    except Exception:
        return None
    return found


def choose(config: Config, ranks: Ranks, saved: Mapping[str, str], found: Optional[Any] = None) -> Chosen:
    """Choose by measuring on the sizes of a step; ``saved`` is a checkpoint's choice, ``found`` torchvision.ops.

    Raises ValueError where torchvision's operators are wanted and are not there.
    """
    theirs = torchvision_operators(found or find_torchvision())
    torchvision = kernels.Library("torchvision", theirs, "torchvision is not installed, or not for this PyTorch")
    # A run may have begun when there were fewer operators.
    saved = {**dict.fromkeys(EVERY, "plain"), **saved} if saved else {}
    dtype = pytorch.DTYPES[config.precision]
    names, implementations = kernels.choose_with(
        torchvision, EVERY, config.kernels, ranks, dtype, sizes_of(config), saved
    )
    return Chosen(names, *(implementations[name] for name in EVERY))


def is_captured(chosen: Chosen, asked: Any, ranks: Ranks) -> bool:
    """Return whether a CUDA graph can hold a step with these operators: the others wait for the device.

    Raises ValueError where ``asked`` is true, and not "auto", and it cannot.
    """
    waiting = [f"{name} {kind}" for name, kind in chosen.names.items() if kind != "triton" and name != "matching"]
    if waiting and asked is True:
        raise choices.UnavailableError(
            f"cuda_graph=true needs the Triton kernels, and not {', '.join(waiting)}: set kernels=triton"
        )
    if waiting and ranks.rank == 0:
        print(f"cuda_graph=false, which is slower: {', '.join(waiting)}, which wait for the device", file=sys.stderr)
    choices.record("cuda_graph", not waiting)
    return not waiting


def sizes_of(config: Config) -> Dict[str, Mapping[str, Any]]:
    """Return the sizes of a training step, by operator."""
    groups = config.batch_size * len(config.anchor_sizes)
    rois = config.batch_size * config.rois_per_image
    side = max(32, config.short_side // 32 * 8)
    positive = max(1, int(rois * config.roi_fg_fraction))
    # The other four of the five levels have a third of the first one's.
    anchors = len(config.anchor_ratios) * config.short_side * config.long_side // 16 * 4 // 3
    align = {"batch": config.batch_size, "rois": rois, "channels": config.fpn_width, "side": side, "bins": BOX_BINS}
    return {
        "suppression": {"groups": groups, "count": config.rpn_pre_nms_top_n},
        "matching": {"batch": config.batch_size, "objects": config.objects, "count": anchors},
        "roi_align": align,
        "project_masks": {"rois": positive, "points": 40, "size": MASK_SIZE},
    }
