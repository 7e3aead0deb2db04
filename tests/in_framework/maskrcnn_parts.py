"""Mask R-CNN's parts against float64 references written as loops, gradients against differences."""

import json
import math

import numpy as np
import torch

from benchmarks.detection.pytorch.nms import nms
from benchmarks.maskrcnn.pytorch import anchors, losses, masks, operators, plain, served, targets
from benchmarks.maskrcnn.pytorch.proposals import Limits, propose

torch.set_num_threads(1)


def random_boxes(count, extent=60.0, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=numbers, dtype=torch.float64) * extent
    return torch.cat(
        (corner, corner + 2 + torch.rand(count, 2, generator=numbers, dtype=torch.float64) * extent / 2), 1
    )


def overlap(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0) * max(height, 0)
    return both and both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


# -- suppression ----------------------------------------------------------------------------------------


def kept_one_by_one(boxes, scores, groups, threshold):
    kept = []
    for place in sorted(range(len(boxes)), key=lambda place: (-scores[place], place)):
        rivals = [other for other in kept if groups[other] == groups[place]]
        if all(overlap(boxes[place], boxes[other]) <= threshold for other in rivals):
            kept.append(place)
    return kept


def suppression():
    found = {}
    for count, groups, threshold in ((0, 1, 0.5), (1, 1, 0.5), (150, 1, 0.3), (300, 7, 0.5), (200, 200, 0.5)):
        boxes = random_boxes(count, seed=count)
        scores = torch.randint(0, 40, (count,), generator=torch.Generator().manual_seed(1)).float()  # with ties
        of = torch.randint(0, groups, (count,), generator=torch.Generator().manual_seed(2))
        ours = nms(boxes, scores, of, threshold).tolist()
        theirs = kept_one_by_one(boxes.tolist(), scores.tolist(), of.tolist(), threshold)
        limited = nms(boxes, scores, of, threshold, limit=3).tolist()
        found[f"{count} in {groups}"] = [ours == theirs and limited == theirs[:3], len(ours)]
    return found


# -- anchors, offsets, matching, samples -------------------------------------------------------------------


def published_anchors():
    """The table in the docstring of Detectron's generate_anchors: stride 16, sizes 128, 256, 512; whole pixels."""
    table = {128: [[-83, -39, 100, 56], [-55, -55, 72, 72], [-35, -79, 52, 96]],
             256: [[-175, -87, 192, 104], [-119, -119, 136, 136], [-79, -167, 96, 184]],
             512: [[-359, -183, 376, 200], [-247, -247, 264, 264], [-167, -343, 184, 360]]}  # fmt: skip
    # That table counts the first pixel as 1 and rounds away from it: its windows are 1 to the right of anchor - 0.5.
    largest = 0.0
    for size, rows in table.items():
        ours = anchors.cell_anchors(16, size, (0.5, 1.0, 2.0)).double()
        theirs = torch.tensor(rows, dtype=torch.float64) - torch.tensor([1.0, 1, 0, 0]) + 0.0
        largest = max(largest, float((ours - theirs).abs().max()))
    return largest


def offsets():
    boxes, others = random_boxes(40, seed=3), random_boxes(40, seed=4)
    weights = (10.0, 10.0, 5.0, 5.0)
    coded = anchors.encode(boxes, others, weights)
    worst = 0.0
    for box, other, code in zip(boxes.tolist(), others.tolist(), coded.tolist(), strict=True):
        width, height = other[2] - other[0], other[3] - other[1]
        wanted = [
            10 * ((box[0] + box[2]) / 2 - (other[0] + other[2]) / 2) / width,
            10 * ((box[1] + box[3]) / 2 - (other[1] + other[3]) / 2) / height,
            5 * math.log((box[2] - box[0]) / width),
            5 * math.log((box[3] - box[1]) / height),
        ]
        worst = max([worst, *(abs(a - b) for a, b in zip(wanted, code, strict=True))])
    back = float((anchors.decode(coded, others, weights) - boxes).abs().max())
    limited = anchors.decode(torch.tensor([[0.0, 0, 99, 99]]), torch.tensor([[0.0, 0, 16, 16]]), (1.0,) * 4)
    return {"encode": worst, "decode": back, "largest": float(limited[0, 2] - limited[0, 0])}


