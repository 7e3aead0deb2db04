"""Common parts of exported models for all frameworks: input format and accuracy."""

from pathlib import Path
from typing import Any, Callable, Dict

import numpy as np

from benchmarks.common.data import manifest
from benchmarks.common.export.export import Infer, Subject, Value
from benchmarks.resnet.config import Hyperparameters
from benchmarks.resnet.inputs import MEAN, STD, EvaluationInput

IMAGES = "RGB, (value 0..255 - mean) / std of each colour, the shorter side resized, the centre cropped"
LOGITS = "one for each class; the largest is the answer"


def subject(
    model: Any, config: Hyperparameters, folder: Path, evaluation: EvaluationInput, array: Callable[[Any], np.ndarray]
) -> Subject:
    """Return the export for a model from images with three colours to logits, evaluated by top-1 accuracy.

    Args:
        model: takes images in ``config.layout``.
        config: without the fourth colour.
        folder: data set.
        evaluation: validation batches.
        array: converts tensors of ``evaluation`` to NumPy.
    """
    shape = (3, config.image_size, config.image_size)
    return Subject(
        model=model,
        inputs=(Value("images", IMAGES),),
        outputs=(Value("logits", LOGITS),),
        example=(np.zeros((2, *(shape if config.layout == "NCHW" else shape[::-1])), np.float32),),
        evaluate=lambda infer: accuracy(infer, evaluation, array),
        preprocessing={
            "resize_shorter": config.eval_resize,
            "crop": config.image_size,
            "colours": "RGB",
            "scale": "0..255",
            "mean": list(MEAN),
            "std": list(STD),
            "layout": config.layout,
            "classes": manifest.read(folder)["classes"],
        },
    )


def accuracy(infer: Infer, evaluation: EvaluationInput, array: Callable[[Any], np.ndarray]) -> Dict[str, float]:
    correct = 0
    for images, labels, valid in evaluation.one_pass():
        if valid:
            (logits,) = infer(array(images)[:valid])
            correct += int((logits.argmax(axis=1) == array(labels)[:valid].reshape(-1)).sum())
    return {"accuracy": correct / evaluation.total}
