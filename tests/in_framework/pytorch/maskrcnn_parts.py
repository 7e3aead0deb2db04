"""Mask R-CNN's parts and weight files against recorded values of the submitted formulas, in loops in float64."""

import math
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common.data.problem import Problem
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import files
from benchmarks.detection.pytorch.boxes import decode, encode, overlaps
from benchmarks.detection.pytorch.operators import BLOCK, CHUNK, nms
from benchmarks.maskrcnn import order
from benchmarks.maskrcnn.pytorch import backbone, evaluation, model, operators, regions, served
from benchmarks.maskrcnn.pytorch.config import Config as MaskConfig
from tests.in_framework.waves import digest, waves

torch.set_num_threads(1)
CPU = torch.device("cpu")


def boxes_of(count, phase=0.0, extent=30.0):
    # float64 (count, 4), at most 1.5 extents wide and high, in a square of 2 extents plus that
    corner, size = torch.from_numpy(extent * (1 + waves(2, count, 2, phase=phase)))
    return torch.cat((corner, corner + 2 + size / 2), 1)


# -- suppression, anchors, offsets ------------------------------------------------------------------------


# Recorded from suppression box by box: by falling score, a box stays if no better box of its group overlaps it more
@pytest.mark.parametrize(
    ("groups", "threshold", "positions"),
    [
        (
            1,
            0.3,
            [
                0,
                5,
                10,
                15,
                20,
                25,
                30,
                35,
                1,
                6,
                11,
                16,
                26,
                36,
                2,
                7,
                12,
                17,
                22,
                37,
                8,
                13,
                23,
                28,
                33,
                4,
                14,
                19,
                24,
                29,
                34,
                39,
            ],
        ),
        (
            1,
            0.5,
            [
                0,
                5,
                10,
                15,
                20,
                25,
                30,
                35,
                1,
                6,
                11,
                16,
                21,
                26,
                36,
                2,
                7,
                12,
                17,
                22,
                27,
                32,
                37,
                3,
                8,
                13,
                18,
                23,
                28,
                33,
                38,
                4,
                14,
                19,
                24,
                29,
                34,
                39,
            ],
        ),
        (
            3,
            0.3,
            [
                0,
                5,
                10,
                15,
                20,
                25,
                30,
                35,
                1,
                6,
                11,
                16,
                21,
                26,
                31,
                36,
                2,
                7,
                12,
                17,
                22,
                27,
                32,
                37,
                8,
                13,
                18,
                23,
                28,
                33,
                38,
                4,
                9,
                14,
                19,
                29,
                34,
                39,
            ],
        ),
        (40, 0.3, [*range(0, 40, 5), *range(1, 40, 5), *range(2, 40, 5), *range(3, 40, 5), *range(4, 40, 5)]),
    ],
)
@pytest.mark.parametrize("chunk", [CHUNK["cpu"], CHUNK["cuda"], 8 * BLOCK])
def test_suppression_keeps_the_recorded_boxes(groups, threshold, positions, chunk, monkeypatch):
    monkeypatch.setitem(CHUNK, "cpu", chunk)
    boxes, numbers = boxes_of(40), torch.arange(40)
    scores = -(numbers % 5).float()  # ties: the first one stays
    assert nms(boxes, scores, numbers % groups, threshold).tolist() == positions
    assert nms(boxes, scores, numbers % groups, threshold, limit=3).tolist() == positions[:3]
    assert nms(boxes[:0], scores[:0], numbers[:0], threshold).tolist() == []


def test_overlaps():
    boxes = torch.tensor([[0.0, 0, 4, 4], [2, 0, 6, 4], [4, 0, 8, 4], [0, 0, 0, 0]])
    assert overlaps(boxes, boxes).tolist() == [
        pytest.approx(row) for row in ([1, 1 / 3, 0, 0], [1 / 3, 1, 1 / 3, 0], [0, 1 / 3, 1, 0], [0, 0, 0, 0])
    ]


