"""SSD in PyTorch: default boxes, loss and detections next to loops in float64, its network, input and checkpoints."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from benchmarks.common.data.problem import Problem
from benchmarks.common.run.ranks import Ranks
from benchmarks.detection.annotations import open_data
from benchmarks.detection.pytorch.boxes import decode, overlaps
from benchmarks.ssd import prepare
from benchmarks.ssd.pytorch import model, norms
from benchmarks.ssd.pytorch.config import Config, map_sizes
from benchmarks.ssd.pytorch.data import EvaluationInput, TrainingInput, synthetic_batch
from benchmarks.ssd.pytorch.model import default_boxes
from benchmarks.ssd.pytorch.train import build, train_step

torch.set_num_threads(1)
CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 0, 1, CPU)
PLAIN = norms.norm_of(None, CPU)
CLASSES = 6
SMALL = Config(device="cpu", precision="fp32", layout="NCHW", pad_channels=False, image_size=64, width=8,
               blocks=(1, 2, 1), batch_size=4, optimizer_kernel="fused", warm_up_steps=0)  # fmt: skip
WEIGHTS = (10, 10, 5, 5)  # Inverse variances of x, y, width and height, as the submissions have them


# -- default boxes, loss, detections -----------------------------------------------------------------------


def test_default_boxes_are_the_references():
    # Six maps for 300 x 300, box by box
    found, expected = [], []
    pixels = (21, 45, 99, 153, 207, 261, 315)
    for number, (size, step) in enumerate(zip((38, 19, 10, 5, 3, 1), (8, 16, 32, 64, 100, 300), strict=True)):
        small, large = pixels[number] / 300, pixels[number + 1] / 300
        shapes = [(small, small), (math.sqrt(small * large),) * 2]
        for root in map(math.sqrt, ([2], [2, 3], [2, 3], [2, 3], [2], [2])[number]):
            shapes += [(small * root, small / root), (small / root, small * root)]
        for row, column, sides in itertools.product(range(size), range(size), shapes):
            x, y, width, height = (min(1.0, v) for v in ((column + 0.5) * step / 300, (row + 0.5) * step / 300, *sides))
            expected.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
    found = default_boxes(300, Config().box_scales)
    assert found == pytest.approx(np.array(expected), abs=1e-7)
    assert [map_sizes(size) for size in (96, 300)] == [[12, 6, 3, 2], [38, 19, 10, 5, 3, 1]]


def reference_loss(predictions, offsets, labels):
    # Every box sorted, image by image
    total = 0.0
    for rows, wanted, classes in zip(predictions, offsets, labels, strict=True):
        positive = [box for box, label in enumerate(classes) if label]
        entropy = [math.log(sum(map(math.exp, row[4:]))) - row[4 + label] for row, label in zip(rows, classes)]
        background = sorted((entropy[box] for box, label in enumerate(classes) if not label), reverse=True)
        found = sum(background[: 3 * len(positive)]) + sum(entropy[box] for box in positive)
        for distance in np.abs(rows[positive, :4] - wanted[positive]).flatten():
            found += distance**2 / 2 if distance < 1 else distance - 0.5
        total += found / max(1, len(positive))
    return total / len(labels)


def test_loss_is_that_of_sorted_negatives():
    random = np.random.RandomState(2)
    predictions, offsets = random.randn(5, 40, 4 + 6) * 2, random.randn(5, 40, 4)
    # No object in the last image, and fewer negatives than wanted in the one before.
    labels = random.randint(1, 6, (5, 40)) * (random.rand(5, 40) < np.array([0.1, 0.02, 0.3, 0.9, 0.0])[:, None])
    expected = reference_loss(predictions, offsets, labels.tolist())
    tensors = [torch.from_numpy(each) for each in (predictions, offsets, labels)]
    assert float(model.multibox_loss(*tensors)) == pytest.approx(expected, rel=1e-12)
    half = model.multibox_loss(tensors[0].half(), tensors[1].float(), tensors[2].int())
    assert float(half) == pytest.approx(expected, rel=1e-3)
    few = [each[:, :15] for each in tensors]
    assert torch.autograd.gradcheck(lambda x: model.multibox_loss(x, *few[1:]), few[0].clone().requires_grad_())


def test_equal_losses_share_what_is_left_of_the_count():
    losses = torch.tensor([[1.0, 2.0, 2.0, 0.5, 2.0], [0.0] * 5, [3.0, -1.0, 2.0, 0.0, 5.0]])
    third = 2 / 3
    wanted = [[0, third, third, 0, third], [0.6] * 5, [1, 0, 1, 1, 1]]
    assert model.hard_negatives(losses, torch.tensor([2, 3, 9])).tolist() == [pytest.approx(row) for row in wanted]


def reference_detections(predictions, defaults, config):
    # (image, label, score, box) of each detection, box by box
    found = []
    for image, rows in enumerate(predictions):
        scores, of_image = functional.softmax(rows[:, 4:], 1), []
        boxes = []
        for (dx, dy, dw, dh), (left, top, right, bottom) in zip(rows[:, :4].tolist(), defaults.tolist(), strict=True):
            x, y = (left + right) / 2 + 0.1 * dx * (right - left), (top + bottom) / 2 + 0.1 * dy * (bottom - top)
            width, height = math.exp(0.2 * dw) * (right - left), math.exp(0.2 * dh) * (bottom - top)
            boxes.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
        table = overlaps(torch.tensor(boxes), torch.tensor(boxes))
        for label in range(1, scores.shape[1]):
            kept = []
            for box in scores[:, label].argsort(descending=True)[: config.detections].tolist():
                if scores[box, label] > config.score_threshold and (table[box, kept] <= config.nms_threshold).all():
                    kept.append(box)
            of_image += [(image, label, float(scores[box, label]), boxes[box]) for box in kept]
        found += sorted(of_image, key=lambda each: -each[2])[: config.detections]
    return found


def test_detections_are_those_of_loops():
    torch.manual_seed(6)
    config = Config(image_size=64, detections=7, score_threshold=0.1)
    defaults = torch.from_numpy(default_boxes(64, config.box_scales)).double()
    predictions = 1.5 * torch.randn(3, len(defaults), 4 + 5)
    predictions[1, :, 4] = 50  # nothing but background
    found = model.chosen(*model.decoded(predictions, defaults.float()), config)
    images, labels, scores, boxes = zip(*reference_detections(predictions.double(), defaults, config), strict=True)
    assert images == (0,) * 7 + (2,) * 7
    assert (found.images.tolist(), found.labels.tolist()) == (list(images), list(labels))
    assert found.scores.tolist() == pytest.approx(scores, abs=1e-6)
    assert found.boxes.numpy() == pytest.approx(np.array(boxes), abs=1e-6)


# -- network -----------------------------------------------------------------------------------------------


def test_network_has_the_submitted_sizes():
    with torch.device("meta"):
        network = model.SSD(Config(), 81, PLAIN)
        found = network(torch.empty(2, 4, 300, 300))
    assert found.shape == (2, 8732, 4 + 81)
    # torchvision's ResNet-34 without its fourth stage (13,114,368) and last layer (513,000), and 64 x 49 weights more.
    backbone = sum(parameter.numel() for parameter in network.backbone.parameters())
    assert backbone == 21_797_672 - 13_114_368 - 513_000 + 3136


def test_padded_channels_last_is_the_same_network():
    plain = model.SSD(SMALL, CLASSES, PLAIN).eval()
    padded = model.SSD(dataclasses.replace(SMALL, layout="NHWC", pad_channels=True), CLASSES, PLAIN).eval()
    with torch.no_grad():
        for name, tensor in padded.state_dict().items():
            theirs = plain.state_dict()[name]
            tensor.zero_()
            tensor[tuple(slice(size) for size in theirs.shape)] = theirs
        images = torch.randn(2, 3, 64, 64)
        four = functional.pad(images, (0, 0, 0, 0, 0, 1)).to(memory_format=torch.channels_last)
        torch.testing.assert_close(padded.to(memory_format=torch.channels_last)(four), plain(images))


def trained(rates=(0.01,) * 6, rate=None, **changes):
    # Losses of some steps on one batch
    config = dataclasses.replace(SMALL, **changes)
    training = build(config, CLASSES, ALONE, {})
    training.rate = 0.0 if rate is None else rate
    torch.manual_seed(0)
    batch = synthetic_batch(config, CLASSES, CPU)
    return [float(train_step(training, batch, each)) for each in rates]


def test_every_precision_trains():
    # At a small rate: at 0.01 the loss falls by half in five steps, and a rounding error grows to a tenth of it.
    found = {precision: trained((1e-4,) * 6, precision=precision) for precision in ("fp32", "bf16", "fp16")}
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.02)
    assert found["fp16"] == pytest.approx(found["fp32"], rel=0.005)
    assert found["bf16"] != found["fp32"] != found["fp16"]
    faster, as_on_gpus = trained(), trained(precision="fp16", layout="NHWC", pad_channels=True)
    assert max(losses[-1] / losses[0] for losses in (faster, as_on_gpus)) < 0.8
    assert trained(warm_up_steps=2) == faster, "a warm-up leaves nothing behind"


def test_a_rate_on_the_device_is_the_same_rate():
    # As a CUDA graph reads it
    rates = (0.0, 0.02, 0.01, 0.01)
    assert trained(rates, torch.zeros(())) == pytest.approx(trained(rates), abs=1e-6)


def test_backbone_comes_from_a_file_in_torchvisions_names(tmp_path):
    torch.manual_seed(9)
    given = {name: torch.randn_like(each) for name, each in model.backbone(SMALL, PLAIN).state_dict().items()}
    more = {"layer4.0.conv1.weight": torch.zeros(1), "bn1.num_batches_tracked": torch.tensor(7)}
    torch.save({**given, **more}, tmp_path / "resnet34.pth")
    for padded in (False, True):
        network = model.SSD(dataclasses.replace(SMALL, pad_channels=padded), CLASSES, PLAIN)
        model.load_backbone(network, tmp_path / "resnet34.pth")
        state = network.backbone.state_dict()
        state["conv1.weight"] = state["conv1.weight"][:, :3]
        assert all(torch.equal(state[name], given[name]) for name in given)
    (tmp_path / "damaged.pth").write_bytes((tmp_path / "resnet34.pth").read_bytes()[:1000])
    torch.save({**given, "layer1.0.conv1.weight": torch.zeros(3, 3)}, tmp_path / "other.pth")
    for name, text in (("missing", "missing.pth"), ("damaged", "damaged.pth"), ("other", r"\(3, 3\) for layer1.0")):
        with pytest.raises(Problem, match=rf"(?s){text}.*hint: name a file with --set backbone=FILE"):
            model.load_backbone(network, tmp_path / f"{name}.pth")


# -- input -------------------------------------------------------------------------------------------------

INPUT = dataclasses.replace(SMALL, image_size=96, batch_size=8, eval_batch_size=7, dali_threads=1)
AS_THEY_ARE = {"crop": False, "colour": False, "flip": False}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "ssd"
    assert prepare.main(["-o", str(folder), "--scenes", "120", "--workers", "1"]) == 0
    found = open_data(folder)
    # What is parsed after the clock has started are the boxes alone, and not the annotations as published.
    return dataclasses.replace(found, train=dataclasses.replace(found.train, json=folder / "nothing"))


def batches_of(data, rank=0, ranks=1, saved=None, **changes):
    return TrainingInput(dataclasses.replace(INPUT, **changes), data.train, Ranks(rank, ranks, 0, 1, CPU), saved)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_image_is_evaluated_once_by_any_ranks(data, ranks):
    inputs = [EvaluationInput(INPUT, data.val, Ranks(rank, ranks, 0, 1, CPU)) for rank in range(ranks)]
    for _ in range(2):
        batches = [[positions for _, positions in each.one_pass()] for each in inputs]
        assert len({len(each) for each in batches}) == 1, "all ranks run as many batches"
        assert sorted(np.concatenate([each for listed in batches for each in listed])) == data.val.with_objects.tolist()


@pytest.mark.parametrize("together", [1, 3])
def test_input_resumes_exactly(data, together):
    batches = batches_of(data, 1, 2, dali_batches=together)
    for _ in range(5):
        batches.next()
    again = batches_of(data, 1, 2, batches.state_dict(), dali_batches=together)
    for _ in range(4):
        assert all(torch.equal(one, other) for one, other in zip(batches.next(), again.next(), strict=True))


def objects_of(part, position, mirrored):
    # (objects, 5): corners as shares of the image, and labels
    of_image = slice(*part.offsets[position : position + 2])
    x, y, w, h = (part.boxes[of_image] / np.tile(part.sizes[position], 2)).T
    left = 1 - x - w if mirrored else x
    return np.stack((left, y, left + w, y + h, part.labels[of_image]), 1)


@pytest.mark.parametrize("flip", [False, True])
def test_default_boxes_have_the_objects_of_their_image_mirrored_or_not(data, flip):
    batch, plain = (batches_of(data, seed=1, **{**AS_THEY_ARE, "flip": way}).next() for way in (flip, False))
    turned = [not torch.equal(*images) for images in zip(batch.images, plain.images, strict=True)]
    assert any(turned) == flip and not all(turned)
    defaults = torch.from_numpy(default_boxes(96, INPUT.box_scales))
    for mirrored, offsets, labels in zip(turned, batch.offsets, batch.labels, strict=True):
        boxes = decode(offsets, defaults, WEIGHTS)[labels > 0]
        found = torch.cat((boxes, labels[labels > 0, None]), 1).numpy()
        distances = [
            np.abs(found[:, None] - objects_of(data.train, position, mirrored)).max(-1)
            for position in data.train.with_objects
        ]
        # Each box has an object, and but for two that want the same box each object has one.
        assert min(each.min(1).max() + (each.min(0) > 1e-4).mean() / 2 for each in distances) < 0.25


def test_crops_differ_by_seed_and_keep_an_object(data):
    first, again, other = (batches_of(data, seed=seed).next() for seed in (0, 0, 7))
    assert torch.equal(first.images, again.images) and not torch.equal(first.images, other.images)
    assert (first.labels > 0).any(1).all() and first.offsets.isfinite().all() and first.images.isfinite().all()


def test_only_training_images_go_without_antialiasing(data):
    # As v0.5; all submissions evaluate on what Pillow resized, which antialiases
    ways = (True, False)
    assert not torch.equal(*(batches_of(data, antialias=way, **AS_THEY_ARE).next().images for way in ways))
    configs = [dataclasses.replace(INPUT, antialias=way) for way in ways]
    assert torch.equal(*(next(EvaluationInput(config, data.val, ALONE).one_pass())[0] for config in configs))
