"""SSD's default boxes, coding, matching, losses and detections against references in float64, written another way."""

import itertools
import json
import math

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def

from benchmarks.detection.pytorch import boxes
from benchmarks.ssd.pytorch import coding, detection, loss
from benchmarks.ssd.pytorch.config import Config, map_sizes
from benchmarks.ssd.pytorch.data import corners
from benchmarks.ssd.pytorch.default_boxes import default_boxes

SCALES = Config().box_scales
VARIANCES = (0.1, 0.1, 0.2, 0.2)


# -- default boxes -----------------------------------------------------------------------------------------


def reference_boxes() -> list:
    """The reference's six maps for 300 x 300, box by box."""
    found = []
    pixels = (21, 45, 99, 153, 207, 261, 315)
    for number, (size, step) in enumerate(zip((38, 19, 10, 5, 3, 1), (8, 16, 32, 64, 100, 300), strict=True)):
        small, large = pixels[number] / 300, pixels[number + 1] / 300
        shapes = [(small, small), (math.sqrt(small * large),) * 2]
        for ratio in ([2], [2, 3], [2, 3], [2, 3], [2], [2])[number]:
            root = math.sqrt(ratio)
            shapes += [(small * root, small / root), (small / root, small * root)]
        for row, column, (width, height) in itertools.product(range(size), range(size), shapes):
            box = ((column + 0.5) * step / 300, (row + 0.5) * step / 300, width, height)
            found.append([min(1.0, value) for value in box])
    return found


def of_boxes() -> dict:
    found, expected = default_boxes(300, SCALES), np.array(reference_boxes())
    sides = {size: map_sizes(size) for size in (96, 128, 300, 512)}
    return {
        "count": len(found),
        "error": float(np.abs(found - expected).max()),
        "maps": sides,
        "small": [len(default_boxes(size, SCALES)) for size in (96, 128)],
    }


# -- coding and matching -----------------------------------------------------------------------------------


def iou(a, b) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0.0) * max(height, 0.0)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def as_corners(box) -> list:
    x, y, width, height = box
    return [x - width / 2, y - height / 2, x + width / 2, y + height / 2]


def reference_offsets(ltrb, default) -> list:
    x, y, width, height = (ltrb[0] + ltrb[2]) / 2, (ltrb[1] + ltrb[3]) / 2, ltrb[2] - ltrb[0], ltrb[3] - ltrb[1]
    raw = ((x - default[0]) / default[2], (y - default[1]) / default[3])
    raw += (math.log(width / default[2]), math.log(height / default[3]))
    return [value / variance for value, variance in zip(raw, VARIANCES, strict=True)]


def reference_match(objects, labels, defaults) -> tuple:
    table = [[iou(each, as_corners(default)) for default in defaults] for each in objects]
    owner = {}
    for place in range(len(defaults)):
        column = [row[place] for row in table]
        if max(column) > 0.5:
            owner[place] = column.index(max(column))
    for number, row in enumerate(table):
        owner[row.index(max(row))] = number
    offsets, found = np.zeros((len(defaults), 4)), np.zeros(len(defaults), int)
    for place, number in owner.items():
        offsets[place] = reference_offsets(objects[number], defaults[place])
        found[place] = labels[number]
    return offsets, found


def objects_of(random, count) -> tuple:
    corner, size = random.uniform(0, 0.6, (count, 2)), random.uniform(0.08, 0.4, (count, 2))
    return np.concatenate((corner, corner + size), 1), random.randint(1, 81, count)


def encoded_by_dali(config, objects, labels) -> tuple:
    @pipeline_def
    def definition():
        given = (
            fn.external_source(lambda: [objects.astype(np.float32)]),
            fn.external_source(lambda: [labels.astype(np.int32)]),
        )
        offsets, matched = fn.box_encoder(*given, anchors=corners(config).reshape(-1).tolist(), criteria=0.5,
                                          offset=True, stds=list(VARIANCES), scale=96.0)  # fmt: skip
        return offsets, matched

    pipeline = definition(batch_size=1, num_threads=1, device_id=None)
    pipeline.build()
    return tuple(np.array(output.as_array())[0] for output in pipeline.run())


