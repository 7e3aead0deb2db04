"""Mask R-CNN's network: precisions, shapes, memory of graphs, trained weights, and objects in resized images."""

import dataclasses
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from benchmarks.detection.pytorch.boxes import DetectedBoxes
from benchmarks.maskrcnn import prepare
from benchmarks.maskrcnn.pytorch import backbone, bench, config, data, evaluation, model, operators
from benchmarks.maskrcnn.pytorch.train import MAX_EDGES, build, train_step
from benchmarks.maskrcnn.schedule import Rates
from tests.in_framework.torch_checks import CPU
from tests.in_framework.waves import digest, waves

torch.set_num_threads(1)
CONFIG = config.Config(device="cpu", precision="fp32", stages=(1, 1, 1, 1), stem_width=8, frozen_stages=0, fpn_width=16,
                box_width=16, mask_width=16, mask_layers=1, anchor_sizes=(8, 16, 24, 32, 48), anchors_per_image=32,
                rpn_pre_nms_top_n=40, rpn_pre_nms_top_n_test=20, rpn_post_nms_top_n=60, rpn_post_nms_top_n_test=15,
                rois_per_image=16, detections=5, batch_size=2, optimizer_kernel="fused", gradient_clip=3.0,
                learning_rate=0.02, warmup_steps=0, pixel_mean=(120.0,) * 3, pixel_std=(57.0,) * 3, short_side=64,
                long_side=96, bucket_step=32, warm_up_steps=0, objects=6, score_threshold=0.01)  # fmt: skip
SHAPE, RATES = (64, 96), Rates(0.01, 0.02)


def noise(shape=SHAPE, **options):
    return data.synthetic_batch(CONFIG, 5, shape, CPU.context, **options)


def new(**changes):
    return build(dataclasses.replace(CONFIG, **changes), 5, CPU, {})


def train(**changes):
    # A training after five steps on one batch, and their losses
    training = new(**changes)
    return training, [float(train_step(training, noise(), RATES)) for _ in range(5)]


@pytest.fixture(scope="module")
def plain():
    return train()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_precision_trains_and_detects(plain, precision):
    scaled, batch = {"precision": precision, "loss_scale": 1024.0, "loss_scale_interval": 3}, noise()
    training, losses = train(**scaled)
    assert losses[-1] < 0.8 * losses[0]
    assert plain[1] != losses == pytest.approx(plain[1], rel=0.2), "proposals depend on the last bits"
    found, masks = training.model.detect(batch.images, batch.sizes)
    assert masks.shape == (len(found.images), 28, 28) and masks.isfinite().all()
    for scores in (found.scores[found.images == image].tolist() for image in range(2)):
        assert scores == sorted(scores, reverse=True) and len(scores) <= 5
    # What is trained before the clock changes nothing behind it, the dynamic scale neither.
    assert train(**scaled, warm_up_steps=2)[1] == losses


def test_fixed_shapes_of_gpus_give_the_same_losses(plain, monkeypatch):
    # Empty slots and unused proposals change no loss
    model = plain[0].model
    losses = model.losses(noise())
    monkeypatch.setattr(model, "is_static", True)
    torch.testing.assert_close(model.losses(noise()), losses)


def test_graph_holds_batches_with_any_number_of_edges():
    # Memory as a graph has it: outlines with more room, rates in tensors, rests of the batch before
    losses = {}
    for in_memory in (False, True):
        training, losses[in_memory], memory = new(), [], noise(edges=100)
        training.model.is_static, training.rates = True, [torch.zeros(()), torch.zeros(())]
        for objects, rate in ((6, 0.0), (3, 0.02), (4, 0.01)):
            batch = noise(objects=objects)
            for tensor, part in zip(memory, batch, strict=True):
                tensor[: len(part)].copy_(part)
            losses[in_memory].append(float(train_step(training, memory if in_memory else batch, Rates(rate, 2 * rate))))
    assert losses[True] == losses[False]
    training.graphs[SHAPE] = lambda *batch: -1.0
    batches = (noise(edges=MAX_EDGES), noise(edges=MAX_EDGES + 1), noise((96, 64)))
    assert [train_step(training, batch, RATES) == -1 for batch in batches] == [True, False, False]


def test_weights_and_biases_have_different_rates():
    for rates, moved in ((Rates(0.01, 0.0), False), (Rates(0.0, 0.01), True)):
        training, fresh = new(), new()
        train_step(training, noise(), rates)
        pairs = list(zip(fresh.network.parameters(), training.network.parameters(), strict=True))
        assert {old.dim() == 1 for old, weight in pairs if not torch.equal(old, weight)} == {moved}