def matching():
    objects, boxes = random_boxes(5, seed=5).unsqueeze(0), random_boxes(60, seed=6)
    boxes = torch.cat((boxes, objects[0, :3] + 1))
    present = torch.tensor([[True, True, True, True, False]])
    quality = targets.overlaps(objects, boxes.unsqueeze(0))
    table = [[overlap(a, b) for b in boxes.tolist()] for a in objects[0].tolist()]
    wanted = {}
    for rescue in (False, True):
        found = []
        for place in range(len(boxes)):
            column = [table[g][place] for g in range(4)]
            best = max(range(4), key=lambda g: column[g])
            found.append(best if column[best] >= 0.5 else -2 if column[best] >= 0.2 else -1)
            if rescue and any(table[g][place] == max(table[g]) for g in range(4)):
                found[-1] = best
        ours = targets.match(quality, present, 0.5, 0.2, rescue)[0].tolist()
        wanted[str(rescue)] = ours == found
    nothing = targets.match(quality, torch.zeros(1, 5, dtype=torch.bool), 0.5, 0.2, True)
    return {
        "overlaps": float((quality[0] - torch.tensor(table, dtype=torch.float64)).abs().max()),
        **wanted,
        "of nothing": bool((nothing == -1).all()),
    }


def sampling():
    matched = torch.full((3, 400), -1)
    matched[0, :150], matched[1, :7], matched[2, 10:] = 0, 3, -2
    usable = torch.ones_like(matched, dtype=torch.bool)
    usable[:, 390:] = False
    drawn = targets.sample(matched, usable, torch.tensor([1, 2, 3]), 64, 0.25)
    again = targets.sample(matched, usable, torch.tensor([1, 5, 3]), 64, 0.25)
    alone = targets.sample(matched[1:2], usable[1:2], torch.tensor([2]), 64, 0.25)
    values = targets.keys(torch.arange(50), 2000).double() / 2**31
    return {
        "positive": drawn.positive.sum(1).tolist(),
        "filled": drawn.filled.sum(1).tolist(),
        "distinct": [len(set(row[there].tolist())) for row, there in zip(drawn.positions, drawn.filled, strict=True)],
        "right": bool((targets.take(matched, drawn.positions)[drawn.positive] >= 0).all())
        and bool((targets.take(matched, drawn.positions)[drawn.filled & ~drawn.positive] == -1).all())
        and bool(targets.take(usable, drawn.positions)[drawn.filled].all()),
        "same": bool((drawn.positions[0] == again.positions[0]).all()),
        "other": bool((drawn.positions[1] != again.positions[1]).any()),
        "alone": bool((drawn.positions[1] == alone.positions[0]).all()),
        "mean": float(values.mean()),
        "deviation": float(values.std() * math.sqrt(12)),
    }


def proposals():
    """A level at a time, box by box; the limit is one of the whole batch."""
    sizes = torch.tensor([[60.0, 50.0], [64.0, 40.0]])
    grid = [random_boxes(30, seed=7), random_boxes(8, seed=8)]
    numbers = torch.Generator().manual_seed(9)
    scores = [torch.randn(2, len(each), generator=numbers) for each in grid]
    deltas = [0.2 * torch.randn(2, len(each), 4, generator=numbers) for each in grid]
    float_grid = [each.float() for each in grid]
    found = propose(scores, deltas, float_grid, sizes, Limits(12, 14, True, 0.4))
    candidates = []
    for image in range(2):
        for score, delta, anchor in zip(scores, deltas, float_grid, strict=True):
            best = score[image].argsort(descending=True)[:12]
            boxes = anchors.decode(delta[image][best], anchor[best], (1.0,) * 4).double()
            boxes = torch.minimum(boxes.clamp(min=0), sizes[image].repeat(2).double())
            values = score[image][best].tolist()
            kept = kept_one_by_one(boxes.tolist(), values, [0] * len(values), 0.4)
            candidates += [(values[place], image, boxes[place]) for place in kept]
    candidates = sorted(candidates, key=lambda each: -each[0])[:14]
    same = True
    for image in range(2):
        wanted = torch.stack([box for _, owner, box in candidates if owner == image])
        ours = found.boxes[image][found.valid[image]].double()
        same = same and ours.shape == wanted.shape and bool((ours - wanted).abs().max() < 1e-4)
    each = propose(scores, deltas, float_grid, sizes, Limits(12, 5, False, 0.4))
    return {"same": same, "of batch": int(found.valid.sum()), "of each": each.valid.sum(1).tolist()}


