"""Mask R-CNN's network: precisions, shapes, trained weights, operators, and what a GPU would wait for."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.detection.pytorch.boxes import Found
from benchmarks.detection.pytorch.operators import nms
from benchmarks.maskrcnn.events import Rates
from benchmarks.maskrcnn.pytorch import backbone, operators
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import EvaluationBatch, read_objects, synthetic_batch
from benchmarks.maskrcnn.pytorch.evaluation import in_images
from benchmarks.maskrcnn.pytorch.train import EDGES, build, train_step, whole_step

torch.set_num_threads(1)
CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
CONFIG = Config(device="cpu", precision="fp32", stages=(1, 1, 1, 1), stem_width=8, frozen_stages=0, fpn_width=16,
                box_width=16, mask_width=16, mask_layers=1, anchor_sizes=(8, 16, 24, 32, 48), anchors_per_image=32,
                rpn_pre_nms_top_n=40, rpn_pre_nms_top_n_test=20, rpn_post_nms_top_n=60, rpn_post_nms_top_n_test=15,
                rois_per_image=16, detections=5, batch_size=2, optimizer_kernel="fused", gradient_clip=3.0,
                learning_rate=0.02, warmup_steps=0, pixel_mean=(120.0,) * 3, pixel_std=(57.0,) * 3, short_side=64,
                long_side=96, bucket_step=32, warm_up_steps=0, objects=6, score_threshold=0.01)  # fmt: skip
SHAPE = (64, 96)
RATES = Rates(0.01, 0.02)


def noise(shape=SHAPE, **options):
    return synthetic_batch(CONFIG, 5, shape, CPU.context, **options)


def trained(**changes):
    # A training after five steps on one batch, and their losses
    training = build(dataclasses.replace(CONFIG, **changes), 5, CPU, {})
    return training, [float(train_step(training, noise(), RATES)) for _ in range(5)]


@pytest.fixture(scope="module")
def plain():
    return trained()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_precision_trains_and_detects(plain, precision):
    scaled = {"precision": precision, "loss_scale": 1024.0, "loss_scale_interval": 3}
    training, losses = trained(**scaled)
    assert losses[-1] < 0.8 * losses[0]
    assert losses == pytest.approx(plain[1], rel=0.2) and losses != plain[1], "proposals depend on the last bits"
    batch = noise()
    found, masks = training.model.detect(batch.images, batch.sizes)
    assert masks.shape == (len(found.images), 28, 28) and masks.isfinite().all()
    for image in range(2):
        scores = found.scores[found.images == image].tolist()
        assert scores == sorted(scores, reverse=True) and len(scores) <= 5
    # What is trained before the clock changes nothing behind it, the dynamic scale neither.
    assert trained(**scaled, warm_up_steps=2)[1] == losses


def test_fixed_shapes_of_gpus_give_the_same_losses(plain, monkeypatch):
    # Empty slots and unused proposals change no loss
    model = plain[0].model
    losses = model.losses(noise())
    monkeypatch.setattr(model, "is_static", True)
    torch.testing.assert_close(model.losses(noise()), losses)


class Waits(TorchDispatchMode):
    # Notes the operators for which Python would wait for a GPU: their results, or the sizes of them, are needed
    # lift_fresh: numbers of Python that become a tensor, and would be copied to the GPU
    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "repeat_interleave", "unique",
             "lift_fresh")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.found, self.count = set(), 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        self.count += 1
        places = arguments[1] if name in ("index", "index_put", "index_put_") else ()
        of_bools = any(torch.is_tensor(place) and place.dtype is torch.bool for place in places)
        if name in self.NAMES or name.startswith("unique") or of_bools:
            self.found.add(name)
        return function(*arguments, **(options or {}))


def on_a_gpu(precision):
    # What a GPU trains with, as far as a CPU can: fixed shapes, rates in tensors, kernels hidden from PyTorch
    def hidden(operator):
        def call(*given):
            with _disable_current_modes():
                return operator(*given)

        return call

    made = build(dataclasses.replace(CONFIG, precision=precision, loss_scale=1024.0), 5, CPU, {})
    made.model.is_static, made.rates = True, [torch.zeros(()), torch.zeros(())]
    chosen = made.model.operators
    made.model.operators = chosen._replace(**{name: hidden(getattr(chosen, name)) for name in chosen._fields[1:5]})
    return made


def test_step_on_a_gpu_waits_for_nothing():
    training = on_a_gpu("fp16")
    batch, found = noise(), {}
    train_step(training, batch, RATES)  # makes what is kept from one step to the next one
    for training.model.is_static in (True, False):
        with Waits() as watch:
            whole_step(training, *batch)
        found[training.model.is_static] = watch.found
    assert found == {True: set(), False: {"_local_scalar_dense", "nonzero"}}, "the second shows that the watch sees"
    assert watch.count > 500


def test_graph_holds_batches_with_any_number_of_edges():
    # Memory as a graph has it: outlines with more room, rates in tensors, what a shorter batch leaves behind
    made = {}
    for held in (False, True):
        training, made[held] = on_a_gpu("fp32"), []
        memory = noise(edges=100)
        for objects, rate in ((6, 0.0), (3, 0.02), (4, 0.01)):
            batch = noise(objects=objects)
            if held:
                for place, new in zip(memory, batch, strict=True):
                    place[: len(new)].copy_(new)
                batch = memory
            made[held].append(float(train_step(training, batch, Rates(rate, 2 * rate))))
    assert made[True] == made[False]
    training.graphs[SHAPE] = lambda *batch: -1.0
    batches = (noise(edges=EDGES), noise(edges=EDGES + 1), noise((96, 64)))
    assert [train_step(training, each, RATES) == -1 for each in batches] == [True, False, False]


def test_weights_and_biases_have_rates_of_their_own():
    moved = []
    for rates in (Rates(0.01, 0.0), Rates(0.0, 0.01), Rates(0.0, 0.02)):
        training = build(dataclasses.replace(CONFIG, gradient_clip=0.0), 5, CPU, {})
        before = [each.detach().double().clone() for each in training.network.parameters()]
        train_step(training, noise(), rates)
        far = [float((a.detach().double() - b).norm()) for a, b in zip(training.network.parameters(), before)]
        moved.append([sum(x for x, b in zip(far, before) if (b.dim() == 1) == is_bias) for is_bias in (False, True)])
    (weights, none), (fixed, biases), (also_fixed, twice) = moved
    assert weights > 0 and biases > 0 and none == fixed == also_fixed == 0
    assert twice == pytest.approx(2 * biases, rel=1e-3)


# -- backbone ---------------------------------------------------------------------------------------------


def test_pixels_are_doubled_as_interpolated():
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    weights = torch.randn(2, 5, 6, 8, dtype=torch.float64)
    found = [backbone.doubled(x), functional.interpolate(x, size=(6, 8), mode="nearest")]
    assert torch.equal(*found)
    torch.testing.assert_close(*(torch.autograd.grad((each * weights).sum(), x)[0] for each in found))


def test_frozen_stages_are_not_trained():
    changes = {"frozen_stages": 2}
    first = build(dataclasses.replace(CONFIG, **changes), 5, CPU, {}).network.backbone.state_dict()
    after = trained(**changes)[0].network.backbone.state_dict()
    same = {name for name in first if torch.equal(first[name], after[name]) and not name.endswith("scale")}
    assert same == {name for name in first if name.startswith(("conv1.", "layers.0.")) and not name.endswith("scale")}


def test_batch_norm_of_either_file_is_folded():
    # Batch-norm behind each convolution, for a file of torchvision's and one of Detectron's
    torch.manual_seed(5)
    networks = [backbone.ResNet((1, 1, 1, 1), 4, False, 0).double() for _ in range(2)]
    theirs, detectron = {}, {}
    names = zip(*(backbone._names(networks[0], way) for way in (False, True)), strict=True)
    for (ours, weight, norm), (_, blob, affine) in names:
        shape = networks[0].get_submodule(ours).weight.shape
        theirs[weight] = detectron[blob] = torch.randn(shape, dtype=torch.float64) * 0.2
        for name in ("weight", "bias", "running_mean"):
            theirs[f"{norm}.{name}"] = torch.randn(shape[0], dtype=torch.float64)
        theirs[f"{norm}.running_var"] = torch.rand(shape[0], dtype=torch.float64) + 0.5
        scale = detectron[f"{affine}_s"] = theirs[f"{norm}.weight"] / (theirs[f"{norm}.running_var"] + 1e-5).sqrt()
        detectron[f"{affine}_b"] = theirs[f"{norm}.bias"] - theirs[f"{norm}.running_mean"] * scale
    for network, given in zip(networks, (theirs, detectron)):
        backbone.load(network, given)

    def layer(x, name, norm, *options):
        values = [theirs[f"{norm}.{each}"] for each in ("running_mean", "running_var", "weight", "bias")]
        return functional.batch_norm(functional.conv2d(x, theirs[f"{name}.weight"], None, *options), *values, eps=1e-5)

    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    y, wanted = functional.max_pool2d(layer(x, "conv1", "bn1", 2, 3).relu(), 3, 2, 1), []
    for stage, stride in enumerate((1, 2, 2, 2), start=1):
        at = f"layer{stage}.0."
        a = layer(y, f"{at}conv1", f"{at}bn1").relu()
        b = layer(a, f"{at}conv2", f"{at}bn2", stride, 1).relu()
        shortcut = layer(y, f"{at}downsample.0", f"{at}downsample.1", stride)
        y = (layer(b, f"{at}conv3", f"{at}bn3") + shortcut).relu()
        wanted.append(y)
    for network in networks:
        torch.testing.assert_close(network(x), wanted)
        assert not network.conv1.shift.requires_grad


# -- operators --------------------------------------------------------------------------------------------


class Operators:
    # torchvision.ops, for which ours stand
    @staticmethod
    def batched_nms(boxes, scores, groups, threshold):
        return nms(boxes, scores, groups, threshold)

    @staticmethod
    def roi_align(feature, rois, bins, scale, samples, aligned):
        assert samples == 2 and not aligned
        height, width = feature.shape[2:]
        sides = [torch.full((len(rois),), side) for side in (height, width)]
        where = operators.Placed(rois[:, 0].long() * height * width, *sides, torch.full_like(rois[:, 0], scale))
        places, weights = operators.taps(rois[:, 1:], where, bins)
        values = operators.pixels([feature])[places] * weights.unsqueeze(-1).to(feature.dtype)
        return values.sum(3).permute(0, 3, 1, 2)


class WrongOperators(Operators):
    @staticmethod
    def roi_align(*given, **options):
        return 1.1 * Operators.roi_align(*given, **options)


def test_torchvision_is_used_where_it_is_right(monkeypatch):
    names = operators.choose(dataclasses.replace(CONFIG, kernels="torchvision"), CPU, {}, Operators).names
    assert names == {
        "suppression": "torchvision", "matching": "plain", "roi_align": "torchvision", "project_masks": "plain"
    }  # fmt: skip
    for name, function in operators.torchvision_operators(Operators).items():
        assert kernels.distance_of(operators.EVERY[name], function, CPU.context, torch.float32) < 2e-5
    assert operators.choose(CONFIG, CPU, {}, WrongOperators).names["roi_align"] == "plain"
    assert operators.choose(CONFIG, CPU, names, Operators).names == names, "of a checkpoint"
    monkeypatch.setattr(operators, "find_torchvision", lambda: None)
    with pytest.raises(
        ValueError, match="written with torchvision's roi_align, suppression, which is not here: resume"
    ):
        operators.choose(CONFIG, CPU, names)


# -- corners ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inclusive", [True, False])
def test_boxes_are_pooled_and_drawn_to_their_last_pixel(inclusive):
    training = build(dataclasses.replace(CONFIG, inclusive_corners=inclusive), 5, CPU, {})
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


@pytest.mark.parametrize("mirrored", [False, True])
def test_objects_are_resized_and_mirrored_as_the_submitted_boxes(mirrored):
    # maskrcnn_benchmark's BoxList, and detections back in the original image
    given = np.array([[10.0, 20, 30, 40], [0, 0, 100, 80], [90, 70, 30, 30], [5, 5, 0.5, 9], [3.25, 7.5, 6.5, 2.25]])
    outline = np.array([[10.0, 20], [40, 20], [25, 60]], np.float32)
    part = SimpleNamespace(offsets=[0, 5], crowds=[False] * 5, sizes=np.array([[100, 80]], np.int32),
                           boxes=given.astype(np.float32), labels=np.arange(1, 6), image_ids=[7],
                           polygons=lambda number: [outline])  # fmt: skip
    found = read_objects(part, 0, (250, 200), mirrored, CONFIG)
    wanted = []
    for x, y, width, height in given.tolist():
        ends = [x, y, x + max(width - 1, 0), y + max(height - 1, 0)]
        left, top, right, bottom = (2.5 * min(max(v, 0), most) for v, most in zip(ends, (99, 79, 99, 79), strict=True))
        if right > left and bottom > top:
            sides = (250 - right - 1, 250 - left - 1) if mirrored else (left, right)
            wanted.append([sides[0], top, sides[1] + 1, bottom + 1])
    assert found.boxes == pytest.approx(np.array(wanted), abs=1e-4)
    assert found.labels.tolist() == [1, 2, 3, 5]
    x = 250 - 2.5 * outline[:, 0] - 1 if mirrored else 2.5 * outline[:, 0]
    assert found.polygons[0][0] == pytest.approx(np.stack((x, 2.5 * outline[:, 1]), 1), abs=1e-4)
    if not mirrored:
        # The last one is in an image that fills the batch.
        images = torch.tensor([0, 0, 0, 0, 1])
        boxes = torch.from_numpy(np.concatenate((found.boxes, found.boxes[:1])))
        detected = Found(images, boxes, torch.ones(5), torch.arange(1, 6))
        batch = EvaluationBatch(None, torch.tensor([[250.0, 200], [96, 64]]), np.array([0]))
        back = in_images(SimpleNamespace(val=part), batch, detected, np.ones((5, 28, 28), np.float32), 1.0)
        assert back.boxes[[0, 1, 3]] == pytest.approx(given[[0, 1, 4]], abs=1e-4)
        assert (back.images.tolist(), back.labels.tolist(), len(back.masks)) == ([7] * 4, [1, 2, 3, 4], 4)
