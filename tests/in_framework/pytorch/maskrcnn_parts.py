"""Mask R-CNN's parts next to loops in float64, and their gradients next to differences."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.detection.pytorch.boxes import decode, encode, overlaps
from benchmarks.detection.pytorch.operators import nms
from benchmarks.maskrcnn import order
from benchmarks.maskrcnn.pytorch import evaluation, model, operators, regions, served
from benchmarks.maskrcnn.pytorch.regions import Limits, propose

torch.set_num_threads(1)


def random_boxes(count, extent=60.0, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    corner, size = (torch.rand(count, 2, generator=numbers, dtype=torch.float64) * extent for _ in range(2))
    return torch.cat((corner, corner + 2 + size / 2), 1)


def overlap(a, b):
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0) * max(height, 0)
    return both and both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


# -- suppression, anchors, offsets ------------------------------------------------------------------------


def kept_one_by_one(boxes, scores, groups, threshold):
    kept = []
    for place in sorted(range(len(boxes)), key=lambda place: (-scores[place], place)):
        rivals = [other for other in kept if groups[other] == groups[place]]
        if all(overlap(boxes[place], boxes[other]) <= threshold for other in rivals):
            kept.append(place)
    return kept


@pytest.mark.parametrize(
    ("count", "groups", "threshold"), [(0, 1, 0.5), (1, 1, 0.5), (150, 1, 0.3), (300, 7, 0.5), (200, 200, 0.5)]
)
def test_suppression_keeps_what_one_by_one_keeps(count, groups, threshold):
    numbers, boxes = torch.Generator().manual_seed(1), random_boxes(count, seed=count)
    scores = torch.randint(0, 40, (count,), generator=numbers).float()  # with ties
    of = torch.randint(0, groups, (count,), generator=numbers)
    kept = kept_one_by_one(boxes.tolist(), scores.tolist(), of.tolist(), threshold)
    assert nms(boxes, scores, of, threshold).tolist() == kept
    assert nms(boxes, scores, of, threshold, limit=3).tolist() == kept[:3]


def test_anchors_are_the_published_ones():
    # The table in the docstring of Detectron's generate_anchors: stride 16, sizes 128, 256, 512; whole pixels
    table = {128: [[-83, -39, 100, 56], [-55, -55, 72, 72], [-35, -79, 52, 96]],
             256: [[-175, -87, 192, 104], [-119, -119, 136, 136], [-79, -167, 96, 184]],
             512: [[-359, -183, 376, 200], [-247, -247, 264, 264], [-167, -343, 184, 360]]}  # fmt: skip
    # That table counts the first pixel as 1 and rounds away from it: its windows are 1 to the right of anchor - 0.5.
    for size, rows in table.items():
        found = regions.grid_anchors([(1, 1)] * 3, (size,) * 3, (0.5, 1.0, 2.0), torch.device("cpu"))[2]
        assert found.tolist() == (torch.tensor(rows) - torch.tensor([1.0, 1, 0, 0])).tolist()
    grid = regions.grid_anchors([(2, 3)], (128,), (1.0,), torch.device("cpu"))[0]
    assert grid[-1].tolist() == [8 + 2 - 64, 4 + 2 - 64, 8 + 2 + 64, 4 + 2 + 64]


def test_offsets_are_the_equation_and_its_inverse():
    boxes, others, weights = random_boxes(40, seed=3), random_boxes(40, seed=4), (10.0, 10.0, 5.0, 5.0)
    coded = encode(boxes, others, weights)
    for box, other, code in zip(boxes.tolist(), others.tolist(), coded.tolist(), strict=True):
        width, height = other[2] - other[0], other[3] - other[1]
        assert code == pytest.approx([
            10 * ((box[0] + box[2]) / 2 - (other[0] + other[2]) / 2) / width,
            10 * ((box[1] + box[3]) / 2 - (other[1] + other[3]) / 2) / height,
            5 * math.log((box[2] - box[0]) / width),
            5 * math.log((box[3] - box[1]) / height),
        ])  # fmt: skip
    torch.testing.assert_close(decode(coded, others, weights), boxes)
    limited = decode(torch.tensor([[0.0, 0, 99, 99]]), torch.tensor([[0.0, 0, 16, 16]]), (1.0,) * 4)
    assert float(limited[0, 2] - limited[0, 0]) == pytest.approx(1000)


# -- matching, samples, proposals -------------------------------------------------------------------------


@pytest.mark.parametrize("rescue", [False, True])
def test_boxes_are_matched_by_their_overlaps(rescue):
    objects, boxes = random_boxes(5, seed=5), random_boxes(60, seed=6)
    boxes = torch.cat((boxes, objects[:3] + 1))
    quality = overlaps(objects.unsqueeze(0), boxes.unsqueeze(0))
    table = [[overlap(a, b) for b in boxes.tolist()] for a in objects.tolist()]
    torch.testing.assert_close(quality[0], torch.tensor(table, dtype=torch.float64))
    wanted = []
    for column in zip(*table[:4], strict=True):  # the fifth is not there
        best = max(range(4), key=column.__getitem__)
        wanted.append(best if column[best] >= 0.5 else regions.BETWEEN if column[best] >= 0.2 else regions.BACKGROUND)
        if rescue and any(value == max(row) for value, row in zip(column, table[:4], strict=True)):
            wanted[-1] = best
    present = torch.tensor([[True, True, True, True, False]])
    assert regions.match(quality, present, 0.5, 0.2, rescue).tolist() == [wanted]
    assert (regions.match(quality, ~present & present, 0.5, 0.2, rescue) == regions.BACKGROUND).all()
    point = torch.zeros(1, 4)
    assert overlaps(point, point).tolist() == [[0.0]]


def test_samples_are_of_each_image_and_the_same_for_any_ranks():
    matched = torch.full((3, 400), regions.BACKGROUND)
    matched[0, :150], matched[1, :7], matched[2, 10:] = 0, 3, regions.BETWEEN
    usable = (torch.arange(400) < 390).expand(3, 400)
    drawn, again = (regions.sample(matched, usable, torch.tensor([1, seed, 3]), 64, 0.25) for seed in (2, 5))
    alone = regions.sample(matched[1:2], usable[1:2], torch.tensor([2]), 64, 0.25)
    assert drawn.positive.sum(1).tolist() == [16, 7, 0]
    assert drawn.filled.sum(1).tolist() == [64, 64, 10]
    for row, there in zip(drawn.positions, drawn.filled, strict=True):
        assert len(set(row[there].tolist())) == there.sum()
    of_samples = regions.take(matched, drawn.positions)
    assert (of_samples[drawn.positive] >= 0).all() and regions.take(usable, drawn.positions)[drawn.filled].all()
    assert (of_samples[drawn.filled & ~drawn.positive] == regions.BACKGROUND).all()
    assert torch.equal(drawn.positions[0], again.positions[0]) and torch.equal(drawn.positions[1:2], alone.positions)
    assert not torch.equal(drawn.positions[1], again.positions[1])
    values = regions.keys(torch.arange(50), 2000).double() / 2**31
    assert (float(values.mean()), float(values.std())) == pytest.approx((0.5, 1 / math.sqrt(12)), abs=0.005)


def test_proposals_are_kept_level_by_level_and_limited_over_the_batch():
    sizes = torch.tensor([[60.0, 50.0], [64.0, 40.0]])
    grid = [random_boxes(30, seed=7).float(), random_boxes(8, seed=8).float()]
    numbers = torch.Generator().manual_seed(9)
    scores = [torch.randn(2, len(each), generator=numbers) for each in grid]
    deltas = [0.2 * torch.randn(2, len(each), 4, generator=numbers) for each in grid]
    candidates = []
    for image, (score, delta, anchor) in itertools.product(range(2), zip(scores, deltas, grid, strict=True)):
        best = score[image].argsort(descending=True)[:12]
        boxes = decode(delta[image][best], anchor[best], (1.0,) * 4)
        boxes = torch.minimum(boxes.clamp(min=0), sizes[image].repeat(2))
        values = score[image][best].tolist()
        kept = kept_one_by_one(boxes.tolist(), values, [0] * len(values), 0.4)
        candidates += [(values[place], image, boxes[place].tolist()) for place in kept]
    candidates = sorted(candidates, reverse=True)[:14]
    found = propose(scores, deltas, grid, sizes, Limits(12, 14, True, 0.4))
    for image in range(2):
        wanted = [box for _, owner, box in candidates if owner == image]
        assert found.boxes[image][found.valid[image]].numpy() == pytest.approx(np.array(wanted), abs=1e-4)
    assert propose(scores, deltas, grid, sizes, Limits(12, 5, False, 0.4)).valid.sum(1).tolist() == [5, 5]


# -- RoIAlign and masks -----------------------------------------------------------------------------------


def point_weights(length, place):
    # The two pixels of an axis and their weights, as bilinear_interpolate_gradient of ROIAlign_cuda.cu has them
    if place < -1 or place > length:
        return []
    place = max(place, 0.0)
    low = int(place)
    if low >= length - 1:
        return [(length - 1, 1.0)]
    return [(low, 1 - (place - low)), (low + 1, place - low)]


@pytest.mark.parametrize("edge", [0.0, 1.0], ids=["continuous", "inclusive"])
def test_pooling_is_the_submitted_kernels_formula(edge):
    # Values and gradients next to LevelMapper, RoIAlignForward and RoIAlignBackwardFeature, also of what is served
    torch.manual_seed(2)
    levels = [torch.randn(2, 2, 20 >> n, 28 >> n, dtype=torch.float64, requires_grad=True) for n in range(4)]
    boxes = torch.cat((random_boxes(8, extent=90, seed=12), torch.tensor(
        [[0.0, 0, 112, 112], [2, 1, 226, 225], [-30, -9, 4, 5], [100, 60, 190, 140], [5, 5, 5, 5], [3, 3, 500, 600]],
        dtype=torch.float64)))  # fmt: skip
    images, bins, used = torch.arange(len(boxes)) % 2, 3, []
    top = torch.randn(len(boxes), 2, bins, bins, dtype=torch.float64)
    values, gradients = torch.zeros_like(top), [torch.zeros_like(level) for level in levels]
    for number, (left, up, right, down) in enumerate((boxes - torch.tensor([0, 0, edge, edge])).tolist()):
        area = (right - left + edge) * (down - up + edge)
        level = min(max(math.floor(4 + math.log2(math.sqrt(max(area, 0)) / 224 + 1e-6)), 2), 5) - 2
        scale, image = 0.25 / (1 << level), int(images[number])
        width, height = max(right * scale - left * scale, 1.0), max(down * scale - up * scale, 1.0)
        rows, columns = levels[level].shape[2:]
        used.append(level)
        for row, column, y, x in itertools.product(range(bins), range(bins), (0.5, 1.5), (0.5, 1.5)):
            of_y = point_weights(rows, up * scale + (row + y / 2) * height / bins)
            of_x = point_weights(columns, left * scale + (column + x / 2) * width / bins)
            for (i, a), (j, b) in itertools.product(of_y, of_x):
                values[number, :, row, column] += a * b / 4 * levels[level].detach()[image, :, i, j]
                gradients[level][image, :, i, j] += a * b / 4 * top[number, :, row, column]
    assert set(used) == {0, 1, 2, 3} and used[8] == 1
    sampled = regions.sampled(boxes, edge)
    for align in (operators.roi_align, served.roi_align):
        found = align(levels, sampled, images, bins, edge)
        torch.testing.assert_close(found, values)
        for one, other in zip(torch.autograd.grad((found * top).sum(), levels), gradients, strict=True):
            torch.testing.assert_close(one, other)
    assert operators.roi_align(levels, boxes[:0], images[:0], 3).shape == (0, 2, 3, 3)


def inside(x, y, polygon):
    crossed = 0
    for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], polygon[0]], strict=True):
        crossed += (y0 <= y < y1 or y1 <= y < y0) and x >= x0 + (y - y0) * (x1 - x0) / (y1 - y0)
    return crossed % 2 == 1


def test_outlines_are_drawn_where_a_pixels_middle_is_inside():
    numbers = np.random.RandomState(0)
    objects = [[30 + 25 * numbers.randn(points, 2) for points in some] for some in ((7,), (3, 5), (), (4, 12, 6))]
    outlines = operators.outlines_of([[torch.from_numpy(p) for p in some] for some in objects])
    rois, size, wanted = random_boxes(10, seed=11), 13, []
    which = torch.tensor([0, 1, 2, 3, -1, 3, 1, 0, 3, 1])
    for (left, top, right, bottom), number in zip(rois.tolist(), which.tolist(), strict=True):
        for row, column in itertools.product(range(size), range(size)):
            x = left + (column + 0.5) * max(right - left, 1) / size
            y = top + (row + 0.5) * max(bottom - top, 1) / size
            wanted.append(number >= 0 and any(inside(x, y, p.tolist()) for p in objects[number]))
    assert operators.project_masks(outlines, rois, which, size).flatten().tolist() == wanted
    assert 0 < sum(wanted) < len(wanted)


@pytest.mark.parametrize("box", [[3.2, 4.7, 20.1, 15.9], [-5.0, -3.0, 9.0, 30.0], [18.0, 9.0, 90.0, 40.0]])
def test_masks_are_interpolated_between_the_middles_of_their_pixels(box):
    mask = np.random.RandomState(3).rand(6, 6).astype(np.float32)
    drawn, padded = evaluation.paste(mask, np.array(box), 30, 24), np.pad(mask, 1).astype(float)
    for row, column in itertools.product(range(24), range(30)):
        x = (column + 0.5 - box[0]) / (box[2] - box[0]) * 6 + 0.5
        y = (row + 0.5 - box[1]) / (box[3] - box[1]) * 6 + 0.5
        value = 0.0
        if 0 <= x < 7 and 0 <= y < 7:
            (x0, dx), (y0, dy) = ((int(place), place - int(place)) for place in (x, y))
            above, below = (padded[y0 + n, x0] * (1 - dx) + padded[y0 + n, x0 + 1] * dx for n in (0, 1))
            value = above * (1 - dy) + below * dy
        # What float32 rounds to the other side of the threshold is no error.
        assert abs(value - 0.5) < 1e-5 or drawn[row, column] == (value > 0.5)


# -- losses -----------------------------------------------------------------------------------------------

POSITIVE = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 1, 0]]).bool()
FILLED = torch.tensor([[1, 1, 1, 0, 1], [1, 1, 0, 1, 0]]).bool()


def entropy(logits, wanted):
    return [math.log(1 + math.exp(-x)) + (0 if one else x) for x, one in zip(logits.tolist(), wanted.tolist())]


def test_losses_are_the_equations():
    torch.manual_seed(4)
    logits = torch.randn(2, 5, dtype=torch.float64)
    each = entropy(logits[FILLED], POSITIVE[FILLED])
    assert float(model.binary_loss(logits, POSITIVE, FILLED)) == pytest.approx(sum(each) / len(each), rel=1e-12)
    drawn, truth = torch.randn(5, 2, 2, dtype=torch.float64), torch.randint(0, 2, (5, 2, 2)).bool()
    pixels = entropy(drawn[POSITIVE[0]].flatten(), truth[POSITIVE[0]].flatten())
    assert float(model.binary_loss(drawn, truth, POSITIVE[0])) == pytest.approx(sum(pixels) / len(pixels), rel=1e-12)
    none = torch.zeros_like(POSITIVE)
    assert float(model.binary_loss(logits, none, none)) == float(model.binary_loss(drawn, truth, none[0])) == 0


def test_a_box_without_area_changes_no_gradient():
    torch.manual_seed(5)
    found, wanted = (torch.randn(2, 5, 4, dtype=torch.float64) for _ in range(2))
    distances = (found - wanted)[POSITIVE].flatten().abs().tolist()
    each = [x**2 / (2 / 9) if x < 1 / 9 else x - 1 / 18 for x in distances]
    infinite = wanted.masked_fill(~POSITIVE.unsqueeze(-1), math.inf)
    for offsets in (wanted, infinite):
        loss = float(model.box_loss(found, offsets, POSITIVE, FILLED, 1 / 9))
        assert loss == pytest.approx(sum(each) / int(FILLED.sum()), rel=1e-12)
    given = found.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: model.box_loss(x, wanted, POSITIVE, FILLED, 1 / 9), given)
    (gradient,) = torch.autograd.grad(model.box_loss(given, infinite, POSITIVE, FILLED, 1.0), given)
    assert gradient.isfinite().all()


# -- order ------------------------------------------------------------------------------------------------


def as_sampled(sizes, positions, batch, share):
    # The full batches of a rank by the submitted rule, image by image
    shuffled = np.random.RandomState([3, 0]).permutation(positions).tolist()
    each = -(-len(shuffled) // share.size)
    mine = itertools.islice(itertools.cycle(shuffled), share.rank * each, (share.rank + 1) * each)
    groups, found = {}, []
    for place, image in enumerate(mine):
        group = groups.setdefault(sizes[image][1] / sizes[image][0] >= 1, [])
        group.append((place, image))
        if len(group) == batch:
            found.append((group[0][0], [image for _, image in group]))
            group.clear()
    return [images for _, images in sorted(found)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_groups_its_own_images_by_aspect(ranks):
    random = np.random.RandomState(0)
    sizes = random.randint(60, 200, (500, 2))
    sizes[::50] = 100  # squares
    resized = order.resized(sizes, 80, 133)
    shapes = order.shapes(resized, 80, 133, 32)
    chosen, seen = np.flatnonzero(random.rand(500) < 0.9), set()
    for rank in range(ranks):
        share = Ranks(rank, ranks, 0, 1, None)
        listed = order.batches(resized, shapes, chosen, 4, 3, 0, share)
        assert len(listed) == -(-len(chosen) // (4 * ranks)), "all ranks have as many"
        is_high = resized[:, 1] >= resized[:, 0]
        assert sum(len(set(is_high[each.positions])) > 1 for each in listed) <= 1
        ours, full = [each.positions.tolist() for each in listed], as_sampled(resized, chosen, 4, share)
        assert [each for each in ours if each in full] == full and len(full) >= len(ours) - 2
        assert all((resized[each.positions][:, ::-1] <= each.shape).all() for each in listed)
        assert {each.shape for each in listed} <= set(order.all_shapes(80, 133, 32))
        other = order.batches(resized, shapes, chosen, 4, 3, 1, share)
        assert [each.positions.tolist() for each in other] != ours
        seen.update(itertools.chain(*ours))
    assert seen == set(chosen.tolist())
    evaluated = np.concatenate([each.positions for each in order.evaluation(shapes, 16)])
    assert sorted(evaluated.tolist()) == list(range(500))


def test_sizes_are_rounded_as_the_submitted_code_rounds():
    given = np.array([[640, 480], [480, 640], [500, 100]])
    assert order.resized(given, 800, 1333).tolist() == [[1066, 800], [800, 1066], [1335, 267]]


# -- cuDNN ------------------------------------------------------------------------------------------------


def test_evaluation_lets_cudnn_measure_nothing(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # as frameworks/pytorch.py sets it
    found = []

    def fails(batches):
        found.append(torch.backends.cudnn.benchmark)
        raise KeyboardInterrupt

    run = SimpleNamespace(interruptible=fails, ranks=None)
    monkeypatch.setattr(evaluation, "evaluation_input", lambda *given: ())
    with pytest.raises(KeyboardInterrupt):
        evaluation.detections(SimpleNamespace(config=SimpleNamespace(threads=1)), None, run)
    assert (found, torch.backends.cudnn.benchmark) == ([False], True)
