"""ResNet in MXNet for a server: images to logits.

$ python -m benchmarks.resnet.mxnet.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

from pathlib import Path
from typing import Any, Dict, Mapping

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.common.export import export
from benchmarks.common.export.export import Subject, on_cpu
from benchmarks.common.export.mxnet import TOOLS
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import serving
from benchmarks.resnet.inputs import EvaluationInput
from benchmarks.resnet.mxnet import data, model
from benchmarks.resnet.mxnet.config import Config

import mxnet as mx  # isort: skip  # after frameworks.mxnet, which settles the order of imports

# Before the names of what all ranks have in a checkpoint, and of what each has for itself.
WEIGHTS, STATISTICS = "weights/", "statistics/"


def arrays_of(saved: Mapping[str, Any]) -> Dict[str, np.ndarray]:
    """Return a checkpoint's weights in their order; the statistics of batch-norm are the means of the ranks' own."""
    ranks = [each for name, each in saved.items() if name.startswith("rank_")]
    arrays = {name[len(WEIGHTS) :]: value for name, value in saved.items() if name.startswith(WEIGHTS)}
    for name in arrays:
        if f"{STATISTICS}{name}" in ranks[0]:
            arrays[name] = np.mean([each[f"{STATISTICS}{name}"] for each in ranks], axis=0)
    return arrays


def restore(network: mx.gluon.HybridBlock, arrays: Mapping[str, np.ndarray], layout: str) -> None:
    """Give a network in NCHW the weights of one in ``layout``, in their order: fused operators name them otherwise.

    Raises:
        Problem: they are another network's.
    """
    parameters = list(network.collect_params().values())
    if len(arrays) != len(parameters):
        raise Problem(f"{len(arrays)} weights", f"{len(parameters)}, as config.json has it", "export another run")
    for (name, array), parameter in zip(arrays.items(), parameters):
        if array.ndim == 4:
            # A fourth colour is empty.
            array = (array.transpose(0, 3, 1, 2) if layout == "NHWC" else array)[:, : parameter.shape[1]]
        kind = parameter.name.rsplit("_", 1)[-1]
        if array.shape != parameter.shape or not name.endswith(kind):
            raise Problem(f"{name} {array.shape}", f"{kind} {parameter.shape}", "export another run")
        parameter.set_data(mx.nd.array(array, dtype="float32"))


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    """Build what is exported: in NCHW, the layout that MXNet has on a CPU, and of three colour channels."""
    layout, config = config.layout, on_cpu(config, pad_channels=False, layout="NCHW")
    network = model.build(config)
    model.initialize(network, config, mx.cpu())
    restore(network, arrays_of(saved), layout)
    evaluation = EvaluationInput(data, config, folder, Ranks(0, 1, 0, 1, mx.cpu()))
    return serving.subject(network, config, folder, evaluation, mx.nd.NDArray.asnumpy)


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