def test_evaluation_is_measured_without_autotuning(tmp_path, monkeypatch):
    assert prepare.main(["-o", str(tmp_path / "data"), "--scenes", "12", "--workers", "1"]) == 0
    detect, autotuned = model.Model.detect, []

    def record(*given):
        autotuned.append(torch.backends.cudnn.benchmark)
        return detect(*given)

    monkeypatch.setattr(model.Model, "detect", record)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with closing(bench.prepare(CONFIG, CPU, tmp_path / "data")) as subject:
        subject.loops["evaluation"](2)
    assert autotuned == [False] * 2 and torch.backends.cudnn.benchmark


# -- backbone ---------------------------------------------------------------------------------------------


def test_pixels_are_doubled_as_interpolated():
    x = torch.from_numpy(waves(2, 5, 3, 4)).to(memory_format=torch.channels_last).requires_grad_()
    outputs = [backbone.upsample_2x(x), functional.interpolate(x, size=(6, 8), mode="nearest")]
    assert torch.equal(*outputs)
    torch.testing.assert_close(
        *(torch.autograd.grad((y * torch.from_numpy(waves(*y.shape))).sum(), x) for y in outputs)
    )


def test_frozen_stages_are_not_trained():
    first, after = (training.network.backbone for training in (new(frozen_stages=2), train(frozen_stages=2)[0]))
    weights, trained = dict(first.named_parameters()), after.state_dict()
    same = {name for name, tensor in weights.items() if torch.equal(tensor, trained[name]) and "scale" not in name}
    assert same == {name for name in weights if name.startswith(("conv1.", "layers.0.")) and "scale" not in name}


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
        values = {"weight": gamma, "bias": beta, "running_mean": mean, "running_var": variance / 2 + 1}
        torchvision.update({f"{norm}.{name}": value for name, value in values.items()})
        scale = gamma / (values["running_var"] + 1e-5).sqrt()
        detectron.update({f"{affine}_s": scale, f"{affine}_b": beta - mean * scale})
    for network, weights in zip(networks, (torchvision, detectron), strict=True):
        backbone.load(network, weights)
        assert [digest(stage) for stage in network(torch.from_numpy(waves(1, 3, 32, 32)))] == [
            pytest.approx([0.27369939488, -0.0018448867252], rel=1e-9),
            pytest.approx([0.71370802487, 0.011835256328], rel=1e-9),
            pytest.approx([0.77382576433, 0.13687651812], rel=1e-9),
            pytest.approx([0.85413145906, 0.018040212575], rel=1e-9),
        ]
        assert not network.conv1.shift.requires_grad


# -- operators --------------------------------------------------------------------------------------------


def test_torchvision_is_missing(monkeypatch):
    monkeypatch.setattr(operators, "find_torchvision", lambda: None)
    assert operators.choose(CONFIG, CPU, {}).names == dict.fromkeys(operators.ALL_OPERATORS, "plain")
    with pytest.raises(ValueError, match="written with torchvision's roi_align, which is missing: resume"):
        operators.choose(CONFIG, CPU, {"roi_align": "torchvision"})


# -- corners ----------------------------------------------------------------------------------------------


# Boxes and the first outline, recorded from maskrcnn_benchmark's BoxList: resized by 2.5, without mirror and with it
RESIZED = {
    False: (
        [[25.0, 50, 98.5, 148.5], [0, 0, 248.5, 198.5], [225, 175, 248.5, 198.5], [8.125, 18.75, 22.875, 22.875]],
        [[25.0, 50], [100, 50], [62.5, 150]],
    ),
    True: (
        [[151.5, 50, 225, 148.5], [1.5, 0, 250, 198.5], [1.5, 175, 25, 198.5], [227.125, 18.75, 241.875, 22.875]],
        [[224.0, 50], [149, 50], [186.5, 150]],
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
    objects = data.read_objects(part, 0, (250, 200), mirrored, CONFIG)
    found = [*objects.boxes, *objects.polygons[0][0]]
    assert found == [pytest.approx(row, abs=1e-4) for rows in RESIZED[mirrored] for row in rows]
    assert objects.labels.tolist() == [1, 2, 3, 5]
    if not mirrored:
        # The last one is in an image that fills the batch.
        images, labels = torch.tensor([0, 0, 0, 0, 1]), torch.arange(1, 6)
        detected = DetectedBoxes(images, torch.from_numpy(objects.boxes)[[0, 1, 2, 3, 0]], torch.ones(5), labels)
        batch = data.EvaluationBatch(None, torch.tensor([[250.0, 200], [96, 64]]), np.array([0]))
        originals = evaluation.to_detections(
            SimpleNamespace(val=part), batch, detected, np.ones((5, 28, 28), np.float32), 1.0
        )
        assert originals.boxes[[0, 1, 3]] == pytest.approx(given[[0, 1, 4]], abs=1e-4)
        assert [*originals.images, *originals.labels, len(originals.masks)] == [7, 7, 7, 7, 1, 2, 3, 4, 4]
