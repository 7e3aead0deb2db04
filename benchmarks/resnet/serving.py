"""What exported models of all frameworks have in common: their input, and the quality of their output."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterable, Tuple

import numpy as np

from benchmarks.common.data import passport
from benchmarks.common.export import Infer
from benchmarks.resnet.config import Hyperparameters
from benchmarks.resnet.pipeline import MEAN, STD

IMAGES = "RGB, (value 0..255 - mean) / std of each colour, the shorter side resized, the centre cropped"
LOGITS = "one for each class; the largest is the answer"


def preprocessing(config: Hyperparameters, folder: Path) -> Dict[str, Any]:
    """What a client does to an image, and the names of the classes."""
    return {
        "resize_shorter": config.eval_resize,
        "crop": config.image_size,
        "colours": "RGB",
        "scale": "0..255",
        "mean": list(MEAN),
        "std": list(STD),
        "layout": config.layout,
        "classes": passport.read(folder)["classes"],
    }


def accuracy(infer: Infer, batches: Iterable[Tuple[np.ndarray, np.ndarray, int]], total: int) -> Dict[str, float]:
    """Top-1 accuracy over ``total`` images: batches of images, labels and how many of them count."""
    correct = 0
    for images, labels, valid in batches:
        if valid:
            (logits,) = infer(images[:valid])
            correct += int((logits.argmax(axis=1) == labels[:valid].reshape(-1)).sum())
    return {"accuracy": correct / total}
