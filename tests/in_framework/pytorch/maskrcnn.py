"""Mask R-CNN against recorded values of the submitted formulas: parts, network, precisions, shapes and operators."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.detection.pytorch.boxes import Found, decode, encode, overlaps
from benchmarks.detection.pytorch.operators import nms
from benchmarks.maskrcnn import order
from benchmarks.maskrcnn.events import Rates
from benchmarks.maskrcnn.pytorch import backbone, evaluation, model, operators, regions, served
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import EvaluationBatch, read_objects, synthetic_batch
from benchmarks.maskrcnn.pytorch.evaluation import in_images
from benchmarks.maskrcnn.pytorch.regions import Limits, propose
from benchmarks.maskrcnn.pytorch.train import EDGES, build, train_step, whole_step
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
def test_suppression_keeps_the_recorded_boxes(groups, threshold, positions):
    boxes, numbers = boxes_of(40), torch.arange(40)
    scores = -(numbers % 5).float()  # ties: the first one stays
    assert nms(boxes, scores, numbers % groups, threshold).tolist() == positions
    assert nms(boxes, scores, numbers % groups, threshold, limit=3).tolist() == positions[:3]
    assert nms(boxes[:0], scores[:0], numbers[:0], threshold).tolist() == []


def test_suppression_and_overlaps_at_the_threshold():
    boxes = torch.tensor([[0.0, 0, 4, 4], [2, 0, 6, 4], [4, 0, 8, 4], [0, 0, 0, 0]])
    assert overlaps(boxes, boxes).tolist() == [
        pytest.approx(row) for row in ([1, 1 / 3, 0, 0], [1 / 3, 1, 1 / 3, 0], [0, 1 / 3, 1, 0], [0, 0, 0, 0])
    ]
    kept = [nms(boxes, torch.ones(4), torch.zeros(4).long(), limit).tolist() for limit in (0.3, 1 / 3 + 1e-6)]
    assert kept == [[0, 2, 3], [0, 1, 2, 3]]


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
    half_width, half_height = 4 * math.e, 8 / math.e
    box = torch.tensor([[8 - half_width, 22 - half_height, 8 + half_width, 22 + half_height]], dtype=torch.float64)
    assert encode(box, anchor, weights)[0].tolist() == pytest.approx([5, 2.5, 5, -5])
    boxes, anchors = boxes_of(40, 3), boxes_of(40, 4)
    torch.testing.assert_close(decode(encode(boxes, anchors, weights), anchors, weights), boxes)
    limited = decode(torch.tensor([[0.0, 0, 99, 99]]), torch.tensor([[0.0, 0, 16, 16]]), (1.0,) * 4)
    assert float(limited[0, 2] - limited[0, 0]) == pytest.approx(1000)


# -- matching, samples, proposals -------------------------------------------------------------------------


def test_boxes_are_matched_by_their_overlaps():
    # (objects, boxes); the last object is not there. Limits are 0.5 and 0.25, each reached by one box.
    quality = torch.tensor([[[0.5, 0.49, 0.25, 0.24, 0.0, 0.1], [0.2, 0.3, 0.1, 0.0, 0.0, 0.4], [0.9] * 6]])
    present, between, background = torch.tensor([[True, True, False]]), regions.BETWEEN, regions.BACKGROUND
    for rescue, matched in ((False, [0, between, between, background, background, between]),
                            (True, [0, between, between, background, background, 1])):  # fmt: skip
        assert regions.match(quality, present, 0.5, 0.25, rescue).tolist() == [matched]
        assert regions.match(quality, present & False, 0.5, 0.25, rescue).tolist() == [[background] * 6]


def test_samples_are_of_each_image_and_the_same_for_any_ranks():
    matched = torch.full((3, 400), regions.BACKGROUND)
    matched[0, :150], matched[1, :7], matched[2, 10:] = 0, 3, regions.BETWEEN
    usable = (torch.arange(400) < 390).expand(3, 400)
    samples, others = (regions.sample(matched, usable, torch.tensor([1, seed, 3]), 64, 0.25) for seed in (2, 5))
    second = regions.sample(matched[1:2], usable[1:2], torch.tensor([2]), 64, 0.25)
    assert samples.positive.sum(1).tolist() == [16, 7, 0]
    assert samples.filled.sum(1).tolist() == [64, 64, 10]
    assert [len(row[filled].unique()) for row, filled in zip(samples.positions, samples.filled)] == [64, 64, 10]
    sampled = regions.take(matched, samples.positions)
    assert (sampled[samples.positive] >= 0).all() and regions.take(usable, samples.positions)[samples.filled].all()
    assert (sampled[samples.filled & ~samples.positive] == regions.BACKGROUND).all()
    assert torch.equal(samples.positions[0], others.positions[0])
    assert torch.equal(samples.positions[1:2], second.positions)
    assert not torch.equal(samples.positions[1], others.positions[1])
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
    proposals = propose(scores, offsets, anchors, sizes, Limits(12, 14, True, 0.4))
    assert proposals.valid.sum(1).tolist() == [7, 7]
    boxes = [proposals.boxes[image][proposals.valid[image]] for image in (0, 1)]
    assert [digest(image) for image in boxes] == [
        pytest.approx(value, abs=1e-4) for value in [[43.18466, 14.32825], [38.89718, 15.87987]]
    ]
    assert propose(scores, offsets, anchors, sizes, Limits(12, 5, False, 0.4)).valid.sum(1).tolist() == [5, 5]


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
    images, rois = torch.arange(len(boxes)) % 2, regions.sampled(boxes, edge)
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
    masks = operators.project_masks(operators.outlines_of(objects), rois, torch.tensor([0, 1, 2, -1, 0, 1]), 6)
    drawn = [["".join(".#"[pixel] for pixel in row) for row in mask.int().tolist()] for mask in masks]
    assert drawn == [
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
    expected = (4 * math.log(2) + 2 * math.log(4) + math.log(4 / 3)) / 7
    assert float(model.binary_loss(logits, POSITIVE, FILLED)) == pytest.approx(expected, rel=1e-12)
    masks, truth = torch.full((5, 2, 2), math.log(3), dtype=torch.float64), torch.zeros(5, 2, 2).bool()
    truth[0], truth[2, 0, 0] = True, True
    expected = (4 * math.log(4 / 3) + math.log(4 / 3) + 3 * math.log(4)) / 8
    assert float(model.binary_loss(masks, truth, POSITIVE[0])) == pytest.approx(expected, rel=1e-12)
    none = torch.zeros_like(POSITIVE)
    assert float(model.binary_loss(logits, none, none)) == float(model.binary_loss(masks, truth, none[0])) == 0


def test_a_box_without_area_changes_no_gradient():
    # Distances 0.1 and 0.2 with beta 0.1: 0.1 - 0.05 and 0.2 - 0.05 for each of 4 offsets, 7 samples are filled
    offsets = torch.from_numpy(waves(2, 5, 4))
    targets = offsets.clone()
    targets[0, 0], targets[0, 2], targets[1, 4] = offsets[0, 0] + 0.1, offsets[0, 2] - 0.2, 9.0
    infinite = targets.masked_fill(~POSITIVE.unsqueeze(-1), math.inf)
    for wanted in (targets, infinite):
        assert float(model.box_loss(offsets, wanted, POSITIVE, FILLED, 0.1)) == pytest.approx(0.8 / 7, rel=1e-9)
        assert float(model.box_loss(offsets, wanted, POSITIVE, FILLED, 1.0)) == pytest.approx(0.1 / 7, rel=1e-9)
    offsets.requires_grad_()
    (gradient,) = torch.autograd.grad(model.box_loss(offsets, infinite, POSITIVE, FILLED, 1.0), offsets)
    assert gradient[0, [0, 2], 0].tolist() == pytest.approx([-0.1 / 7, 0.2 / 7]) and gradient.isfinite().all()


# -- order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_groups_its_own_images_by_aspect(ranks):
    sizes = np.rint(130 + 70 * waves(500, 2)).astype(int)
    sizes[::50] = 100  # squares
    resized = order.resized(sizes, 80, 133)
    shapes = order.shapes(resized, 80, 133, 32)
    chosen, seen = np.flatnonzero(np.arange(500) % 10), set()
    for rank in range(ranks):
        share = Ranks(rank, ranks, 0, 1, None)
        batches, next_epoch = (order.batches(resized, shapes, chosen, 4, 3, epoch, share) for epoch in (0, 1))
        assert len(batches) == len(next_epoch) == -(-len(chosen) // (4 * ranks)), "all ranks have as many"
        assert [batch.positions.tolist() for batch in batches] != [batch.positions.tolist() for batch in next_epoch]
        assert sum(len(set(resized[b.positions, 0] > resized[b.positions, 1])) > 1 for b in batches) <= 1
        # A batch's first image is the first of its group that no batch before has; batches come in that order
        mine = np.resize(np.random.RandomState([3, 0]).permutation(chosen), -(-450 // ranks) * ranks)
        mine = mine[rank * -(-450 // ranks) :][: -(-450 // ranks)].tolist()
        firsts = [mine.index(batch.positions[0]) for batch in batches]
        assert firsts == sorted(firsts) and mine[0] == batches[0].positions[0]
        assert all((resized[batch.positions][:, ::-1] <= batch.shape).all() for batch in batches)
        assert {batch.shape for batch in batches} <= set(order.all_shapes(80, 133, 32))
        seen.update(*(batch.positions.tolist() for batch in batches))
    assert seen == set(chosen.tolist())
    evaluated = np.concatenate([batch.positions for batch in order.evaluation(shapes, 16)])
    assert sorted(evaluated.tolist()) == list(range(500))


def test_sizes_are_rounded_as_the_submitted_code_rounds():
    sizes = np.array([[640, 480], [480, 640], [500, 100]])
    assert order.resized(sizes, 800, 1333).tolist() == [[1066, 800], [800, 1066], [1335, 267]]


# -- cuDNN ------------------------------------------------------------------------------------------------


def test_evaluation_runs_without_cudnn_benchmark(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # as frameworks/pytorch.py sets it
    settings = []

    def interrupt(batches):
        settings.append(torch.backends.cudnn.benchmark)
        raise KeyboardInterrupt

    run = SimpleNamespace(interruptible=interrupt, ranks=None)
    monkeypatch.setattr(evaluation, "evaluation_input", lambda *_: ())
    with pytest.raises(KeyboardInterrupt):
        evaluation.detections(SimpleNamespace(config=SimpleNamespace(threads=1)), None, run)
    assert (settings, torch.backends.cudnn.benchmark) == ([False], True)


torch.set_num_threads(1)
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))
CONFIG = Config(device="cpu", precision="fp32", stages=(1, 1, 1, 1), stem_width=8, frozen_stages=0, fpn_width=16,
                box_width=16, mask_width=16, mask_layers=1, anchor_sizes=(8, 16, 24, 32, 48), anchors_per_image=32,
                rpn_pre_nms_top_n=40, rpn_pre_nms_top_n_test=20, rpn_post_nms_top_n=60, rpn_post_nms_top_n_test=15,
                rois_per_image=16, detections=5, batch_size=2, optimizer_kernel="fused", gradient_clip=3.0,
                learning_rate=0.02, warmup_steps=0, pixel_mean=(120.0,) * 3, pixel_std=(57.0,) * 3, short_side=64,
                long_side=96, bucket_step=32, warm_up_steps=0, objects=6, score_threshold=0.01)  # fmt: skip
SHAPE = (64, 96)
RATES = Rates(0.01, 0.02)


def noise(shape=SHAPE, **options):
    return synthetic_batch(CONFIG, 5, shape, ALONE.context, **options)


def train(**changes):
    # A training after five steps on one batch, and their losses
    training = build(dataclasses.replace(CONFIG, **changes), 5, ALONE, {})
    return training, [float(train_step(training, noise(), RATES)) for _ in range(5)]


@pytest.fixture(scope="module")
def plain():
    return train()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_precision_trains_and_detects(plain, precision):
    scaled = {"precision": precision, "loss_scale": 1024.0, "loss_scale_interval": 3}
    training, losses = train(**scaled)
    assert losses[-1] < 0.8 * losses[0]
    assert losses == pytest.approx(plain[1], rel=0.2) and losses != plain[1], "proposals depend on the last bits"
    batch = noise()
    found, masks = training.model.detect(batch.images, batch.sizes)
    assert masks.shape == (len(found.images), 28, 28) and masks.isfinite().all()
    for image in range(2):
        scores = found.scores[found.images == image].tolist()
        assert scores == sorted(scores, reverse=True) and len(scores) <= 5
    # The warm-up changes neither the training nor the dynamic scale.
    assert train(**scaled, warm_up_steps=2)[1] == losses


def test_fixed_shapes_of_gpus_give_the_same_losses(plain, monkeypatch):
    # Empty slots and unused proposals change no loss
    model = plain[0].model
    losses = model.losses(noise())
    monkeypatch.setattr(model, "is_static", True)
    torch.testing.assert_close(model.losses(noise()), losses)


class SyncCounter(TorchDispatchMode):
    # Records operators for which Python would wait for a GPU, because it reads values or sizes of the results
    # lift_fresh: numbers of Python that become a tensor, and would be copied to the GPU
    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "repeat_interleave", "unique",
             "lift_fresh")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.names, self.count = set(), 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        self.count += 1
        indices = arguments[1] if name in ("index", "index_put", "index_put_") else ()
        has_mask = any(torch.is_tensor(index) and index.dtype is torch.bool for index in indices)
        if name in self.NAMES or name.startswith("unique") or has_mask:
            self.names.add(name)
        return function(*arguments, **(options or {}))


def gpu_training(precision):
    # A training with fixed shapes, rates in tensors and kernels hidden from PyTorch, like on a GPU
    def hide(operator):
        def call(*values):
            with _disable_current_modes():
                return operator(*values)

        return call

    training = build(dataclasses.replace(CONFIG, precision=precision, loss_scale=1024.0), 5, ALONE, {})
    training.model.is_static, training.rates = True, [torch.zeros(()), torch.zeros(())]
    chosen = training.model.operators
    training.model.operators = chosen._replace(**{name: hide(getattr(chosen, name)) for name in chosen._fields[1:5]})
    return training


def test_a_step_on_a_gpu_does_not_wait_for_the_device():
    training, batch, names = gpu_training("fp16"), noise(), {}
    train_step(training, batch, RATES)  # creates the state that later steps use
    for training.model.is_static in (True, False):
        with SyncCounter() as syncs:
            whole_step(training, *batch)
        names[training.model.is_static] = syncs.names
    assert names == {True: set(), False: {"_local_scalar_dense", "nonzero"}}, "the counter works in the second step"
    assert syncs.count > 500


def test_graph_holds_batches_with_any_number_of_edges():
    # Memory as a graph has it: outlines with more room, rates in tensors, rests of the batch before
    losses = {}
    for in_memory in (False, True):
        training, losses[in_memory], memory = gpu_training("fp32"), [], noise(edges=100)
        for objects, rate in ((6, 0.0), (3, 0.02), (4, 0.01)):
            batch = noise(objects=objects)
            for tensor, new in zip(memory, batch, strict=True):
                tensor[: len(new)].copy_(new)
            losses[in_memory].append(float(train_step(training, memory if in_memory else batch, Rates(rate, 2 * rate))))
    assert losses[True] == losses[False]
    training.graphs[SHAPE] = lambda *batch: -1.0
    batches = (noise(edges=EDGES), noise(edges=EDGES + 1), noise((96, 64)))
    assert [train_step(training, batch, RATES) == -1 for batch in batches] == [True, False, False]


def test_weights_and_biases_have_different_rates():
    distances = {}
    for rates in (Rates(0.01, 0.0), Rates(0.0, 0.01), Rates(0.0, 0.02)):
        training = build(dataclasses.replace(CONFIG, gradient_clip=0.0), 5, ALONE, {})
        before = [parameter.detach().double() for parameter in training.network.parameters()]
        train_step(training, noise(), rates)
        sums = distances[rates] = {True: 0.0, False: 0.0}
        for old, new in zip(before, training.network.parameters(), strict=True):
            sums[new.dim() == 1] += float((new.detach().double() - old).norm())
    (biases, weights), (slow, fixed), (fast, also_fixed) = (sums.values() for sums in distances.values())
    assert weights > 0 and slow > 0 and biases == fixed == also_fixed == 0
    assert fast == pytest.approx(2 * slow, rel=1e-3)


# -- backbone ---------------------------------------------------------------------------------------------


def test_pixels_are_doubled_as_interpolated():
    x = torch.from_numpy(waves(2, 5, 3, 4)).to(memory_format=torch.channels_last).requires_grad_()
    outputs = [backbone.doubled(x), functional.interpolate(x, size=(6, 8), mode="nearest")]
    assert torch.equal(*outputs)
    torch.testing.assert_close(
        *(torch.autograd.grad((y * torch.from_numpy(waves(*y.shape))).sum(), x) for y in outputs)
    )


def test_frozen_stages_are_not_trained():
    changes = {"frozen_stages": 2}
    first = build(dataclasses.replace(CONFIG, **changes), 5, ALONE, {}).network.backbone.state_dict()
    after = train(**changes)[0].network.backbone.state_dict()
    same = {name for name in first if torch.equal(first[name], after[name]) and not name.endswith("scale")}
    assert same == {name for name in first if name.startswith(("conv1.", "layers.0.")) and not name.endswith("scale")}


@torch.no_grad()
def test_batch_norm_of_either_file_is_folded():
    # One for each convolution, in a file of torchvision's and one of Detectron's. Digests of the stages are recorded
    # from the blocks of torchvision.models.resnet with PyTorch's convolutions and batch norms in float64
    networks = [backbone.ResNet((1, 1, 1, 1), 4, False, 0).double() for _ in range(2)]
    torchvision, detectron = {}, {}
    names = zip(*(backbone._names(networks[0], is_detectron) for is_detectron in (False, True)), strict=True)
    for phase, ((ours, weight, norm), (_, blob, affine)) in enumerate(names):
        shape = networks[0].get_submodule(ours).weight.shape
        torchvision[weight] = detectron[blob] = torch.from_numpy(0.2 * waves(*shape, phase=phase))
        gamma, beta, mean, variance = torch.from_numpy(waves(4, shape[0], phase=phase))
        variance = variance / 2 + 1
        values = {"weight": gamma, "bias": beta, "running_mean": mean, "running_var": variance}
        torchvision.update({f"{norm}.{name}": value for name, value in values.items()})
        scale = detectron[f"{affine}_s"] = gamma / (variance + 1e-5).sqrt()
        detectron[f"{affine}_b"] = beta - mean * scale
    for network, weights in zip(networks, (torchvision, detectron), strict=True):
        backbone.load(network, weights)
        stages = [digest(stage) for stage in network(torch.from_numpy(waves(1, 3, 32, 32)))]
        assert stages == [
            pytest.approx(value, rel=1e-9)
            for value in [
                [0.27369939488, -0.0018448867252],
                [0.71370802487, 0.011835256328],
                [0.77382576433, 0.13687651812],
                [0.85413145906, 0.018040212575],
            ]
        ]
        assert not network.conv1.shift.requires_grad


# -- operators --------------------------------------------------------------------------------------------


class Operators:
    # Stand-in for torchvision.ops, computed by ours
    factor = 1.0
    batched_nms = staticmethod(nms)

    @classmethod
    def roi_align(cls, feature, rois, bins, scale, samples, aligned):
        assert samples == 2 and not aligned
        height, width = feature.shape[2:]
        sides = [torch.full((len(rois),), side) for side in (height, width)]
        placed = operators.Placed(rois[:, 0].long() * height * width, *sides, torch.full_like(rois[:, 0], scale))
        rows, weights = operators.taps(rois[:, 1:], placed, bins)
        values = operators.pixels([feature])[rows] * weights.unsqueeze(-1).to(feature.dtype)
        return cls.factor * values.sum(3).permute(0, 3, 1, 2)


class WrongOperators(Operators):
    factor = 1.1


def test_torchvision_is_used_where_it_is_right(monkeypatch):
    names = operators.choose(dataclasses.replace(CONFIG, kernels="torchvision"), ALONE, {}, Operators).names
    assert names == {
        "suppression": "torchvision", "matching": "plain", "roi_align": "torchvision", "project_masks": "plain"
    }  # fmt: skip
    for name, function in operators.torchvision_operators(Operators).items():
        assert kernels.distance_of(operators.EVERY[name], function, ALONE.context, torch.float32) < 2e-5
    assert operators.choose(CONFIG, ALONE, {}, WrongOperators).names["roi_align"] == "plain"
    assert operators.choose(CONFIG, ALONE, names, Operators).names == names, "of a checkpoint"
    monkeypatch.setattr(operators, "find_torchvision", lambda: None)
    with pytest.raises(
        ValueError, match="written with torchvision's roi_align, suppression, which is not here: resume"
    ):
        operators.choose(CONFIG, ALONE, names)


# -- corners ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inclusive", [True, False])
def test_boxes_are_pooled_and_drawn_to_their_last_pixel(inclusive):
    training = build(dataclasses.replace(CONFIG, inclusive_corners=inclusive), 5, ALONE, {})
    model, pooled, drawn, rois = training.model, [], [], []
    chosen, sampled = model.operators, model._sampled

    def align(levels, rois, images, bins, edge):
        pooled.append(rois)
        assert edge == inclusive
        return chosen.roi_align(levels, rois, images, bins, edge)

    def project(outlines, rois, objects, size):
        drawn.append(rois)
        return chosen.project_masks(outlines, rois, objects, size)

    model.operators = chosen._replace(roi_align=align, project_masks=project)
    model._sampled = lambda *given: rois.append(sampled(*given)) or rois[0]
    batch = noise()
    model.losses(batch)
    model.detect(batch.images, batch.sizes)
    cut = rois[0].boxes.flatten(0, 1) - pooled[0]
    torch.testing.assert_close(cut, torch.tensor([0.0, 0, inclusive, inclusive]).expand_as(cut))
    assert len(pooled) == 4 and torch.equal(drawn[0], pooled[1])


# Boxes and the first outline, recorded from maskrcnn_benchmark's BoxList: resized by 2.5, without mirror and with it
RESIZED = {
    False: (
        [
            [25.0, 50.0, 98.5, 148.5],
            [0.0, 0.0, 248.5, 198.5],
            [225.0, 175.0, 248.5, 198.5],
            [8.125, 18.75, 22.875, 22.875],
        ],
        [[25.0, 50.0], [100.0, 50.0], [62.5, 150.0]],
    ),
    True: (
        [
            [151.5, 50.0, 225.0, 148.5],
            [1.5, 0.0, 250.0, 198.5],
            [1.5, 175.0, 25.0, 198.5],
            [227.125, 18.75, 241.875, 22.875],
        ],
        [[224.0, 50.0], [149.0, 50.0], [186.5, 150.0]],
    ),
}


@pytest.mark.parametrize("mirrored", [False, True])
def test_objects_are_resized_and_mirrored_as_the_submitted_boxes(mirrored):
    # And detections back in the original image
    given = np.array([[10.0, 20, 30, 40], [0, 0, 100, 80], [90, 70, 30, 30], [5, 5, 0.5, 9], [3.25, 7.5, 6.5, 2.25]])
    outline = np.array([[10.0, 20], [40, 20], [25, 60]], np.float32)
    part = SimpleNamespace(offsets=[0, 5], crowds=[False] * 5, sizes=np.array([[100, 80]], np.int32),
                           boxes=given.astype(np.float32), labels=np.arange(1, 6), image_ids=[7],
                           polygons=lambda number: [outline])  # fmt: skip
    objects = read_objects(part, 0, (250, 200), mirrored, CONFIG)
    boxes, polygon = RESIZED[mirrored]
    assert objects.boxes == pytest.approx(np.array(boxes), abs=1e-4)
    assert objects.labels.tolist() == [1, 2, 3, 5]
    assert objects.polygons[0][0] == pytest.approx(np.array(polygon), abs=1e-4)
    if not mirrored:
        # The last one is in an image that fills the batch.
        images, labels = torch.tensor([0, 0, 0, 0, 1]), torch.arange(1, 6)
        detected = Found(images, torch.from_numpy(objects.boxes)[[0, 1, 2, 3, 0]], torch.ones(5), labels)
        batch = EvaluationBatch(None, torch.tensor([[250.0, 200], [96, 64]]), np.array([0]))
        originals = in_images(SimpleNamespace(val=part), batch, detected, np.ones((5, 28, 28), np.float32), 1.0)
        assert originals.boxes[[0, 1, 3]] == pytest.approx(given[[0, 1, 4]], abs=1e-4)
        assert (originals.images.tolist(), originals.labels.tolist(), len(originals.masks)) == (
            [7] * 4,
            [1, 2, 3, 4],
            4,
        )
