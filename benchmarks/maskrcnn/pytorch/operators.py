"""RoIAlign on a pyramid, masks from polygons, matching of anchors, and the choice of implementations.

This file has the PyTorch implementations. Triton kernels are in kernels.py; torchvision's operators are part of NGC
images and optional. benchmarks/common/torch/kernels.py compares implementations, rejects wrong ones and selects.
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
from benchmarks.detection.pytorch.boxes import DetectedBoxes, overlaps
from benchmarks.maskrcnn.pytorch import regions
from benchmarks.maskrcnn.pytorch.config import Config

# Bins per side of RoIAlign for the two heads, and mask pixels per side
BOX_BINS, MASK_BINS, MASK_SIZE = 7, 14, 28
SAMPLES = 2  # sampling points per bin side (POOLER_SAMPLING_RATIO)
# A RoI of 224 x 224 is pooled from the level of stride 16 (arXiv 1612.03144, equation 1)
CANONICAL_SIZE, CANONICAL_LEVEL = 224, 4
FIRST_LEVEL, POOLED_LEVELS = 2, 4  # strides 4 to 32; the fifth level is only used for proposals


def levels_of(rois: torch.Tensor, edge: float = 0.0) -> torch.Tensor:
    """Return the level int64 (...), 0 for stride 4, from which RoIs (..., 4) are pooled; ``edge``: see roi_align."""
    size = ((rois[..., 2] - rois[..., 0] + edge) * (rois[..., 3] - rois[..., 1] + edge)).clamp(min=0).sqrt()
    level = torch.floor(CANONICAL_LEVEL + torch.log2(size / CANONICAL_SIZE + 1e-6))
    return level.clamp(FIRST_LEVEL, FIRST_LEVEL + POOLED_LEVELS - 1).long() - FIRST_LEVEL


def match(
    objects: torch.Tensor, present: torch.Tensor, boxes: torch.Tensor, fg_iou: float, bg_iou: float
) -> torch.Tensor:
    """Return the object int64 (B, N) per box of ``boxes`` (N, 4), which are shared by all images; see regions.match.

    Args:
        objects: (B, G, 4).
        present: bool (B, G): False for padding.
        boxes: the anchors.
        fg_iou: minimum IoU for a match, except for an object's best boxes.
        bg_iou: IoU below which a box is background.
    """
    return regions.match(overlaps(objects, boxes.unsqueeze(0)), present, fg_iou, bg_iou, allow_low_quality=True)


# -- RoIAlign -----------------------------------------------------------------------------------------


def roi_align(
    features: Sequence[torch.Tensor], rois: torch.Tensor, images: torch.Tensor, bins: int, edge: float = 0.0
) -> torch.Tensor:
    """Pool RoIs from their pyramid levels: means of bilinear samples (arXiv 1703.06870, section 3).

    A bin is a weighted sum of 16 pixels: four points between four pixels each. This is a row of embedding_bag with
    the pixels of all levels as the table, so that no tensor is larger than the result.

    Args:
        features: strides 4, 8, 16, 32, (B, C, h, w), preferably channels_last.
        rois: (R, 4) in pixels of the images.
        images: int64 (R,), the image of every RoI.
        bins: bins per side.
        edge: added to width and height to select the level: 1 if ``rois`` have inclusive corners (LevelMapper of
            modeling/poolers.py).

    Returns:
        (R, C, bins, bins), in channels_last.
    """
    channels = features[0].shape[1]
    shapes = [(feature.shape[2], feature.shape[3]) for feature in features]
    rows, weights = sampling_points(rois, locate_rois(rois, images, len(features[0]), shapes, edge), bins)
    pooled = functional.embedding_bag(
        rows.view(-1, rows.shape[-1]),
        pixels(features),
        per_sample_weights=weights.view(-1, weights.shape[-1]).to(features[0].dtype),
        mode="sum",
    )
    return pooled.view(len(rois), bins, bins, channels).permute(0, 3, 1, 2)


def pixels(features: Sequence[torch.Tensor]) -> torch.Tensor:
    """(pixels, C): all pixels of ``features`` (B, C, h, w), one level after the other, image by image, row by row."""
    return torch.cat([feature.permute(0, 2, 3, 1).reshape(-1, feature.shape[1]) for feature in features])


class RoiLocations(NamedTuple):
    """Position of RoIs in the table of ``pixels``, shape (R,)."""

    start: torch.Tensor  # int64: row of the first pixel of the RoI's level and image
    height: torch.Tensor  # int64: of the level
    width: torch.Tensor
    scale: torch.Tensor  # the level's pixels per pixel of the image


def locate_rois(
    rois: torch.Tensor, images: torch.Tensor, batch: int, shapes: Sequence[Tuple[int, int]], edge: float
) -> RoiLocations:
    """Return the locations of ``rois`` (R, 4); ``shapes`` are (h, w) of the levels, which have ``batch`` images."""
    level = levels_of(rois, edge)
    heights, widths, starts = (values[level] for values in _layout(batch, tuple(shapes), rois.device))
    start = starts + images * heights * widths
    return RoiLocations(start, heights, widths, 0.25 / (1 << level).to(rois.dtype))


@lru_cache(maxsize=None)
def _layout(batch: int, shapes: Tuple[Tuple[int, int], ...], device: torch.device) -> Tuple[torch.Tensor, ...]:
    """Return heights, widths and first rows, int64 (levels,), of the levels in the table of ``pixels``.

    Cached per shape, since a copy from the host synchronizes and cannot be captured in a CUDA graph.
    """
    starts = [0]
    for height, width in shapes[:-1]:
        starts.append(starts[-1] + batch * height * width)
    heights, widths = zip(*shapes)
    return tuple(torch.tensor(values, device=device) for values in (heights, widths, starts))


def sampling_points(rois: torch.Tensor, location: RoiLocations, bins: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return row indices int64 and weights, both (R, bins, bins, 16), in the table of ``pixels``."""
    y, of_y = _axis_points(rois[:, 1] * location.scale, rois[:, 3] * location.scale, location.height, bins)
    x, of_x = _axis_points(rois[:, 0] * location.scale, rois[:, 2] * location.scale, location.width, bins)
    rows = location.start[:, None, None] + y * location.width[:, None, None]
    indices = rows[:, :, None, :, None] + x[:, None, :, None, :]
    weights = of_y[:, :, None, :, None] * of_x[:, None, :, None, :]
    return indices.flatten(3), weights.flatten(3)


