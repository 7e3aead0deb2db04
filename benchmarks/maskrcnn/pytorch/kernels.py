"""operators.py in Triton. Compiled for GPUs, run in Triton's interpreter and on an H200, except for align_backward."""

from typing import Any, Dict, List, Sequence, Tuple

import torch
import triton
import triton.language as tl

from benchmarks.common.torch.kernels import OPTIONS, Specification, power_of_two
from benchmarks.detection.pytorch.kernels import _corners
from benchmarks.maskrcnn.pytorch.operators import BOX_BINS, MASK_BINS, SAMPLES, Outlines, locate_rois, pixels

ALIGN_WARPS, DRAW_WARPS, MATCH_WARPS = 4, 4, 4
ALIGN_PARTS = 8  # programs per RoI in the backward pass: most RoIs have 14 to 28 pixels per side on their level
MATCH_BLOCK = 512  # boxes per program


@triton.jit
def _axis(start, extent, step, length):
    # Return a point's two neighbouring pixels, the weight of the second, and whether the point is inside; see
    # operators._axis_points
    point = start + extent * step
    is_inside = (point >= -1) & (point <= length)
    point = tl.minimum(tl.maximum(point, 0.0), (length - 1).to(tl.float32))
    lower = tl.minimum(point.to(tl.int32), length - 1)
    upper = tl.minimum(lower + 1, length - 1)
    return lower, upper, point - lower.to(tl.float32), is_inside


@triton.jit
def _extent(rois, roi):
    # RoI left, top, width and height; width and height are at least 1 pixel
    x0, y0, x1, y1 = _corners(rois + roi * 4, True)
    return x0, y0, tl.maximum(x1 - x0, 1.0), tl.maximum(y1 - y0, 1.0)


