"""SSD in PyTorch: default boxes, loss and detections against recorded values, its network and its input."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from benchmarks.common.data.problem import Problem
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import networks
from benchmarks.detection.annotations import open_data
from benchmarks.detection.pytorch.boxes import decode
from benchmarks.ssd import prepare
from benchmarks.ssd.pytorch import model, norms, train
from benchmarks.ssd.pytorch.config import Config, map_sizes
from benchmarks.ssd.pytorch.data import EvaluationInput, TrainingInput, synthetic_batch
from tests.in_framework.torch_checks import CPU
from tests.in_framework.waves import digest, waves

torch.set_num_threads(1)
PLAIN = norms.norm_of(None, CPU.context)
CLASSES = 6
SMALL = Config(device="cpu", precision="fp32", layout="NCHW", pad_channels=False, image_size=64, width=8,
               blocks=(1, 2, 1), batch_size=4, optimizer_kernel="fused", warm_up_steps=0)  # fmt: skip
WEIGHTS = (10, 10, 5, 5)  # Inverse variances of x, y, width and height, as the submissions have them


# -- default boxes, loss, detections -----------------------------------------------------------------------


def test_default_boxes_are_those_of_the_reference():
    # Corners of the first boxes of the first and last map for 300 x 300, and digests of the maps; recorded from
    # dboxes300_coco of the reference, box by box
    boxes = model.default_boxes(300, Config().box_scales)
    ends = np.cumsum([size**2 * count for size, count in zip(map_sizes(300), (4, 6, 6, 6, 4, 4), strict=True)])
    assert [boxes[0], boxes[-1], *(digest(part) for part in np.split(boxes, ends[:-1]))] == [
        pytest.approx(row, abs=1e-7)
        for row in (
            [-0.02166667, -0.02166667, 0.04833333, 0.04833333],
            [0.19240855, 0.0, 0.80759145, 1.0],
            [0.50666667, -0.00080325],
            [0.50666667, -0.00109066],
            [0.532, 0.0049538],
            [0.53333333, -0.01478809],
            [0.5, 0.00533418],
            [0.5, 0.13600615],
        )
    ]


def test_loss_is_that_of_sorted_negatives():
    # Recorded from OptLoss of the submissions in float64, image by image. The fourth image has fewer negatives than
    # three for each object, the last one no object.
    predictions, offsets = 2 * waves(5, 40, 4 + 6), waves(5, 40, 4, phase=1)
    labels = (np.arange(200).reshape(5, 40) % 5 + 1) * (waves(5, 40) > np.array([0.9, 0.98, 0.5, -0.8, 1])[:, None])
    assert (labels > 0).sum(1).tolist() == [5, 4, 12, 33, 0]
    tensors = [torch.from_numpy(values) for values in (predictions, offsets, labels)]
    assert float(model.multibox_loss(*tensors)) == pytest.approx(11.34231107141, rel=1e-9)
    few = [tensor[:, :15] for tensor in tensors]
    assert torch.autograd.gradcheck(lambda x: model.multibox_loss(x, *few[1:]), few[0].clone().requires_grad_())


def test_equal_losses_share_the_rest_of_the_count():
    losses = torch.tensor([[1.0, 2.0, 2.0, 0.5, 2.0], [0.0] * 5, [3.0, -1.0, 2.0, 0.0, 5.0]])
    weights = [[0, 2 / 3, 2 / 3, 0, 2 / 3], [0.6] * 5, [1, 0, 1, 1, 1]]
    assert model.hard_negatives(losses, torch.tensor([2, 3, 9])).tolist() == [pytest.approx(row) for row in weights]


def test_detections_are_those_of_each_class_by_itself():
    # Recorded from suppression box by box in float64: variances 0.1 and 0.2, overlap up to 0.5, 7 of each image
    config = Config(image_size=64, detections=7, score_threshold=0.1)
    defaults = torch.from_numpy(model.default_boxes(64, config.box_scales))
    predictions = torch.from_numpy(3 * waves(3, len(defaults), 4 + 5)).float()
    predictions[1, :, 4] = 50  # only background
    detections = model.select_detections(*model.decode_predictions(predictions, defaults), config)
    labels = [1, 3, 3, 3, 2, 3, 2, 3, 1, 1, 1, 3, 2, 2]
    assert (detections.images.tolist(), detections.labels.tolist()) == ([0] * 7 + [2] * 7, labels)
    scores = [
        *(0.98524, 0.984587, 0.984108, 0.983704, 0.983177, 0.981735, 0.981709),
        *(0.986458, 0.986415, 0.986315, 0.984191, 0.983295, 0.98173, 0.981406),
    ]
    found = [*detections.scores.tolist(), *digest(detections.boxes)]
    assert found == pytest.approx([*scores, 0.623657, 0.127593], abs=1e-5)


# -- network -----------------------------------------------------------------------------------------------


def test_network_has_the_submitted_sizes():
    with torch.device("meta"):
        network = model.SSD(Config(), 81, PLAIN)
        assert network(torch.empty(2, 4, 300, 300)).shape == (2, 8732, 4 + 81)
    # torchvision's ResNet-34 without its fourth stage (13,114,368) and last layer (513,000), and 64 x 49 weights more.
    backbone = sum(parameter.numel() for parameter in network.backbone.parameters())
    assert backbone == 21_797_672 - 13_114_368 - 513_000 + 3136


def test_batch_norm_over_groups_on_a_gpu_has_the_checkpoint_of_a_cpu():
    # Without a process group, SyncBatchNorm computes the plain layer, also on a CPU.
    plain, group = PLAIN(8), norms.norm_of(object(), torch.device("cuda"))(8)
    assert isinstance(group, torch.nn.SyncBatchNorm) and group.training
    x = torch.from_numpy(waves(4, 8, 3, 3)).float()
    torch.testing.assert_close(group(x), plain(x), rtol=0, atol=0)
    torch.testing.assert_close(group.state_dict(), plain.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(networks.statistics(group), [plain.running_mean, plain.running_var], rtol=0, atol=0)


def losses_of(rates=(0.01,) * 6, rate=0.0, **changes):
    # Losses of steps on one batch
    config = dataclasses.replace(SMALL, **changes)
    training = train.build(config, CLASSES, CPU, {})
    training.rate = rate
    torch.manual_seed(0)
    batch = synthetic_batch(config, CLASSES, CPU.context)
    return [float(train.train_step(training, batch, rate)) for rate in rates]


def test_every_precision_trains():
    # At a small rate: at 0.01 the loss falls by half in five steps, and a rounding error grows to a tenth of it.
    fp32, bf16, fp16 = (losses_of((1e-4,) * 6, precision=precision) for precision in ("fp32", "bf16", "fp16"))
    assert fp32 != bf16 == pytest.approx(fp32, rel=0.02) and fp32 != fp16 == pytest.approx(fp32, rel=0.005)
    losses, as_on_gpus = losses_of(warm_up_steps=2), losses_of(precision="fp16", layout="NHWC", pad_channels=True)
    assert max(losses[-1] / losses[0], as_on_gpus[-1] / as_on_gpus[0]) < 0.8
    assert losses_of() == losses, "a warm-up changes nothing"


def test_a_rate_in_a_tensor_is_the_same_rate():
    # As a CUDA graph reads it
    rates = (0.0, 0.02, 0.01, 0.01)
    assert losses_of(rates, torch.zeros(())) == pytest.approx(losses_of(rates), abs=1e-6)


def test_a_backbone_file_that_is_right_missing_or_of_another_network(tmp_path):
    # The fourth input channel is padding, and the network has no fourth stage
    network = model.SSD(dataclasses.replace(SMALL, layout="NHWC", pad_channels=True), CLASSES, PLAIN)
    weights = {name: tensor + 1 for name, tensor in network.backbone.state_dict().items()}
    weights["conv1.weight"] = weights["conv1.weight"][:, :3].clone()
    torch.save({**weights, "layer4.0.conv1.weight": torch.zeros(1)}, tmp_path / "right.pth")
    model.load_backbone(network, tmp_path / "right.pth")
    state = network.backbone.state_dict()
    state["conv1.weight"], padding = state["conv1.weight"].split((3, 1), 1)
    assert not padding.any() and all(torch.equal(tensor, weights[name]) for name, tensor in state.items())
    torch.save({**weights, "layer1.0.conv1.weight": torch.zeros(3, 3)}, tmp_path / "other.pth")
    for name, text in (("missing", "missing.pth"), ("other", r"\(3, 3\) for layer1.0")):
        with pytest.raises(Problem, match=rf"(?s){text}.*hint: name a file with --set backbone=FILE"):
            model.load_backbone(network, tmp_path / f"{name}.pth")


# -- input -------------------------------------------------------------------------------------------------

INPUT = dataclasses.replace(SMALL, image_size=96, batch_size=8, eval_batch_size=7, dali_threads=1)
UNCHANGED = {"crop": False, "colour": False, "flip": False}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "ssd"
    assert prepare.main(["-o", str(folder), "--scenes", "120", "--workers", "1"]) == 0
    opened = open_data(folder)
    # After the clock has started only the boxes are read, and not the published annotations.
    return dataclasses.replace(opened, train=dataclasses.replace(opened.train, json=folder / "nothing"))


def batches_of(data, rank=0, ranks=1, saved=None, **changes):
    config = dataclasses.replace(INPUT, **changes)
    return TrainingInput(config, data.train, Ranks(rank, ranks, 0, 1, CPU.context), saved)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_image_is_evaluated_once_by_any_ranks(data, ranks):
    inputs = [EvaluationInput(INPUT, data.val, Ranks(rank, ranks, 0, 1, CPU.context)) for rank in range(ranks)]
    for _ in range(2):
        parts = [[positions for _, positions in part.one_pass()] for part in inputs]
        assert len({len(part) for part in parts}) == 1, "all ranks run as many batches"
        assert sorted(np.concatenate([*itertools.chain(*parts)])) == data.val.with_objects.tolist()


@pytest.mark.parametrize("dali_batches", [1, 3])
def test_input_resumes_exactly(data, dali_batches):
    batches = batches_of(data, 1, 2, dali_batches=dali_batches)
    for _ in range(5):
        batches.next()
    resumed = batches_of(data, 1, 2, batches.state_dict(), dali_batches=dali_batches)
    for _ in range(4):
        assert all(map(torch.equal, batches.next(), resumed.next()))


def objects_of(part, position, mirrored):
    # (objects, 5): corners as shares of the image, and labels
    rows = slice(*part.offsets[position : position + 2])
    x, y, width, height = (part.boxes[rows] / np.tile(part.sizes[position], 2)).T
    left = 1 - x - width if mirrored else x
    return np.stack((left, y, left + width, y + height, part.labels[rows]), 1)


@pytest.mark.parametrize("flip", [False, True])
def test_default_boxes_have_the_objects_of_their_image_mirrored_or_not(data, flip):
    batch, plain = (
        batches_of(data, seed=1, **{**UNCHANGED, "flip": is_flipped}).next() for is_flipped in (flip, False)
    )
    mirrored = [not torch.equal(*images) for images in zip(batch.images, plain.images, strict=True)]
    assert any(mirrored) == flip and not all(mirrored)
    defaults = torch.from_numpy(model.default_boxes(96, INPUT.box_scales))
    for is_mirrored, offsets, labels in zip(mirrored, batch.offsets, batch.labels, strict=True):
        matched = torch.cat((decode(offsets, defaults, WEIGHTS)[labels > 0], labels[labels > 0, None]), 1).numpy()
        distances = [np.abs(matched[:, None] - objects_of(data.train, position, is_mirrored)).max(-1)
                     for position in data.train.with_objects]  # fmt: skip
        # Each box has an object, and but for two that match the same box each object has one.
        assert min(table.min(1).max() + (table.min(0) > 1e-4).mean() / 2 for table in distances) < 0.25


def test_crops_differ_by_seed_and_keep_an_object(data):
    first, again, other = (batches_of(data, seed=seed).next() for seed in (0, 0, 7))
    assert torch.equal(first.images, again.images) and not torch.equal(first.images, other.images)
    assert (first.labels > 0).any(1).all() and first.offsets.isfinite().all() and first.images.isfinite().all()