def of_coding() -> dict:
    random, config = np.random.RandomState(4), Config(image_size=96)
    defaults = default_boxes(96, SCALES)
    tensor = torch.from_numpy(defaults)
    errors, labelled, with_dali, dali_labels, positives = 0.0, True, 0.0, True, 0
    for count in (1, 3, 9):
        objects, labels = objects_of(random, count)
        offsets, found = coding.match(torch.from_numpy(objects), torch.from_numpy(labels), tensor)
        expected, expected_labels = reference_match(objects.tolist(), labels.tolist(), defaults.tolist())
        errors = max(errors, float(np.abs(offsets.numpy() - expected).max()))
        labelled &= bool((found.numpy() == expected_labels).all())
        theirs, their_labels = encoded_by_dali(config, objects, labels)
        dali_labels &= bool((their_labels == expected_labels).all())
        where = expected_labels > 0
        with_dali = max(with_dali, float(np.abs(theirs - expected)[where].max()))
        positives += int(where.sum())
    objects, _ = objects_of(random, len(defaults))
    around = coding.decode(coding.encode(torch.from_numpy(objects), tensor), tensor)
    few = tensor[:5].requires_grad_(False)
    given = torch.from_numpy(random.randn(5, 4)).requires_grad_()
    shifted = torch.from_numpy(objects[:5]).requires_grad_()
    return {
        "offsets": errors,
        "labels": labelled,
        "DALI's offsets": with_dali,
        "DALI's labels": dali_labels,
        "positives": positives,
        "there and back": float((around - torch.from_numpy(objects)).abs().max()),
        "gradients": torch.autograd.gradcheck(lambda x: coding.decode(x, few), given)
        and torch.autograd.gradcheck(lambda x: coding.encode(x, few), shifted),
    }


# -- the loss ----------------------------------------------------------------------------------------------


def reference_loss(predictions, offsets, labels) -> float:
    total = 0.0
    for image in range(len(labels)):
        positive = [box for box, label in enumerate(labels[image]) if label > 0]
        if not positive:
            continue
        entropy = []
        for box, label in enumerate(labels[image]):
            logits = predictions[image, box, 4:]
            entropy.append(math.log(sum(math.exp(each) for each in logits)) - logits[label])
        background = sorted((entropy[box] for box, label in enumerate(labels[image]) if label == 0), reverse=True)
        found = sum(background[: 3 * len(positive)]) + sum(entropy[box] for box in positive)
        for box in positive:
            for ours, wanted in zip(predictions[image, box, :4], offsets[image, box], strict=True):
                distance = abs(ours - wanted)
                found += distance**2 / 2 if distance < 1 else distance - 0.5
        total += found / len(positive)
    return total / len(labels)


def of_loss() -> dict:
    random = np.random.RandomState(2)
    predictions, offsets = random.randn(5, 40, 4 + 6) * 2, random.randn(5, 40, 4)
    labels = random.randint(1, 6, (5, 40)) * (random.rand(5, 40) < np.array([0.1, 0.02, 0.3, 0.9, 0.0])[:, None])
    labels[1, 7] = 2
    tensors = [torch.from_numpy(each) for each in (predictions, offsets, labels)]
    ours, expected = float(loss.multibox_loss(*tensors)), reference_loss(predictions, offsets, labels.tolist())
    given = torch.from_numpy(predictions[:, :15].copy()).requires_grad_()
    few = [each[:, :15] for each in tensors[1:]]
    single = [tensors[0].half(), tensors[1].float(), tensors[2].int()]
    ties = loss.hard_negatives(torch.tensor([[1.0, 2.0, 2.0, 0.5, 2.0], [0.0] * 5, [3.0, -1.0, 2.0, 0.0, 5.0]]),
                               torch.tensor([2, 3, 9]))  # fmt: skip
    return {
        "positives": (labels > 0).sum(1).tolist(),
        "error": abs(ours - expected) / expected,
        "gradients": torch.autograd.gradcheck(lambda x: loss.multibox_loss(x, *few), given),
        "fp16": abs(float(loss.multibox_loss(*single)) - expected) / expected,
        "ties": ties.tolist(),
    }