# -- RoIAlign and masks ------------------------------------------------------------------------------------


def bilinear(feature, y, x):
    height, width = feature.shape[1:]
    if y < -1 or y > height or x < -1 or x > width:
        return torch.zeros(feature.shape[0], dtype=torch.float64)
    y, x = max(y, 0.0), max(x, 0.0)
    y0, x0 = min(int(y), height - 1), min(int(x), width - 1)
    y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
    y, x = (y if y0 < height - 1 else float(y0)), (x if x0 < width - 1 else float(x0))
    dy, dx = y - y0, x - x0
    return (
        (1 - dy) * (1 - dx) * feature[:, y0, x0]
        + (1 - dy) * dx * feature[:, y0, x1]
        + dy * (1 - dx) * feature[:, y1, x0]
        + dy * dx * feature[:, y1, x1]
    )


def roi_align():
    torch.manual_seed(1)
    levels = [torch.randn(2, 3, 24 >> n, 32 >> n, dtype=torch.float64) for n in range(4)]
    rois = torch.cat((random_boxes(9, extent=100, seed=10), torch.tensor([[-20.0, -9, 3, 4], [100, 70, 180, 140]]),
                      torch.tensor([[0.0, 0, 96, 90], [5, 5, 5, 5]]))).double()  # fmt: skip
    rois = torch.cat((rois, torch.tensor([[-10.0, -5, 400, 300], [3, 3, 800, 900]], dtype=torch.float64)))
    images = torch.arange(len(rois)) % 2
    bins, worst, used = 3, 0.0, set()
    pooled = operators.roi_align(levels, rois, images, bins)
    for number, roi in enumerate(rois.tolist()):
        area = (roi[2] - roi[0]) * (roi[3] - roi[1])
        level = 0 if area == 0 else min(max(math.floor(4 + math.log2(math.sqrt(area) / 224 + 1e-6)), 2), 5) - 2
        used.add(level)
        scale = 1 / (4 << level)
        left, top = roi[0] * scale, roi[1] * scale
        width, height = max(roi[2] * scale - left, 1), max(roi[3] * scale - top, 1)
        feature = levels[level][images[number]]
        for row in range(bins):
            for column in range(bins):
                points = [
                    bilinear(feature, top + (row + y) * height / bins, left + (column + x) * width / bins)
                    for y in (0.25, 0.75)
                    for x in (0.25, 0.75)
                ]
                worst = max(worst, float((sum(points) / 4 - pooled[number, :, row, column]).abs().max()))
    small = [torch.randn(1, 2, 8 >> n, 8 >> n, dtype=torch.float64, requires_grad=True) for n in range(4)]
    some = torch.tensor([[1.0, 2, 20, 17], [-3, 0, 300, 260]], dtype=torch.float64)
    passed = torch.autograd.gradcheck(
        lambda *features: operators.roi_align(features, some, torch.zeros(2, dtype=torch.int64), 2), small
    )
    none = operators.roi_align(levels, rois[:0], images[:0], bins)
    return {"largest error": worst, "gradients": passed, "levels": sorted(used), "none": list(none.shape)}


def point_weights(length, place):
    """The two pixels of an axis and their weights, as bilinear_interpolate_gradient of ROIAlign_cuda.cu has them."""
    if place < -1 or place > length:
        return []
    place = max(place, 0.0)
    low = int(place)
    if low >= length - 1:
        return [(length - 1, 1.0)]
    return [(low, 1 - (place - low)), (low + 1, place - low)]