def _axis_points(
    start: torch.Tensor, end: torch.Tensor, length: torch.Tensor, bins: int
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return pixels int64 and weights, both (R, bins, 4), along an axis: two points per bin between two pixels each.

    As ROIAlign of maskrcnn_benchmark: the minimum RoI size is 1, points may be up to 1 outside, pixel n is at n.
    """
    size = (end - start).clamp(min=1)
    fractions = (torch.arange(bins * SAMPLES, device=start.device, dtype=start.dtype) + 0.5) / (bins * SAMPLES)
    points = (start.unsqueeze(-1) + size.unsqueeze(-1) * fractions).view(start.shape[0], bins, SAMPLES)
    last = (length - 1)[..., None, None]
    outside = (points < -1) | (points > last + 1)
    points = torch.minimum(points.clamp(min=0), last.to(points.dtype))
    lower = torch.minimum(points.long(), last)
    upper = torch.minimum(lower + 1, last)
    share = points - lower
    weights = torch.stack((1 - share, share), dim=-1).masked_fill(outside.unsqueeze(-1), 0.0) / SAMPLES
    return torch.stack((lower, upper), dim=-1).flatten(-2), weights.flatten(-2)


# -- masks of polygons --------------------------------------------------------------------------------


class Outlines(NamedTuple):
    """Polygons of the objects in a batch as edges, in pixels of the resized images."""

    # Edges are grouped by object and polygon.
    edges: torch.Tensor  # float32 (E, 4): x, y of start and end
    polygons: torch.Tensor  # int32 (E,): index of the polygon in the object
    offsets: torch.Tensor  # int64 (B * G + 1,): edges of the objects


def project_masks(outlines: Outlines, rois: torch.Tensor, objects: torch.Tensor, size: int) -> torch.Tensor:
    """Rasterize objects in the grids of RoIs: a pixel is 1 if its centre is inside a polygon.

    A ray from every centre to the left counts crossed edges: an odd number means inside. An edge crosses the centre
    line of some rows and toggles all pixels right of the crossing: one addition per edge and row, then a cumulative
    sum.

    Args:
        outlines: of the batch.
        rois: (R, 4) in pixels.
        objects: int64 (R,), the object of every RoI; -1 returns zeros.
        size: pixels per side of the grid.

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
    # One plane per pair of RoI and polygon
    polygon = outlines.polygons[edge].long()
    starts_plane = torch.ones_like(owner, dtype=torch.bool)
    starts_plane[1:] = (owner[1:] != owner[:-1]) | (polygon[1:] != polygon[:-1])
    plane = starts_plane.cumsum(0) - 1
    rows = torch.arange(size, device=device) + 0.5
    y_min = torch.minimum(begins[:, 1], ends[:, 1]).unsqueeze(1)
    y_max = torch.maximum(begins[:, 1], ends[:, 1]).unsqueeze(1)
    crosses = (y_min <= rows) & (rows < y_max)
    slope = (ends[:, 0] - begins[:, 0]) / (ends[:, 1] - begins[:, 1])
    x = begins[:, :1] + (rows - begins[:, 1:]) * slope.unsqueeze(1)
    edge_index, row = crosses.nonzero(as_tuple=True)
    # First pixel with a centre at or right of the crossing
    column = (x[edge_index, row] - 0.5).ceil().clamp(0, size).long()
    planes = starts_plane.sum()
    switches = torch.zeros(int(planes), size, size + 1, dtype=torch.int32, device=device)
    switches.index_put_((plane[edge_index], row, column), torch.ones_like(column, dtype=torch.int32), accumulate=True)
    filled = switches[..., :size].cumsum(-1) % 2
    result = torch.zeros(count, size, size, dtype=torch.int32, device=device)
    result.index_add_(0, owner[starts_plane], filled.to(torch.int32))
    return result > 0


def make_outlines(objects: Sequence[Sequence[torch.Tensor]]) -> Outlines:
    """Return the edges of objects, which are lists of polygons (points, 2)."""
    edges: List[torch.Tensor] = [torch.zeros(0, 4)]
    numbers: List[torch.Tensor] = [torch.zeros(0, dtype=torch.int32)]
    lengths = []
    for polygons in objects:
        lengths.append(sum(len(polygon) for polygon in polygons))
        for number, points in enumerate(polygons):
            edges.append(torch.cat((points, points.roll(-1, 0)), dim=1))
            numbers.append(torch.full((len(points),), number, dtype=torch.int32))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Outlines(torch.cat(edges), torch.cat(numbers), offsets)


# -- compared and chosen ------------------------------------------------------------------------------


def _align_example(
    align: Any, device: torch.device, dtype: torch.dtype, batch: int, rois: int, channels: int, side: int, bins: int
) -> kernels.Call:
    generator = torch.Generator(device).manual_seed(1)
    levels = [
        torch.randn(batch, channels, side >> n, side >> n, generator=generator, device=device)
        .to(dtype, memory_format=torch.channels_last)
        .requires_grad_()
        for n in range(POOLED_LEVELS)
    ]
    corner, size = (torch.rand(rois, 2, generator=generator, device=device) * 4 * side for _ in range(2))
    boxes = torch.cat((corner - 8, corner + size * size / (4 * side) + 1), 1)
    images = torch.arange(rois, device=device) % batch
    gradient = torch.randn(rois, channels, bins, bins, generator=generator, device=device).to(dtype)

    def call() -> kernels.Results:
        pooled = align(levels, boxes, images, bins)
        return [pooled.detach(), *torch.autograd.grad(pooled, levels, gradient)]

    return call


def _mask_example(
    project: Any, device: torch.device, dtype: torch.dtype, rois: int, points: int, size: int
) -> kernels.Call:
    generator = torch.Generator().manual_seed(1)
    objects = []
    for polygons in (1, 2, 0, 1):
        outlines = [50 + 40 * torch.randn(points, 2, generator=generator) for _ in range(polygons)]
        objects.append(outlines)
    polygons_on_device = Outlines(*(tensor.to(device) for tensor in make_outlines(objects)))
    corner = torch.rand(rois, 2, generator=generator) * 60
    boxes = torch.cat((corner, corner + 3 + 70 * torch.rand(rois, 2, generator=generator)), 1).to(device)
    roi_objects = (torch.arange(rois) % 5 - 1).to(device)
    return lambda: [project(polygons_on_device, boxes, roi_objects, size).to(dtype)]


def _match_example(
    match: Any, device: torch.device, dtype: torch.dtype, batch: int, objects: int, count: int
) -> kernels.Call:
    generator = torch.Generator(device).manual_seed(1)
    box_sets = []
    for shape in ((batch, objects, 2), (count, 2)):
        corner = torch.rand(*shape, generator=generator, device=device) * 60
        box_sets.append(
            torch.cat((corner, corner + 3 + 50 * torch.rand(*shape, generator=generator, device=device)), -1)
        )
    # The first image is without objects.
    present = torch.arange(objects, device=device) < torch.arange(batch, device=device).unsqueeze(1) * 3
    return lambda: [match(box_sets[0], present, box_sets[1], 0.7, 0.3).to(dtype)]


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
            {"batch": 2, "rois": 6, "channels": 20, "side": 24, "bins": 2},
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
ALL_OPERATORS = {**suppression.OPERATORS, **OPERATORS}


class OperatorSet(NamedTuple):
    names: Dict[str, str]
    suppress: suppression.Suppress = suppression.nms_mask
    match: Callable[..., torch.Tensor] = match
    roi_align: Callable[..., torch.Tensor] = roi_align
    project_masks: Callable[..., torch.Tensor] = project_masks
    detect: Callable[..., DetectedBoxes] = regions.detect


def torchvision_operators(ops: Any) -> Dict[str, Any]:
    """Return the operators in ``ops``, the module torchvision.ops, by name; empty if it is None."""
    if ops is None:
        return {}

    def suppress(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
        group, slot = alive.nonzero(as_tuple=True)
        # Boxes are sorted by score within groups; torchvision needs any descending number.
        positions = ops.batched_nms(boxes[group, slot].float(), -slot.float(), group, threshold)
        result = torch.zeros_like(alive)
        result[group[positions], slot[positions]] = True
        return result

    def align(
        levels: Sequence[torch.Tensor], rois: torch.Tensor, images: torch.Tensor, bins: int, edge: float = 0.0
    ) -> torch.Tensor:
        level = levels_of(rois, edge)
        result = levels[0].new_zeros(len(rois), levels[0].shape[1], bins, bins)
        for number, feature in enumerate(levels):
            selected = (level == number).nonzero().squeeze(1)
            listed = torch.cat((images[selected].to(rois.dtype).unsqueeze(1), rois[selected]), 1).to(feature.dtype)
            scale = 0.25 / (1 << number)
            pooled = ops.roi_align(feature, listed, bins, scale, SAMPLES, aligned=False)
            result = result.index_copy(0, selected, pooled.to(result.dtype))
        return result.contiguous(memory_format=torch.channels_last)

    return {"suppression": suppress, "roi_align": align}


def find_torchvision() -> Any:
    """Return the module torchvision.ops, or None if it, or its compiled extension, is not available."""
    try:
        ops = importlib.import_module("torchvision.ops")
        ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    # A torchvision for another PyTorch build fails in many ways.
    except Exception:
        return None
    return ops


def choose(config: Config, ranks: Ranks, saved: Mapping[str, str], ops: Optional[Any] = None) -> OperatorSet:
    """Select implementations by measuring at the step's sizes.

    ``saved``: choice in a checkpoint; ``ops``: torchvision.ops. Raises ValueError if torchvision is requested but
    missing.
    """
    torchvision_ops = torchvision_operators(ops or find_torchvision())
    torchvision = kernels.Library(
        "torchvision", torchvision_ops, "torchvision is not installed, or not for this PyTorch"
    )
    # The run may have started with a version with fewer operators.
    saved = {**dict.fromkeys(ALL_OPERATORS, "plain"), **saved} if saved else {}
    dtype = pytorch.DTYPES[config.precision]
    names, implementations = kernels.choose_with(
        torchvision, ALL_OPERATORS, config.kernels, ranks, dtype, sizes_of(config), saved
    )
    return OperatorSet(names, *(implementations[name] for name in ALL_OPERATORS))


def is_captured(operators: OperatorSet, requested: Any, ranks: Ranks) -> bool:
    """Return whether a step with these operators can be captured: other implementations synchronize with the device.

    Raises ValueError if ``requested`` is True (not "auto") and capturing is not possible.
    """
    synchronizing = [
        f"{name} {kind}" for name, kind in operators.names.items() if kind != "triton" and name != "matching"
    ]
    if synchronizing and requested is True:
        raise choices.UnavailableError(
            f"cuda_graph=true needs the Triton kernels, and not {', '.join(synchronizing)}: set kernels=triton"
        )
    if synchronizing and ranks.rank == 0:
        print(
            f"cuda_graph=false, which is slower: {', '.join(synchronizing)}, which wait for the device", file=sys.stderr
        )
    choices.record("cuda_graph", not synchronizing)
    return not synchronizing


def sizes_of(config: Config) -> Dict[str, Mapping[str, Any]]:
    """Return the sizes in a training step by operator."""
    groups = config.batch_size * len(config.anchor_sizes)
    rois = config.batch_size * config.rois_per_image
    size = max(32, config.short_side // 32 * 8)
    positive = max(1, int(rois * config.roi_fg_fraction))
    # The other four of the five levels have a third of the first one's.
    anchors = len(config.anchor_ratios) * config.short_side * config.long_side // 16 * 4 // 3
    align = {"batch": config.batch_size, "rois": rois, "channels": config.fpn_width, "side": size, "bins": BOX_BINS}
    return {
        "suppression": {"groups": groups, "count": config.rpn_pre_nms_top_n},
        "matching": {"batch": config.batch_size, "objects": config.objects, "count": anchors},
        "roi_align": align,
        "project_masks": {"rois": positive, "points": 40, "size": MASK_SIZE},
    }
