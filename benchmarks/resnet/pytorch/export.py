"""ResNet in PyTorch for a server: images to logits.

$ python -m benchmarks.resnet.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

from pathlib import Path
from typing import Any, Mapping

import torch

from benchmarks.common.export import export
from benchmarks.common.export.export import Subject, on_cpu
from benchmarks.common.export.torch import TOOLS
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import serving
from benchmarks.resnet.inputs import EvaluationInput
from benchmarks.resnet.pytorch import data, model
from benchmarks.resnet.pytorch.config import Config

STEM = "stem.conv.weight"


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    """Build the network for export with three colour channels; the fourth is padding."""
    config = on_cpu(config, pad_channels=False, layout="NCHW")
    network = model.build(config)
    # In place: a copy would lose the version metadata of the state_dict, and with it the handling of
    # num_batches_tracked.
    weights = saved["network"]
    weights[STEM] = weights[STEM][:, :3].contiguous()
    network.load_state_dict(weights)
    evaluation = EvaluationInput(data, config, folder, Ranks(0, 1, 0, 1, torch.device("cpu")))
    return serving.subject(network.eval(), config, folder, evaluation, torch.Tensor.numpy)


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