def inclusive():
    """RoIAlign of inclusive boxes next to the CUDA kernel's formula on them, values and gradient."""
    torch.manual_seed(2)
    levels = [torch.randn(2, 2, 20 >> n, 28 >> n, dtype=torch.float64, requires_grad=True) for n in range(4)]
    boxes = torch.cat((random_boxes(8, extent=90, seed=12), torch.tensor(
        [[0.0, 0, 112, 112], [2, 1, 226, 225], [-30, -9, 4, 5], [100, 60, 190, 140], [5, 5, 5, 5], [3, 3, 500, 600]],
        dtype=torch.float64)))  # fmt: skip
    images, bins = torch.arange(len(boxes)) % 2, 3
    top = torch.randn(len(boxes), 2, bins, bins, dtype=torch.float64)
    values, gradients = torch.zeros_like(top), [torch.zeros_like(level) for level in levels]
    used = []
    for number, (left, up, right, down) in enumerate((boxes - torch.tensor([0, 0, 1, 1])).tolist()):
        # BoxList.area and LevelMapper, then RoIAlignForward and RoIAlignBackwardFeature.
        area = (right - left + 1) * (down - up + 1)
        level = min(max(math.floor(4 + math.log2(math.sqrt(area) / 224 + 1e-6)), 2), 5) - 2
        scale, image = 0.25 / (1 << level), int(images[number])
        width, height = max(right * scale - left * scale, 1.0), max(down * scale - up * scale, 1.0)
        rows, columns = levels[level].shape[2:]
        used.append(level)
        for row in range(bins):
            for column in range(bins):
                for y in (0.5, 1.5):
                    for x in (0.5, 1.5):
                        of_y = point_weights(rows, up * scale + row * height / bins + y * height / bins / 2)
                        of_x = point_weights(columns, left * scale + column * width / bins + x * width / bins / 2)
                        for (i, a), (j, b) in [(p, q) for p in of_y for q in of_x]:
                            pixel = levels[level].detach()[image, :, i, j]
                            values[number, :, row, column] += a * b / 4 * pixel
                            gradients[level][image, :, i, j] += a * b / 4 * top[number, :, row, column]
    ours = operators.roi_align(levels, anchors.sampled(boxes, 1.0), images, bins, 1.0)
    theirs = torch.autograd.grad((ours * top).sum(), levels)
    plainly = plain.roi_align([each.detach() for each in levels], boxes, images, bins, 1.0)
    exported = served.roi_align(levels, torch.stack((boxes[::2], boxes[1::2])), bins, 1.0)
    continuous = operators.roi_align(levels, boxes, images, bins)
    return {
        "values": float((ours - values).detach().abs().max()),
        "gradient": max(float((a - b).abs().max()) for a, b in zip(theirs, gradients, strict=True)),
        "plain": float((plainly - values).abs().max()),
        "exported": float((exported.detach() - torch.cat((values[::2], values[1::2]))).abs().max()),
        "continuous": float((continuous - values).detach().abs().max()),
        "levels": used,
    }


def inside(x, y, polygon):
    result = False
    for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], polygon[0]], strict=True):
        if (y0 <= y < y1 or y1 <= y < y0) and x >= x0 + (y - y0) * (x1 - x0) / (y1 - y0):
            result = not result
    return result


def projection():
    numbers = np.random.RandomState(0)
    objects = [[30 + 25 * numbers.randn(points, 2) for points in some] for some in ((7,), (3, 5), (), (4, 12, 6))]
    outlines = operators.outlines_of([[torch.from_numpy(p) for p in some] for some in objects])
    rois = random_boxes(10, seed=11)
    which = torch.tensor([0, 1, 2, 3, -1, 3, 1, 0, 3, 1])
    size, differ, drawn = 13, 0, operators.project_masks(outlines, rois, which, 13)
    for number, (left, top, right, bottom) in enumerate(rois.tolist()):
        for row in range(size):
            for column in range(size):
                x = left + (column + 0.5) * max(right - left, 1) / size
                y = top + (row + 0.5) * max(bottom - top, 1) / size
                polygons = objects[which[number]] if which[number] >= 0 else []
                differ += bool(drawn[number, row, column]) != any(inside(x, y, p.tolist()) for p in polygons)
    return {"differ": differ, "drawn": int(drawn.sum()), "pixels": drawn.numel()}