def test_anchors_are_the_published_ones():
    # The table in the docstring of Detectron's generate_anchors: stride 16, sizes 128, 256, 512; whole pixels
    table = {128: [[-83, -39, 100, 56], [-55, -55, 72, 72], [-35, -79, 52, 96]],
             256: [[-175, -87, 192, 104], [-119, -119, 136, 136], [-79, -167, 96, 184]],
             512: [[-359, -183, 376, 200], [-247, -247, 264, 264], [-167, -343, 184, 360]]}  # fmt: skip
    # That table counts the first pixel as 1 and rounds away from it: its windows are 1 to the right of anchor - 0.5.
    for size, rows in table.items():
        anchors = regions.grid_anchors([(1, 1)] * 3, (size,) * 3, (0.5, 1.0, 2.0), CPU)[2]
        assert anchors.tolist() == (torch.tensor(rows) - torch.tensor([1.0, 1, 0, 0])).tolist()
    grid = regions.grid_anchors([(2, 3)], (128,), (1.0,), CPU)[0]
    assert grid[-1].tolist() == [8 + 2 - 64, 4 + 2 - 64, 8 + 2 + 64, 4 + 2 + 64]


def test_offsets_of_a_box_and_their_inverse():
    # Fast R-CNN's parametrization: the centre moves by 1/2 and 1/4 of the size, the sides grow by e and 1/e
    anchor, weights = torch.tensor([[0.0, 10, 8, 26]], dtype=torch.float64), (10.0, 10.0, 5.0, 5.0)
    box = torch.tensor([[8 - 4 * math.e, 22 - 8 / math.e, 8 + 4 * math.e, 22 + 8 / math.e]], dtype=torch.float64)
    assert encode(box, anchor, weights)[0].tolist() == pytest.approx([5, 2.5, 5, -5])
    torch.testing.assert_close(decode(encode(box, anchor, weights), anchor, weights), box)
    limited = decode(torch.tensor([[0.0, 0, 99, 99]]), torch.tensor([[0.0, 0, 16, 16]]), (1.0,) * 4)
    assert float(limited[0, 2] - limited[0, 0]) == pytest.approx(1000)


# -- matching, samples, proposals -------------------------------------------------------------------------


def test_boxes_are_matched_by_their_overlaps():
    # (objects, boxes); the last object is not there. Limits are 0.5 and 0.25, each reached by one box.
    quality = torch.tensor([[[0.5, 0.49, 0.25, 0.24, 0.0, 0.1], [0.2, 0.3, 0.1, 0.0, 0.0, 0.4], [0.9] * 6]])
    present, between, background = torch.tensor([[True, True, False]]), regions.BETWEEN, regions.BACKGROUND
    for allow_low_quality, matched in ((False, [0, between, between, background, background, between]),
                            (True, [0, between, between, background, background, 1])):  # fmt: skip
        assert regions.match(quality, present, 0.5, 0.25, allow_low_quality).tolist() == [matched]
        assert regions.match(quality, present & False, 0.5, 0.25, allow_low_quality).tolist() == [[background] * 6]


def test_samples_are_of_each_image_and_the_same_for_any_ranks():
    matched = torch.full((3, 400), regions.BACKGROUND)
    matched[0, :150], matched[1, :7], matched[2, 10:] = 0, 3, regions.BETWEEN
    usable = (torch.arange(400) < 390).expand(3, 400)
    samples = regions.sample(matched, usable, torch.tensor([1, 2, 3]), 64, 0.25)
    second = regions.sample(matched[1:2], usable[1:2], torch.tensor([2]), 64, 0.25)
    assert torch.equal(samples.positions[1:2], second.positions)
    assert (samples.positive.sum(1).tolist(), samples.filled.sum(1).tolist()) == ([16, 7, 0], [64, 64, 10])
    assert [len(row[filled].unique()) for row, filled in zip(samples.positions, samples.filled)] == [64, 64, 10]
    sampled, counted = regions.take(matched, samples.positions), samples.filled & ~samples.positive
    assert (sampled[samples.positive] >= 0).all() and regions.take(usable, samples.positions)[samples.filled].all()
    assert (sampled[counted] == regions.BACKGROUND).all()

    # MurmurHash3's fmix32, twice; recorded
    assert regions.keys(torch.tensor([0, 3]), 3).tolist() == [
        [0, 416914113, 372415169],
        [1959164913, 654911602, 1484202225],
    ]


