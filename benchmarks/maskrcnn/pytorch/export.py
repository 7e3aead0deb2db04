"""Mask R-CNN for inference servers: images and sizes to boxes, scores, classes and masks.

    $ python -m benchmarks.maskrcnn.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR

The model includes NMS: see served.py. Clients paste the masks into images, as in evaluation.paste.
"""

from functools import partial
from pathlib import Path
from typing import Any, Dict, Mapping

import numpy as np
import torch

from benchmarks.common.export import export
from benchmarks.common.export.export import Arrays, Infer, Subject, Value, on_cpu
from benchmarks.common.export.torch import ALONE, TOOLS, as_tensors
from benchmarks.detection.annotations import DataSet, open_data
from benchmarks.detection.detections import empty, join_detections
from benchmarks.detection.evaluation import coco_ap
from benchmarks.detection.pytorch.boxes import DetectedBoxes
from benchmarks.maskrcnn.order import STRIDE, all_shapes
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import evaluation_input
from benchmarks.maskrcnn.pytorch.evaluation import THRESHOLD, to_detections
from benchmarks.maskrcnn.pytorch.model import Model
from benchmarks.maskrcnn.pytorch.operators import OperatorSet
from benchmarks.maskrcnn.pytorch.served import Served
from benchmarks.maskrcnn.pytorch.train import QUALITIES

INPUTS = (
    Value("images", "0..255; padded right and below with the mean colour to multiples of 32"),
    Value("sizes", "width and height of each image in it, in pixels"),
)
OUTPUTS = (
    Value("boxes", "left, top, right, bottom in pixels of the input, by descending score"),
    Value("scores", "0 where there is no detection"),
    Value("labels", "index of the class in `classes`, from 1; 0: no detection"),
    Value("masks", "probability of the object in each cell of a grid over its box"),
)


def original(model: Model, *inputs: np.ndarray) -> Arrays:
    """Return the training code's detections in the form of the exported model's."""
    images, sizes = as_tensors(inputs)
    detected, masks = model.detect(images, sizes)
    counts = detected.images.bincount(minlength=len(images))
    slot = torch.arange(len(detected.images)) - (counts.cumsum(0) - counts)[detected.images]
    outputs = []
    for values in (detected.boxes, detected.scores, detected.labels, masks):
        output = torch.zeros(len(images), model.config.detections, *values.shape[1:], dtype=values.dtype)
        output[detected.images, slot] = values
        outputs.append(output.numpy())
    return tuple(outputs)


def evaluate(config: Config, data: DataSet, infer: Infer) -> Dict[str, float]:
    """Return COCO's average precision of boxes and masks over all validation images."""
    parts = [empty(masks=True)]
    for batch in evaluation_input(config, data, ALONE):
        outputs = as_tensors(infer(batch.images.contiguous().numpy(), batch.sizes.numpy()))
        is_valid = outputs[2] > 0
        boxes, scores, labels, masks = (output[is_valid] for output in outputs)
        detected = DetectedBoxes(is_valid.nonzero()[:, 0], boxes, scores, labels)
        parts.append(to_detections(data, batch, detected, masks.numpy(), config.edge))
    precision = coco_ap(data, join_detections(parts), tuple(QUALITIES))
    return {name: precision[kind] for kind, name in QUALITIES.items()}


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    config = on_cpu(config)
    data = open_data(folder)
    model = Model(config, len(data.categories) + 1, OperatorSet({}), ALONE.context)
    model.network.load_state_dict(saved["network"])
    model.network.eval()
    height, width = all_shapes(config.short_side, config.long_side, config.bucket_step)[-1]
    return Subject(
        model=Served(model).eval(),
        inputs=INPUTS,
        outputs=OUTPUTS,
        # Different sizes, so that the exporter does not merge the axes.
        example=(np.zeros((2, 3, height, width + STRIDE), np.uint8), np.full((2, 2), height, np.float32)),
        evaluate=partial(evaluate, config, data),
        preprocessing={
            "resize_shorter": config.short_side,
            "longest": config.long_side,
            "pad_to_multiple": config.bucket_step,
            "pad_colour": list(config.pixel_mean),
            "colours": "BGR" if config.bgr else "RGB",
            "scale": "0..255",
            "layout": "NCHW",
            "mask_threshold": THRESHOLD,
            "classes": [category.name for category in data.categories],
        },
        original=partial(original, model),
        any_size={"images": (2, 3)},
        tolerance=1e-3,
        turned=0.02,
    )


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