def pasting():
    numbers = np.random.RandomState(3)
    mask = numbers.rand(6, 6).astype(np.float32)
    differ = 0
    for box in ([3.2, 4.7, 20.1, 15.9], [-5.0, -3.0, 9.0, 30.0], [18.0, 9.0, 90.0, 40.0]):
        drawn = masks.paste(mask, np.array(box), 30, 24)
        padded = np.zeros((8, 8))
        padded[1:-1, 1:-1] = mask
        for row in range(24):
            for column in range(30):
                x = (column + 0.5 - box[0]) / (box[2] - box[0]) * 6 + 0.5
                y = (row + 0.5 - box[1]) / (box[3] - box[1]) * 6 + 0.5
                value = 0.0
                if 0 <= x < 7 and 0 <= y < 7:
                    x0, y0 = int(x), int(y)
                    dx, dy = x - x0, y - y0
                    value = (padded[y0, x0] * (1 - dx) + padded[y0, x0 + 1] * dx) * (1 - dy)
                    value += (padded[y0 + 1, x0] * (1 - dx) + padded[y0 + 1, x0 + 1] * dx) * dy
                # What float32 rounds to the other side of the threshold is no error.
                differ += abs(value - 0.5) > 1e-5 and bool(drawn[row, column]) != (value > 0.5)
    return differ


# -- losses -------------------------------------------------------------------------------------------------


def loss_values():
    torch.manual_seed(4)
    logits = torch.randn(2, 5, dtype=torch.float64)
    positive = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 1, 0]]).bool()
    filled = torch.tensor([[1, 1, 1, 0, 1], [1, 1, 0, 1, 0]]).bool()
    bce = [
        math.log(1 + math.exp(-x)) + (0 if p else x)
        for x, p, f in zip(
            logits.flatten().tolist(), positive.flatten().tolist(), filled.flatten().tolist(), strict=True
        )
        if f
    ]
    errors = {"objectness": abs(sum(bce) / len(bce) - float(losses.objectness(logits, positive, filled)))}
    found, wanted = (torch.randn(2, 5, 4, dtype=torch.float64) for _ in range(2))
    total = 0.0
    for a, b in zip(found[positive].flatten().tolist(), wanted[positive].flatten().tolist(), strict=True):
        total += (a - b) ** 2 / (2 / 9) if abs(a - b) < 1 / 9 else abs(a - b) - 1 / 18
    errors["boxes"] = abs(total / int(filled.sum()) - float(losses.boxes(found, wanted, positive, filled, 1 / 9)))
    scores, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 2, 0])
    each = [
        math.log(sum(math.exp(v) for v in row)) - row[label]
        for row, label, f in zip(scores.tolist(), labels.tolist(), filled[0].tolist(), strict=True)
        if f
    ]
    errors["classes"] = abs(sum(each) / len(each) - float(losses.classes(scores, labels, filled[0])))
    drawn = torch.randn(5, 2, 2, dtype=torch.float64)
    truth = torch.randint(0, 2, (5, 2, 2)).bool()
    pixels = [
        math.log(1 + math.exp(-x)) + (0 if t else x)
        for x, t in zip(drawn[positive[0]].flatten().tolist(), truth[positive[0]].flatten().tolist(), strict=True)
    ]
    errors["masks"] = abs(sum(pixels) / len(pixels) - float(losses.masks(drawn, truth, positive[0])))
    infinite = wanted.clone()
    infinite[~positive] = float("inf")
    found.requires_grad_()
    (gradient,) = torch.autograd.grad(losses.boxes(found, infinite, positive, filled, 1.0), found)
    none = torch.zeros_like(positive)
    return {
        "largest error": max(errors.values()),
        "finite": bool(gradient.isfinite().all()),
        "gradients": torch.autograd.gradcheck(lambda x: losses.boxes(x, wanted, positive, filled, 1 / 9), found),
        "of nothing": [float(losses.objectness(logits, none, none)), float(losses.masks(drawn, truth, none[0]))],
    }


PARTS = (suppression, published_anchors, offsets, matching, sampling, proposals, roi_align, inclusive, projection,
         pasting, loss_values)  # fmt: skip
print(json.dumps({part.__name__: part() for part in PARTS}, default=lambda value: value.item()))