def test_proposals_are_limited_by_level_and_over_the_batch():
    # Recorded from the rule of rpn/inference.py written as loops: 12 a level, 14 of the batch, overlap up to 0.4
    sizes = torch.tensor([[60.0, 50.0], [64.0, 40.0]])
    anchors = [boxes_of(30, 7).float(), boxes_of(8, 8).float()]
    scores = [torch.from_numpy(waves(2, len(boxes), phase=len(boxes))).float() for boxes in anchors]
    offsets = [torch.from_numpy(0.2 * waves(2, len(boxes), 4, phase=10)).float() for boxes in anchors]
    proposals = regions.propose(scores, offsets, anchors, sizes, regions.Limits(12, 14, True, 0.4))
    assert proposals.valid.sum(1).tolist() == [7, 7]
    assert [digest(boxes[valid]) for boxes, valid in zip(proposals.boxes, proposals.valid)] == [
        pytest.approx([43.18466, 14.32825], abs=1e-4), pytest.approx([38.89718, 15.87987], abs=1e-4)
    ]  # fmt: skip
    fewer = regions.propose(scores, offsets, anchors, sizes, regions.Limits(12, 5, False, 0.4))
    assert fewer.valid.sum(1).tolist() == [5, 5]


# -- RoIAlign and masks -----------------------------------------------------------------------------------


# Levels by LevelMapper, and digests of RoIAlignForward and RoIAlignBackwardFeature (ROIAlign_cuda.cu), which were
# evaluated point by point in float64
@pytest.mark.parametrize(
    ("edge", "levels", "pooled", "gradients"),
    [
        (
            0.0,
            [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 3],
            [-0.010532762349473234, -0.004525694389370096],
            [
                [-0.0003042769005148021, 0.0006801481996432437],
                [-0.004022434671589783, 0.0005067692390022116],
                [0.0122042392967651, 0.0015329460780478098],
                [-0.013417519105963296, -0.002231598107583918],
            ],
        ),
        (
            1.0,
            [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 3],
            [-0.014135740997882635, -0.007658973119107],
            [
                [-0.00030427690051480164, 0.00041667750237400135],
                [-0.004022434671589784, 0.00042751961323037415],
                [0.012204239296765099, 0.0015922302716912663],
                [-0.013417519105963296, -0.0022033070649178942],
            ],
        ),
    ],
)
def test_pooling_has_the_values_and_gradients_of_the_submitted_kernel(edge, levels, pooled, gradients):
    features = [torch.from_numpy(waves(2, 2, 20 >> n, 28 >> n, phase=n)).requires_grad_() for n in range(4)]
    boxes = torch.cat((boxes_of(8, 12, extent=45), torch.tensor(
        [[0.0, 0, 112, 112], [2, 1, 226, 225], [-30, -9, 4, 5], [100, 60, 190, 140], [5, 5, 5, 5], [3, 3, 500, 600]],
        dtype=torch.float64)))  # fmt: skip
    images, rois = torch.arange(len(boxes)) % 2, regions.to_inclusive(boxes, edge)
    assert operators.levels_of(rois, edge).tolist() == levels
    for align in (operators.roi_align, served.roi_align):
        values = align(features, rois, images, 3, edge)
        assert digest(values.detach()) == pytest.approx(pooled, abs=1e-12)
        parts = torch.autograd.grad((values * torch.from_numpy(waves(*values.shape, phase=2))).sum(), features)
        assert [digest(part) for part in parts] == [pytest.approx(value, abs=1e-12) for value in gradients]
    assert operators.roi_align(features, boxes[:0], images[:0], 3).shape == (0, 2, 3, 3)


