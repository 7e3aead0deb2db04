"""ResNet in TensorFlow for a server: images to logits.

$ python -m benchmarks.resnet.tensorflow.export --experiment RUN/experiment_0 --data DATA --to DIR
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Mapping

import numpy as np

from benchmarks.common import export
from benchmarks.common.export import Infer, Subject, Value, on_cpu
from benchmarks.common.export_tensorflow import TOOLS
from benchmarks.common.ranks import Ranks
from benchmarks.resnet import serving
from benchmarks.resnet.inputs import EvaluationInput
from benchmarks.resnet.tensorflow import data, model
from benchmarks.resnet.tensorflow.config import Config

import tensorflow as tf  # isort: skip  # after frameworks.tensorflow, which settles what it prints

STEM = "stem.conv.weight"


@dataclass(frozen=True)
class Served:
    """The network as it evaluates."""

    network: model.Network

    @property
    def variables(self) -> Dict[str, tf.Variable]:
        """All of its weights."""
        return self.network.variables

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """(N, classes) of (N, height, width, 3)."""
        return self.network(images, training=False)


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    """Build what is exported: of three colour channels in any case, since the fourth one is empty."""
    config = on_cpu(config, pad_channels=False)
    network = model.build(config)
    for name, variable in network.variables.items():
        array = saved[f"weights/{name}"]
        variable.assign(array[:, :, :3] if name == STEM else array)
    evaluation = EvaluationInput(data, config, folder, Ranks(0, 1, 0, 1, "/CPU:0"))

    def evaluate(infer: Infer) -> Dict[str, float]:
        batches = ((images.numpy(), labels.numpy(), valid) for images, labels, valid in evaluation.one_pass())
        return serving.accuracy(infer, batches, evaluation.total)

    return Subject(
        model=Served(network),
        inputs=(Value("images", serving.IMAGES),),
        outputs=(Value("logits", serving.LOGITS),),
        example=(np.zeros((2, config.image_size, config.image_size, 3), np.float32),),
        evaluate=evaluate,
        preprocessing=serving.preprocessing(config, folder),
    )


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
