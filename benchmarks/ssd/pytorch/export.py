"""SSD for inference servers: images to the corners and probabilities of all default boxes.

    $ python -m benchmarks.ssd.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR

Clients apply non-maximum suppression, which returns a varying number of boxes, as in ``model.select_detections``.
"""

from pathlib import Path
from typing import Any, Dict, Mapping, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.export import export
from benchmarks.common.export.export import Infer, Subject, Value, on_cpu
from benchmarks.common.export.torch import ALONE, TOOLS
from benchmarks.detection.annotations import DataSet, open_data
from benchmarks.detection.detections import empty, join_detections
from benchmarks.detection.evaluation import coco_ap
from benchmarks.ssd.pytorch import model, norms
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.data import MEAN, STD, EvaluationInput

IMAGES = "RGB, (value 0..255 - mean) / std of each colour, resized to a square whatever its shape"


class Served(nn.Module):
    """Network with decoding of boxes, without NMS."""

    def __init__(self, network: nn.Module, defaults: torch.Tensor, padding: int) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("defaults", defaults)
        self._padding = padding

    def forward(self, images: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """(N, boxes, 4) and (N, boxes, classes) of (N, 3, S, S)."""
        # The fourth colour is empty.
        return model.decode_predictions(
            self.network(functional.pad(images, (0, 0, 0, 0, 0, self._padding))), self.defaults
        )


def evaluate(config: Config, data: DataSet, infer: Infer) -> Dict[str, float]:
    """COCO's average precision of boxes over all validation images."""
    evaluation = EvaluationInput(config, data.val, ALONE)
    parts = [empty()]
    for images, positions in evaluation.one_pass():
        boxes, probabilities = infer(np.ascontiguousarray(images[:, : model.COLOURS].numpy()))
        detected = model.select_detections(torch.from_numpy(boxes), torch.from_numpy(probabilities), config)
        parts.append(model.to_original(detected, evaluation.part, positions))
    return {"map": coco_ap(data, join_detections(parts))["bbox"]}


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    config = on_cpu(config, layout="NCHW", bn_group=1)
    data = open_data(folder)
    network = model.SSD(config, len(data.categories) + 1, norms.norm_of(None, ALONE.context))
    network.load_state_dict(saved["network"])
    defaults = torch.from_numpy(model.default_boxes(config.image_size, config.box_scales))
    size = config.image_size
    return Subject(
        model=Served(network, defaults, int(config.pad_channels)).eval(),
        inputs=(Value("images", IMAGES),),
        outputs=(
            Value("boxes", "left, top, right, bottom of each default box, as fractions of the image"),
            Value("probabilities", "of each class in each default box, without the background"),
        ),
        example=(np.zeros((2, model.COLOURS, size, size), np.float32),),
        evaluate=lambda infer: evaluate(config, data, infer),
        preprocessing={
            "resize": size,
            "colours": "RGB",
            "scale": "0..255",
            "mean": list(MEAN),
            "std": list(STD),
            "layout": "NCHW",
            "score_threshold": config.score_threshold,
            "nms_threshold": config.nms_threshold,
            "detections": config.detections,
        },
    )


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