def test_a_pixel_of_an_outline_is_drawn_if_its_middle_is_inside():
    # A triangle, a square with a square in the same object, an object without an outline; a RoI of 6 x 6 pixels
    triangle, square, small = (
        [[0.0, 0], [6, 0], [0, 6]],
        [[0.0, 0], [3, 0], [3, 3], [0, 3]],
        [[4.0, 4], [6, 4], [6, 6]],
    )
    objects = [[torch.tensor(polygon) for polygon in polygons] for polygons in ([triangle], [square, small], [])]
    rois = torch.tensor([[0.0, 0, 6, 6], [0, 0, 6, 6], [0, 0, 6, 6], [0, 0, 6, 6], [1, 2, 4, 5], [2, 2, 2, 2]])
    masks = operators.project_masks(operators.make_outlines(objects), rois, torch.tensor([0, 1, 2, -1, 0, 1]), 6)
    assert [["".join(".#"[pixel] for pixel in row) for row in mask.int().tolist()] for mask in masks] == [
        ["#####.", "####..", "###...", "##....", "#.....", "......"],
        ["###...", "###...", "###...", "......", "....##", ".....#"],
        ["......", "......", "......", "......", "......", "......"],
        ["......", "......", "......", "......", "......", "......"],
        ["#####.", "####..", "###...", "##....", "#.....", "......"],
        ["######", "######", "######", "######", "######", "######"],
    ]


# Recorded from the bilinear interpolation of a mask with a border of zeros, pixel by pixel in float64
@pytest.mark.parametrize(
    ("box", "area", "middle"),
    [
        ([3.2, 4.7, 20.1, 15.9], 115, [10.121739130434783, 10.130434782608695]),
        ([-5.0, -3.0, 9.0, 30.0], 137, [11.408759124087592, 3.372262773722628]),
        ([18.0, 9.0, 90.0, 40.0], 85, [17.08235294117647, 25.564705882352943]),
    ],
)
def test_masks_are_interpolated_between_the_middles_of_their_pixels(box, area, middle):
    drawn = evaluation.paste(waves(6, 6).astype(np.float32) / 2 + 0.5, np.array(box), 30, 24)
    assert drawn.shape == (24, 30) and drawn.sum() == area
    assert [axis.mean() for axis in np.nonzero(drawn)] == pytest.approx(middle)


# -- losses -----------------------------------------------------------------------------------------------

POSITIVE = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 1, 0]]).bool()
FILLED = torch.tensor([[1, 1, 1, 0, 1], [1, 1, 0, 1, 0]]).bool()


def test_binary_loss_is_the_mean_of_the_counted_samples():
    # Logits 0 and log 3: losses log 2, and log 4/3 or log 4
    logits = torch.tensor([[0.0, math.log(3), math.log(3), 9, 0], [0, math.log(3), 9, 0, 9]], dtype=torch.float64)
    masks, truth = torch.full((5, 2, 2), math.log(3), dtype=torch.float64), torch.zeros(5, 2, 2).bool()
    truth[0], truth[2, 0, 0] = True, True
    given = (logits, POSITIVE, FILLED), (masks, truth, POSITIVE[0]), (masks, truth, POSITIVE[0] & False)
    expected = (4 * math.log(2) + 2 * math.log(4) + math.log(4 / 3)) / 7, (5 * math.log(4 / 3) + 3 * math.log(4)) / 8, 0
    assert [float(model.binary_loss(*each)) for each in given] == pytest.approx(expected, rel=1e-12)


def test_a_box_without_area_changes_no_gradient():
    # Distances 0.1 and 0.2 with beta 0.1: 0.1 - 0.05 and 0.2 - 0.05 for each of 4 offsets, 7 samples are filled
    offsets = torch.from_numpy(waves(2, 5, 4))
    targets = offsets.clone()
    targets[0, 0], targets[0, 2] = offsets[0, 0] + 0.1, offsets[0, 2] - 0.2
    infinite = targets.masked_fill(~POSITIVE.unsqueeze(-1), math.inf)
    losses = [float(model.box_loss(offsets, infinite, POSITIVE, FILLED, beta)) for beta in (0.1, 1.0)]
    assert losses == pytest.approx([0.8 / 7, 0.1 / 7], rel=1e-9)
    offsets.requires_grad_()
    (gradient,) = torch.autograd.grad(model.box_loss(offsets, infinite, POSITIVE, FILLED, 1.0), offsets)
    assert gradient[0, [0, 2], 0].tolist() == pytest.approx([-0.1 / 7, 0.2 / 7]) and gradient.isfinite().all()