# -- detections --------------------------------------------------------------------------------------------


def reference_detections(predictions, defaults, config) -> list:
    """(image, label, score, box) of each detection, by plain loops."""
    found = []
    for image, rows in enumerate(predictions):
        of_image = []
        places = [
            as_corners(
                (
                    row[0] * 0.1 * default[2] + default[0],
                    row[1] * 0.1 * default[3] + default[1],
                    math.exp(row[2] * 0.2) * default[2],
                    math.exp(row[3] * 0.2) * default[3],
                )
            )
            for row, default in zip(rows, defaults, strict=True)
        ]
        weights = np.exp(rows[:, 4:]) / np.exp(rows[:, 4:]).sum(1, keepdims=True)
        for label in range(1, weights.shape[1]):
            order = sorted(range(len(rows)), key=lambda box: -weights[box, label])[: config.detections]
            kept = []
            for box in (each for each in order if weights[each, label] > config.score_threshold):
                if all(iou(places[box], places[other]) <= config.nms_threshold for other in kept):
                    kept.append(box)
            of_image += [(float(weights[box, label]), label, places[box]) for box in kept]
        of_image.sort(key=lambda each: -each[0])
        found += [(image, *each) for each in of_image[: config.detections]]
    return found


def of_detections() -> dict:
    random, config = np.random.RandomState(6), Config(image_size=64, detections=7, score_threshold=0.1)
    defaults = default_boxes(64, SCALES)
    predictions = random.randn(3, len(defaults), 4 + 5) * 1.5
    predictions[1, :, 4] = 50  # nothing but background
    found = detection.detect(torch.from_numpy(predictions), torch.from_numpy(defaults).float(), config)
    expected = reference_detections(predictions, defaults.tolist(), config)
    ours = list(zip(*(each.tolist() for each in (found.images, found.scores, found.labels, found.boxes)), strict=True))
    same = [a[0] == b[0] and a[2] == b[2] for a, b in zip(ours, expected, strict=True)]
    errors = [np.abs(np.array([a[1], *a[3]]) - np.array([b[1], *b[3]])).max() for a, b in zip(ours, expected)]
    return {"images": found.images.tolist(), "same": all(same), "error": float(max(errors))}


def of_operations() -> dict:
    random = np.random.RandomState(1)
    one, other = objects_of(random, 6)[0], objects_of(random, 4)[0]
    a, b = torch.from_numpy(one), torch.from_numpy(other)
    expected = [[iou(x, y) for y in other.tolist()] for x in one.tolist()]
    point = torch.tensor([[0.5, 0.5, 0.5, 0.5]])
    size = torch.tensor(1.0)
    return {
        "overlaps": float((boxes.overlaps(a, b) - torch.tensor(expected, dtype=torch.float64)).abs().max()),
        "of points": boxes.overlaps(point, point).tolist(),
        "xywh": float((boxes.xywh_to_ltrb(boxes.ltrb_to_xywh(a)) - a).abs().max()),
        "centre": float((boxes.centre_to_ltrb(boxes.ltrb_to_centre(a)) - a).abs().max()),
        "clipped": boxes.clipped(torch.tensor([[-1.0, 0.2, 0.5, 3.0]]), size, size * 2).tolist(),
    }


if __name__ == "__main__":
    checks = {"boxes": of_boxes, "coding": of_coding, "loss": of_loss, "detections": of_detections}
    print(json.dumps({name: check() for name, check in {**checks, "operations": of_operations}.items()}))
