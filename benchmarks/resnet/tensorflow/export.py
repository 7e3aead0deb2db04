"""ResNet in TensorFlow for a server: images to logits.

$ python -m benchmarks.resnet.tensorflow.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

from pathlib import Path
from typing import Any, Mapping

from benchmarks.common.export import export
from benchmarks.common.export.export import Subject, on_cpu
from benchmarks.common.export.tensorflow import TOOLS, Evaluating
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import serving
from benchmarks.resnet.inputs import EvaluationInput
from benchmarks.resnet.tensorflow import data, model
from benchmarks.resnet.tensorflow.config import Config

STEM = "stem.conv.weight"


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    """Build the network for export with three colour channels; the fourth is padding."""
    config = on_cpu(config, pad_channels=False)
    network = model.build(config)
    for name, variable in network.variables.items():
        array = saved[f"weights/{name}"]
        variable.assign(array[:, :, :3] if name == STEM else array)
    evaluation = EvaluationInput(data, config, folder, Ranks(0, 1, 0, 1, "/CPU:0"))
    return serving.subject(Evaluating(network), config, folder, evaluation, lambda tensor: tensor.numpy())


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
