"""operators.py in Triton. Compiled for GPUs, run in Triton's interpreter and on an H200."""

from typing import Any, List, Sequence, Tuple

import torch
import triton
import triton.language as tl

from benchmarks.common.torch.kernels import OPTIONS, Specification, power_of_two
from benchmarks.detection.pytorch.kernels import _corners
from benchmarks.maskrcnn.pytorch.operators import SAMPLES, Outlines, pixels, placed

ALIGN_WARPS, DRAW_WARPS, MATCH_WARPS = 4, 4, 4
MATCH_BLOCK = 512  # boxes of a program


@triton.jit
def _axis(low, extent, step, length):
    # A point's two pixels, the share of the second, and whether the point is inside; see operators._axis_taps
    point = low + extent * step
    inside = (point >= -1) & (point <= length)
    point = tl.minimum(tl.maximum(point, 0.0), (length - 1).to(tl.float32))
    before = tl.minimum(point.to(tl.int32), length - 1)
    after = tl.minimum(before + 1, length - 1)
    return before, after, point - before.to(tl.float32), inside


@triton.jit
def _extent(rois, roi):
    # Left, top, width and height of a RoI, which is at least a pixel wide and high
    left, top, right, bottom = _corners(rois + roi * 4, True)
    return left, top, tl.maximum(right - left, 1.0), tl.maximum(bottom - top, 1.0)


