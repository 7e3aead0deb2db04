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

# Prefixes of shared and rank-local arrays in a checkpoint
WEIGHTS, STATISTICS = "weights/", "statistics/"


def arrays_of(saved: Mapping[str, Any]) -> Dict[str, np.ndarray]:
    """Return the weights in a checkpoint, in order; batch-norm statistics are averaged over the ranks."""
    ranks = [state for name, state in saved.items() if name.startswith("rank_")]
    arrays = {name[len(WEIGHTS) :]: value for name, value in saved.items() if name.startswith(WEIGHTS)}
    for name in arrays:
        if f"{STATISTICS}{name}" in ranks[0]:
            arrays[name] = np.mean([state[f"{STATISTICS}{name}"] for state in ranks], axis=0)
    return arrays


def restore(network: mx.gluon.HybridBlock, arrays: Mapping[str, np.ndarray], layout: str) -> None:
    """Load weights in ``layout`` into a network in NCHW, by order, because fused operators have other names.

    Raises:
        Problem: the weights do not fit the network.
    """
    parameters = list(network.collect_params().values())
    if len(arrays) != len(parameters):
        raise Problem(f"{len(arrays)} weights", f"{len(parameters)}, as in config.json", "export another run")
    for (name, array), parameter in zip(arrays.items(), parameters):
        if array.ndim == 4:
            # A fourth colour is empty.
            array = (array.transpose(0, 3, 1, 2) if layout == "NHWC" else array)[:, : parameter.shape[1]]
        kind = parameter.name.rsplit("_", 1)[-1]
        if array.shape != parameter.shape or not name.endswith(kind):
            raise Problem(f"{name} {array.shape}", f"{kind} {parameter.shape}", "export another run")
        parameter.set_data(mx.nd.array(array, dtype="float32"))


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    """Build the network for export: NCHW, which MXNet supports on CPUs, with three colour channels."""
    layout, config = config.layout, on_cpu(config, pad_channels=False, layout="NCHW")
    network = model.build(config)
    model.initialize(network, config, mx.cpu())
    restore(network, arrays_of(saved), layout)
    evaluation = EvaluationInput(data, config, folder, Ranks(0, 1, 0, 1, mx.cpu()))
    return serving.subject(network, config, folder, evaluation, mx.nd.NDArray.asnumpy)


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