# -- order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_groups_its_own_images_by_aspect(ranks):
    sizes = np.rint(130 + 70 * waves(500, 2)).astype(int)
    sizes[::50] = 100  # squares
    resized = order.resize(sizes, 80, 133)
    shapes, chosen, seen = order.shapes(resized, 80, 133, 32), np.flatnonzero(np.arange(500) % 10)[:448], set()
    for rank in range(ranks):
        batches, next_epoch = (
            order.batches(resized, shapes, chosen, 4, 3, epoch, Ranks(rank, ranks, 0, 1, None)) for epoch in (0, 1)
        )
        assert len(batches) == len(next_epoch) == -(-len(chosen) // (4 * ranks)), "all ranks have as many"
        positions = [batch.positions.tolist() for batch in batches]
        assert positions != [batch.positions.tolist() for batch in next_epoch]
        assert sum(len(set(resized[batch, 0] > resized[batch, 1])) > 1 for batch in positions) <= 1
        assert all((resized[batch.positions][:, ::-1] <= batch.shape).all() for batch in batches)
        assert {batch.shape for batch in batches} <= set(order.all_shapes(80, 133, 32))
        seen.update(*positions)
    assert seen == set(chosen.tolist())
    evaluated = np.concatenate([batch.positions for batch in order.evaluation(shapes, 16)])
    assert sorted(evaluated.tolist()) == list(range(500))


def test_sizes_are_rounded_as_the_submitted_code_rounds():
    sizes = np.array([[640, 480], [480, 640], [500, 100]])
    assert order.resize(sizes, 800, 1333).tolist() == [[1066, 800], [800, 1066], [1335, 267]]


SAMPLES = Path(__file__).parents[2] / "samples" / "weights"


def test_a_pickle_of_python_2_is_read():
    """The format of R-50.pkl."""
    assert {name: array.tolist() for name, array in files.load(SAMPLES / "python2.pkl", "", "").items()} == {
        "conv1_w": [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]],
        "conv1_b": [0.5, -2],
    }


def test_detectrons_names_and_files_that_do_not_fit(tmp_path):
    config, path = MaskConfig(), tmp_path / "R-50.pkl"
    network = backbone.ResNet(config.stages, config.stem_width, config.stride_in_1x1, config.frozen_stages)
    names = [blob for _, *blobs in backbone._names(network, True) for blob in blobs]
    # As in the submitted logs of v0.6 and v0.7
    assert len(names) == 2 * 53 and {
        *("conv1_w", "res_conv1_bn", "res2_0_branch1_w", "res2_0_branch1_bn", "res3_3_branch2a_w"),
        *("res4_5_branch2b_bn", "res5_2_branch2c_w", "res5_2_branch2c_bn"),
    } < {*names}
    stem = np.ones((64, 3, 7, 7), np.float32)
    for wrong, words in (
        ({"conv1_w": stem}, "R-50.pkl has no res_conv1_bn_s"),
        ({"conv1_w": stem[:2]}, "conv1_w has the shape (2, 3, 7, 7), this backbone needs (64, 3, 7, 7)"),
        ({"blobs": {}}, "has no conv1.weight"),
    ):
        path.write_bytes(pickle.dumps(wrong, 2))
        with pytest.raises(Problem, match="(?s)" + re.escape(words) + ".*set backbone=FILE"):
            backbone.load_file(network, path)


def test_a_command_in_a_file_is_not_executed(tmp_path):
    class Command:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    for name in ("bad.pkl", "bad.pth"):
        (tmp_path / name).write_bytes(pickle.dumps({"a": Command()}, 2))
    only_tensors = "in torch.load, which reads tensors only"
    for path, words in (
        (tmp_path / "bad.pkl", "it names posix.system"),
        (tmp_path / "bad.pth", only_tensors),
        (SAMPLES / "tar_2016.pth", only_tensors),  # the format of resnet34-333f7ec4.pth
    ):
        with pytest.raises(Problem, match=f"cannot be read as weights.*{words}"):
            files.load(path, "weights", "give others")
    assert not (tmp_path / "ran").exists()
