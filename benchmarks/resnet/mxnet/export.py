"""ResNet in MXNet for a server: images to logits.

$ python -m benchmarks.resnet.mxnet.export --experiment RUN/experiment_0 --data DATA --to DIR
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping

import numpy as np

from benchmarks.common import export
from benchmarks.common.data.problem import Problem
from benchmarks.common.export import Infer, Subject, Value, on_cpu
from benchmarks.common.export_mxnet import TOOLS
from benchmarks.common.ranks import Ranks
from benchmarks.resnet import serving
from benchmarks.resnet.inputs import EvaluationInput
from benchmarks.resnet.mxnet import data, model
from benchmarks.resnet.mxnet.config import Config

import mxnet as mx  # isort: skip  # after frameworks.mxnet, which settles the order of imports

SAVED = "weights/"
"""Before the name of a weight in a checkpoint, where each rank's own statistics of batch-norm are those of rank 0."""


def restore(network: mx.gluon.HybridBlock, saved: Mapping[str, Any], layout: str) -> None:
    """Give a network in NCHW the weights of one in ``layout``, in their order: fused operators name them otherwise.

    Raises:
        Problem: they are another network's.
    """
    arrays = {name: value for name, value in saved.items() if name.startswith(SAVED)}
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
    restore(network, saved, layout)
    evaluation = EvaluationInput(data, config, folder, Ranks(0, 1, 0, 1, mx.cpu()))

    def evaluate(infer: Infer) -> Dict[str, float]:
        batches = ((images.asnumpy(), labels.asnumpy(), valid) for images, labels, valid in evaluation.one_pass())
        return serving.accuracy(infer, batches, evaluation.total)

    return Subject(
        model=network,
        inputs=(Value("images", serving.IMAGES),),
        outputs=(Value("logits", serving.LOGITS),),
        example=(np.zeros((2, 3, config.image_size, config.image_size), np.float32),),
        evaluate=evaluate,
        preprocessing=serving.preprocessing(config, folder),
    )


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