@triton.jit
def _bin_of(rois, levels, BINS: tl.constexpr):
    # A program's RoI with extent, row and column of the bin, and first pixel, height and width of the level
    program = tl.program_id(0).to(tl.int64)
    roi = program // (BINS * BINS)
    row, column = (program // BINS % BINS).to(tl.int32), (program % BINS).to(tl.int32)
    x_min, y_min, width, height = _extent(rois, roi)
    rows, columns = tl.load(levels + roi * 3 + 1).to(tl.int32), tl.load(levels + roi * 3 + 2).to(tl.int32)
    return program, row, column, x_min, y_min, width, height, tl.load(levels + roi * 3), rows, columns


@triton.jit
def align_forward(
    table, rois, levels, pooled, CHANNELS: tl.constexpr, BINS: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr
):
    """Process a RoI bin, all channels: the mean of bilinear samples."""
    program, row, column, x_min, y_min, width, height, start, rows, columns = _bin_of(rois, levels, BINS)
    channel = tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(SAMPLES):
        y0, y1, of_y, y_inside = _axis(y_min, height, (row * SAMPLES + i + 0.5) / (BINS * SAMPLES), rows)
        for j in tl.static_range(SAMPLES):
            x0, x1, of_x, x_inside = _axis(x_min, width, (column * SAMPLES + j + 0.5) / (BINS * SAMPLES), columns)
            weight = tl.where(y_inside & x_inside, 1.0 / (SAMPLES * SAMPLES), 0.0)
            base = table + start * CHANNELS + channel
            a = tl.load(base + (y0 * columns + x0) * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(base + (y0 * columns + x1) * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            c = tl.load(base + (y1 * columns + x0) * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            d = tl.load(base + (y1 * columns + x1) * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            total += weight * ((1 - of_y) * ((1 - of_x) * a + of_x * b) + of_y * ((1 - of_x) * c + of_x * d))
    tl.store(pooled + program * CHANNELS + channel, total.to(pooled.dtype.element_ty), mask=mask)


@triton.jit
def _share(start, extent, length, pixel, bin, BINS: tl.constexpr, SAMPLES: tl.constexpr):
    # Weight of a pixel of one axis in the mean of a bin
    total = 0.0
    for i in tl.static_range(SAMPLES):
        lower, upper, of_upper, is_inside = _axis(start, extent, (bin * SAMPLES + i + 0.5) / (BINS * SAMPLES), length)
        weight = tl.where(lower == pixel, 1 - of_upper, 0.0) + tl.where(upper == pixel, of_upper, 0.0)
        total += tl.where(is_inside & (bin < BINS), weight / SAMPLES, 0.0)
    return total


@triton.jit
def align_backward(
    grad_table, rois, levels, gradient, CHANNELS: tl.constexpr, BINS: tl.constexpr, SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Process every PARTS-th pixel row of a RoI: sum the bins' gradients per pixel, then add them, in fp32 and in any
    order.

    One addition per pixel instead of one per sampling point and neighbour, of which a bin has 16. The weights are a
    product of one factor per axis: the bins' rows are summed first, the columns are a matrix product.
    """
    roi = tl.program_id(0).to(tl.int64)
    x_min, y_min, width, height = _extent(rois, roi)
    start = tl.load(levels + roi * 3)
    rows, columns = tl.load(levels + roi * 3 + 1).to(tl.int32), tl.load(levels + roi * 3 + 2).to(tl.int32)
    first, last = 0.5 / (BINS * SAMPLES), 1 - 0.5 / (BINS * SAMPLES)
    top, _, _, _ = _axis(y_min, height, first, rows)
    _, bottom, _, _ = _axis(y_min, height, last, rows)
    left, _, _, _ = _axis(x_min, width, first, columns)
    _, right, _, _ = _axis(x_min, width, last, columns)
    channel, bin = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    mask = (channel < CHANNELS)[None, :]
    for y in range(top + tl.program_id(1), bottom + 1, PARTS):
        of_columns = tl.zeros([COLUMNS, BLOCK], tl.float32)
        covered = 0.0
        for row in range(BINS):
            weight = _share(y_min, height, rows, y, row, BINS, SAMPLES)
            covered += weight
            if weight > 0:
                upstream = gradient + ((roi * BINS + row) * BINS + bin[:, None]) * CHANNELS + channel[None, :]
                of_columns += weight * tl.load(upstream, mask=(bin < BINS)[:, None] & mask, other=0.0).to(tl.float32)
        if covered > 0:
            for x in range(left, right + 1, PIXELS):
                pixel = x + tl.arange(0, PIXELS)
                weights = _share(x_min, width, columns, pixel[:, None], bin[None, :], BINS, SAMPLES)
                sums = tl.dot(weights, of_columns, input_precision="tf32x3")
                target = grad_table + (start + y * columns + pixel[:, None]) * CHANNELS + channel[None, :]
                tl.atomic_add(target, sums, mask=(tl.sum(weights, axis=1) > 0)[:, None] & mask, sem="relaxed")


@triton.jit
def draw_masks(edges, polygons, offsets, rois, objects, masks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Process a RoI: for every pixel centre count the edges to the left, polygon by polygon."""
    roi = tl.program_id(0).to(tl.int64)
    pixel = tl.arange(0, BLOCK)
    x = (pixel % SIZE).to(tl.float32) + 0.5
    y = (pixel // SIZE).to(tl.float32) + 0.5
    x_min, y_min, width, height = _extent(rois, roi)
    owner = tl.load(objects + roi)
    first = tl.load(offsets + tl.maximum(owner, 0))
    last = tl.where(owner < 0, first, tl.load(offsets + tl.maximum(owner, 0) + 1))
    is_inside = tl.zeros([BLOCK], tl.int32)
    parity = tl.zeros([BLOCK], tl.int32)
    current = tl.zeros([], tl.int32)
    for edge in range(first, last):
        number = tl.load(polygons + edge)
        is_inside = tl.where(number != current, is_inside | parity, is_inside)
        parity = tl.where(number != current, 0, parity)
        current = number
        x0 = (tl.load(edges + edge * 4) - x_min) / width * SIZE
        y0 = (tl.load(edges + edge * 4 + 1) - y_min) / height * SIZE
        x1 = (tl.load(edges + edge * 4 + 2) - x_min) / width * SIZE
        y1 = (tl.load(edges + edge * 4 + 3) - y_min) / height * SIZE
        # A horizontal edge crosses no row, for any slope.
        slope = (x1 - x0) / tl.where(y1 == y0, 1.0, y1 - y0)
        crossing = x0 + (y - y0) * slope
        crosses = (tl.minimum(y0, y1) <= y) & (y < tl.maximum(y0, y1)) & (x >= crossing)
        parity = parity ^ crosses.to(tl.int32)
    is_inside = is_inside | parity
    tl.store(masks + roi * (SIZE * SIZE) + pixel, is_inside.to(tl.uint8), mask=pixel < SIZE * SIZE)


@triton.jit
def _overlap(x0, y0, x1, y1, objects):
    # Intersection over union of boxes and one object, rounded as boxes.overlaps of benchmarks/detection does
    object_x0, object_y0, object_x1, object_y1 = _corners(objects, True)
    width = tl.minimum(object_x1, x1) - tl.maximum(object_x0, x0)
    height = tl.minimum(object_y1, y1) - tl.maximum(object_y0, y0)
    intersection = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
    union = (object_x1 - object_x0) * (object_y1 - object_y0) + (x1 - x0) * (y1 - y0) - intersection
    return tl.div_rn(intersection, tl.maximum(union, 1.1754943508222875e-38))


@triton.jit
def best_overlaps(objects, present, boxes, best_overlap, count, OBJECTS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the largest overlap per object, as non-negative float bits."""
    image = tl.program_id(1).to(tl.int64)
    box = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = box < count
    x0, y0, x1, y1 = _corners(boxes + box * 4, mask)
    for number in range(OBJECTS):
        slot = image * OBJECTS + number
        if tl.load(present + slot) > 0:
            overlap = tl.where(mask, _overlap(x0, y0, x1, y1, objects + slot * 4), 0.0)
            tl.atomic_max(best_overlap + slot, tl.max(overlap, axis=0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def match_boxes(
    objects, present, boxes, best_overlap, matches, count, fg_iou, bg_iou, OBJECTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the object per box; see regions.match with ``allow_low_quality``."""
    image = tl.program_id(1).to(tl.int64)
    box = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = box < count
    x0, y0, x1, y1 = _corners(boxes + box * 4, mask)
    best = tl.zeros([BLOCK], tl.float32) - 1.0
    best_number = tl.zeros([BLOCK], tl.int32)
    is_best = tl.zeros([BLOCK], tl.int32)
    for number in range(OBJECTS):
        slot = image * OBJECTS + number
        if tl.load(present + slot) > 0:
            overlap = _overlap(x0, y0, x1, y1, objects + slot * 4)
            is_best = is_best | (overlap == tl.load(best_overlap + slot).to(tl.float32, bitcast=True)).to(tl.int32)
            best_number = tl.where(overlap > best, number, best_number)
            best = tl.maximum(best, overlap)
    result = tl.where(best < bg_iou, -1, tl.where(best < fg_iou, -2, best_number))
    result = tl.where(is_best > 0, best_number, result)
    tl.store(matches + image * count + box, result.to(tl.int64), mask=mask)


# -- launched -----------------------------------------------------------------------------------------


def _backward_sizes(bins: int) -> Dict[str, int]:
    # tl.dot needs at least 16 rows and columns.
    return {"COLUMNS": max(16, power_of_two(bins)), "PARTS": ALIGN_PARTS, "PIXELS": 16}


class _Align(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, rois: torch.Tensor, levels: torch.Tensor, bins: int) -> torch.Tensor:
        channels = table.shape[1]
        ctx.constants = {"CHANNELS": channels, "BINS": bins, "SAMPLES": SAMPLES, "BLOCK": power_of_two(channels)}
        ctx.save_for_backward(rois, levels)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        pooled = table.new_empty(len(rois), bins, bins, channels)
        if len(rois):
            align_forward[(len(rois) * bins * bins,)](
                table.contiguous(), rois, levels, pooled, **ctx.constants, num_warps=ALIGN_WARPS, **OPTIONS
            )
        return pooled

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None, None]:
        rois, levels = ctx.saved_tensors
        grad_table = torch.zeros(ctx.shape, dtype=torch.float32, device=rois.device)
        if len(rois):
            align_backward[(len(rois), ALIGN_PARTS)](
                grad_table, rois, levels, gradients[0].contiguous(),
                **ctx.constants, **_backward_sizes(ctx.constants["BINS"]), num_warps=ALIGN_WARPS, **OPTIONS,
            )  # fmt: skip
        return grad_table.to(ctx.dtype), None, None, None


def roi_align(
    features: Sequence[torch.Tensor], rois: torch.Tensor, images: torch.Tensor, bins: int, edge: float = 0.0
) -> torch.Tensor:
    location = locate_rois(
        rois, images, len(features[0]), [(feature.shape[2], feature.shape[3]) for feature in features], edge
    )
    scaled = (rois * location.scale.unsqueeze(1)).float().contiguous()
    levels = torch.stack((location.start, location.height, location.width), 1).contiguous()
    return _Align.apply(pixels(features), scaled, levels, bins).permute(0, 3, 1, 2)


def project_masks(outlines: Outlines, rois: torch.Tensor, objects: torch.Tensor, size: int) -> torch.Tensor:
    masks = torch.zeros(len(rois), size, size, dtype=torch.uint8, device=rois.device)
    if len(rois) and len(outlines.edges):
        draw_masks[(len(rois),)](
            outlines.edges.contiguous(), outlines.polygons, outlines.offsets, rois.float().contiguous(), objects, masks,
            SIZE=size, BLOCK=power_of_two(size * size), num_warps=DRAW_WARPS, **OPTIONS,
        )  # fmt: skip
    return masks.bool()


def match(
    objects: torch.Tensor, present: torch.Tensor, boxes: torch.Tensor, fg_iou: float, bg_iou: float
) -> torch.Tensor:
    batch, count = len(objects), len(boxes)
    matches = torch.empty(batch, count, dtype=torch.int64, device=boxes.device)
    best_overlap = torch.zeros(batch, objects.shape[1], dtype=torch.int32, device=boxes.device)
    if not matches.numel():
        return matches
    arguments = (objects.contiguous(), present.to(torch.uint8), boxes.contiguous(), best_overlap)
    sizes = {"OBJECTS": objects.shape[1], "BLOCK": MATCH_BLOCK, "num_warps": MATCH_WARPS}
    grid = (triton.cdiv(count, MATCH_BLOCK), batch)
    # Both kernels compute the overlaps, which must be bit-identical: FMA contraction is disabled.
    best_overlaps[grid](*arguments, count, **sizes, enable_fp_fusion=False)
    match_boxes[grid](*arguments, matches, count, fg_iou, bg_iou, **sizes, enable_fp_fusion=False)
    return matches


def specifications() -> List[Specification]:
    """Return all kernels at the sizes of the submissions, for all activation types."""
    specs = []
    for variant in ("fp16", "bf16", "fp32"):
        sizes = {"CHANNELS": 256, "BINS": BOX_BINS, "SAMPLES": SAMPLES, "BLOCK": 256}
        inputs = {"rois": "*fp32", "levels": "*i64"}
        forward = {"table": f"*{variant}", **inputs, "pooled": f"*{variant}", **sizes}
        backward = {"grad_table": "*fp32", **inputs, "gradient": f"*{variant}", **sizes}
        backward.update(BINS=MASK_BINS, **_backward_sizes(MASK_BINS))
        specs.append(Specification(align_forward, variant, forward, ALIGN_WARPS))
        specs.append(Specification(align_backward, variant, backward, ALIGN_WARPS))
    outline = {"edges": "*fp32", "polygons": "*i32", "offsets": "*i64"}
    arguments = {**outline, "rois": "*fp32", "objects": "*i64", "masks": "*u8", "SIZE": 28, "BLOCK": 1024}
    match_inputs = {"objects": "*fp32", "present": "*u8", "boxes": "*fp32", "best_overlap": "*i32"}
    sizes = {"OBJECTS": 100, "BLOCK": MATCH_BLOCK}
    outputs = {"matches": "*i64", "count": "i32", "fg_iou": "fp32", "bg_iou": "fp32"}
    return [
        *specs,
        Specification(draw_masks, "fp32", arguments, DRAW_WARPS),
        Specification(best_overlaps, "fp32", {**match_inputs, "count": "i32", **sizes}, MATCH_WARPS),
        Specification(match_boxes, "fp32", {**match_inputs, **outputs, **sizes}, MATCH_WARPS),
    ]