@triton.jit
def _bin_of(rois, places, BINS: tl.constexpr):
    # The RoI of a program with its extent, the bin's row and column, and first pixel, height and width of the level
    program = tl.program_id(0).to(tl.int64)
    roi = program // (BINS * BINS)
    row, column = (program // BINS % BINS).to(tl.int32), (program % BINS).to(tl.int32)
    left, top, width, height = _extent(rois, roi)
    rows, columns = tl.load(places + roi * 3 + 1).to(tl.int32), tl.load(places + roi * 3 + 2).to(tl.int32)
    return program, row, column, left, top, width, height, tl.load(places + roi * 3), rows, columns


@triton.jit
def align_forward(
    table, rois, places, pooled, CHANNELS: tl.constexpr, BINS: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr
):
    """One bin of one RoI, all channels: the mean of its points, each between four pixels."""
    program, row, column, left, top, width, height, start, rows, columns = _bin_of(rois, places, BINS)
    channel = tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(SAMPLES):
        y0, y1, of_y, y_inside = _axis(top, height, (row * SAMPLES + i + 0.5) / (BINS * SAMPLES), rows)
        for j in tl.static_range(SAMPLES):
            x0, x1, of_x, x_inside = _axis(left, width, (column * SAMPLES + j + 0.5) / (BINS * SAMPLES), columns)
            share = tl.where(y_inside & x_inside, 1.0 / (SAMPLES * SAMPLES), 0.0)
            here = table + start * CHANNELS + channel
            a = tl.load(here + (y0 * columns + x0) * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(here + (y0 * columns + x1) * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            c = tl.load(here + (y1 * columns + x0) * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            d = tl.load(here + (y1 * columns + x1) * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            total += share * ((1 - of_y) * ((1 - of_x) * a + of_x * b) + of_y * ((1 - of_x) * c + of_x * d))
    tl.store(pooled + program * CHANNELS + channel, total.to(pooled.dtype.element_ty), mask=mask)


@triton.jit
def align_backward(
    of_table, rois, places, gradient, CHANNELS: tl.constexpr, BINS: tl.constexpr, SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One bin of one RoI: its gradient goes to the pixels of its points, in fp32 and in any order."""
    program, row, column, left, top, width, height, start, rows, columns = _bin_of(rois, places, BINS)
    channel = tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    given = tl.load(gradient + program * CHANNELS + channel, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(SAMPLES):
        y0, y1, of_y, y_inside = _axis(top, height, (row * SAMPLES + i + 0.5) / (BINS * SAMPLES), rows)
        for j in tl.static_range(SAMPLES):
            x0, x1, of_x, x_inside = _axis(left, width, (column * SAMPLES + j + 0.5) / (BINS * SAMPLES), columns)
            some = given * tl.where(y_inside & x_inside, 1.0 / (SAMPLES * SAMPLES), 0.0)
            here = of_table + start * CHANNELS + channel
            tl.atomic_add(
                here + (y0 * columns + x0) * CHANNELS, some * (1 - of_y) * (1 - of_x), mask=mask, sem="relaxed"
            )
            tl.atomic_add(here + (y0 * columns + x1) * CHANNELS, some * (1 - of_y) * of_x, mask=mask, sem="relaxed")
            tl.atomic_add(here + (y1 * columns + x0) * CHANNELS, some * of_y * (1 - of_x), mask=mask, sem="relaxed")
            tl.atomic_add(here + (y1 * columns + x1) * CHANNELS, some * of_y * of_x, mask=mask, sem="relaxed")


@triton.jit
def draw_masks(edges, polygons, offsets, rois, objects, drawn, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One RoI: count for each pixel's middle the edges to its left, polygon by polygon."""
    roi = tl.program_id(0).to(tl.int64)
    pixel = tl.arange(0, BLOCK)
    x = (pixel % SIZE).to(tl.float32) + 0.5
    y = (pixel // SIZE).to(tl.float32) + 0.5
    left, top, width, height = _extent(rois, roi)
    owner = tl.load(objects + roi)
    first = tl.load(offsets + tl.maximum(owner, 0))
    last = tl.where(owner < 0, first, tl.load(offsets + tl.maximum(owner, 0) + 1))
    inside = tl.zeros([BLOCK], tl.int32)
    parity = tl.zeros([BLOCK], tl.int32)
    current = tl.zeros([], tl.int32)
    for edge in range(first, last):
        number = tl.load(polygons + edge)
        inside = tl.where(number != current, inside | parity, inside)
        parity = tl.where(number != current, 0, parity)
        current = number
        x0 = (tl.load(edges + edge * 4) - left) / width * SIZE
        y0 = (tl.load(edges + edge * 4 + 1) - top) / height * SIZE
        x1 = (tl.load(edges + edge * 4 + 2) - left) / width * SIZE
        y1 = (tl.load(edges + edge * 4 + 3) - top) / height * SIZE
        # A level edge crosses no row, whatever its slope.
        slope = (x1 - x0) / tl.where(y1 == y0, 1.0, y1 - y0)
        crossing = x0 + (y - y0) * slope
        crosses = (tl.minimum(y0, y1) <= y) & (y < tl.maximum(y0, y1)) & (x >= crossing)
        parity = parity ^ crosses.to(tl.int32)
    inside = inside | parity
    tl.store(drawn + roi * (SIZE * SIZE) + pixel, inside.to(tl.uint8), mask=pixel < SIZE * SIZE)


@triton.jit
def _overlap(left, top, right, bottom, objects):
    # Intersection over union of boxes and one object, rounded as boxes.overlaps of benchmarks/detection does
    their_left, their_top, their_right, their_bottom = _corners(objects, True)
    width = tl.minimum(their_right, right) - tl.maximum(their_left, left)
    height = tl.minimum(their_bottom, bottom) - tl.maximum(their_top, top)
    both = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
    union = (their_right - their_left) * (their_bottom - their_top) + (right - left) * (bottom - top) - both
    return tl.div_rn(both, tl.maximum(union, 1.1754943508222875e-38))


@triton.jit
def most_of_objects(objects, present, boxes, most, count, OBJECTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest overlap of each object, as the bits of a float that is not below 0."""
    image = tl.program_id(1).to(tl.int64)
    box = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = box < count
    left, top, right, bottom = _corners(boxes + box * 4, mask)
    for number in range(OBJECTS):
        place = image * OBJECTS + number
        if tl.load(present + place) > 0:
            overlap = tl.where(mask, _overlap(left, top, right, bottom, objects + place * 4), 0.0)
            tl.atomic_max(most + place, tl.max(overlap, axis=0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def match_boxes(
    objects, present, boxes, most, matched, count, high, low, OBJECTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The object of each box; see regions.match with ``rescue``."""
    image = tl.program_id(1).to(tl.int64)
    box = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = box < count
    left, top, right, bottom = _corners(boxes + box * 4, mask)
    best = tl.zeros([BLOCK], tl.float32) - 1.0
    which = tl.zeros([BLOCK], tl.int32)
    is_best = tl.zeros([BLOCK], tl.int32)
    for number in range(OBJECTS):
        place = image * OBJECTS + number
        if tl.load(present + place) > 0:
            overlap = _overlap(left, top, right, bottom, objects + place * 4)
            is_best = is_best | (overlap == tl.load(most + place).to(tl.float32, bitcast=True)).to(tl.int32)
            which = tl.where(overlap > best, number, which)
            best = tl.maximum(best, overlap)
    found = tl.where(best < low, -1, tl.where(best < high, -2, which))
    found = tl.where(is_best > 0, which, found)
    tl.store(matched + image * count + box, found.to(tl.int64), mask=mask)


# -- launched -----------------------------------------------------------------------------------------


class _Align(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, rois: torch.Tensor, places: torch.Tensor, bins: int) -> torch.Tensor:
        channels = table.shape[1]
        ctx.constants = {"CHANNELS": channels, "BINS": bins, "SAMPLES": SAMPLES, "BLOCK": power_of_two(channels)}
        ctx.save_for_backward(rois, places)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        pooled = table.new_empty(len(rois), bins, bins, channels)
        if len(rois):
            align_forward[(len(rois) * bins * bins,)](
                table.contiguous(), rois, places, pooled, **ctx.constants, num_warps=ALIGN_WARPS, **OPTIONS
            )
        return pooled

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None, None]:
        rois, places = ctx.saved_tensors
        of_table = torch.zeros(ctx.shape, dtype=torch.float32, device=rois.device)
        bins = ctx.constants["BINS"]
        if len(rois):
            align_backward[(len(rois) * bins * bins,)](
                of_table, rois, places, gradients[0].contiguous(), **ctx.constants, num_warps=ALIGN_WARPS, **OPTIONS
            )
        return of_table.to(ctx.dtype), None, None, None


def roi_align(
    features: Sequence[torch.Tensor], rois: torch.Tensor, images: torch.Tensor, bins: int, edge: float = 0.0
) -> torch.Tensor:
    where = placed(rois, images, len(features[0]), [(each.shape[2], each.shape[3]) for each in features], edge)
    scaled = (rois * where.scale.unsqueeze(1)).float().contiguous()
    places = torch.stack((where.start, where.height, where.width), 1).contiguous()
    return _Align.apply(pixels(features), scaled, places, bins).permute(0, 3, 1, 2)


def project_masks(outlines: Outlines, rois: torch.Tensor, objects: torch.Tensor, size: int) -> torch.Tensor:
    drawn = torch.zeros(len(rois), size, size, dtype=torch.uint8, device=rois.device)
    if len(rois) and len(outlines.edges):
        draw_masks[(len(rois),)](
            outlines.edges.contiguous(), outlines.polygons, outlines.offsets, rois.float().contiguous(), objects, drawn,
            SIZE=size, BLOCK=power_of_two(size * size), num_warps=DRAW_WARPS, **OPTIONS,
        )  # fmt: skip
    return drawn.bool()


def match(objects: torch.Tensor, present: torch.Tensor, boxes: torch.Tensor, high: float, low: float) -> torch.Tensor:
    batch, count = len(objects), len(boxes)
    matched = torch.empty(batch, count, dtype=torch.int64, device=boxes.device)
    most = torch.zeros(batch, objects.shape[1], dtype=torch.int32, device=boxes.device)
    if not matched.numel():
        return matched
    given = (objects.contiguous(), present.to(torch.uint8), boxes.contiguous(), most)
    sizes = {"OBJECTS": objects.shape[1], "BLOCK": MATCH_BLOCK, "num_warps": MATCH_WARPS}
    grid = (triton.cdiv(count, MATCH_BLOCK), batch)
    # Both kernels compute the overlaps, which have to be equal: nothing rounds once that would round twice elsewhere.
    most_of_objects[grid](*given, count, **sizes, enable_fp_fusion=False)
    match_boxes[grid](*given, matched, count, high, low, **sizes, enable_fp_fusion=False)
    return matched


def specifications() -> List[Specification]:
    """Every kernel at the sizes of the submissions, in each type of the activations."""
    found = []
    for variant in ("fp16", "bf16", "fp32"):
        sizes = {"CHANNELS": 256, "BINS": 7, "SAMPLES": SAMPLES, "BLOCK": 256}
        inputs = {"rois": "*fp32", "places": "*i64"}
        forward = {"table": f"*{variant}", **inputs, "pooled": f"*{variant}", **sizes}
        backward = {"of_table": "*fp32", **inputs, "gradient": f"*{variant}", **sizes}
        found.append(Specification(align_forward, variant, forward, ALIGN_WARPS))
        found.append(Specification(align_backward, variant, backward, ALIGN_WARPS))
    outline = {"edges": "*fp32", "polygons": "*i32", "offsets": "*i64"}
    arguments = {**outline, "rois": "*fp32", "objects": "*i64", "drawn": "*u8", "SIZE": 28, "BLOCK": 1024}
    given = {"objects": "*fp32", "present": "*u8", "boxes": "*fp32", "most": "*i32"}
    sizes = {"OBJECTS": 100, "BLOCK": MATCH_BLOCK}
    written = {"matched": "*i64", "count": "i32", "high": "fp32", "low": "fp32"}
    return [
        *found,
        Specification(draw_masks, "fp32", arguments, DRAW_WARPS),
        Specification(most_of_objects, "fp32", {**given, "count": "i32", **sizes}, MATCH_WARPS),
        Specification(match_boxes, "fp32", {**given, **written, **sizes}, MATCH_WARPS),
    ]
