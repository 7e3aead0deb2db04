"""Evaluate fixed random weights by the implementation, and one image at a time; rank 0 prints both.

Arguments: data folder, batch size. Run on any number of ranks: the counts must be the same.
"""

import dataclasses
import io
import json
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from PIL import Image

from benchmarks.common.data.recordio import read_index, read_record, unpack
from benchmarks.common.frameworks import mxnet
from benchmarks.resnet.inputs import EvaluationInput
from benchmarks.resnet.mxnet import data as tensors
from benchmarks.resnet.mxnet import train
from benchmarks.resnet.mxnet.config import Config
from benchmarks.resnet.mxnet.train import build
from benchmarks.resnet.pipeline import MEAN, STD
from tests.in_framework.some_run import some_run

data, batch_size = Path(sys.argv[1]), int(sys.argv[2])
config = dataclasses.replace(
    Config(), device="cpu", layout="NCHW", precision="fp32", pad_channels=False, depth=18, num_classes=10,
    image_size=32, eval_resize=32, batch_size=batch_size, dali_threads=1, seed=5,
)  # fmt: skip
run = some_run(config, mxnet, data)
training = build(config, run.ranks, {})
evaluation = EvaluationInput(tensors, config, data, run.ranks)
passes = [train.evaluate(training, evaluation, run)["accuracy"] for _ in range(2)]


def by_hand():
    """Accuracy by Pillow and one image at a time: no DALI, no batches, no ranks."""
    hits = count = 0
    with (data / "val.rec").open("rb") as file:
        for _, offset in read_index(data / "val.idx"):
            label, jpeg = unpack(read_record(file, offset))
            pixels = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"), dtype="float32")
            image = ((pixels - np.array(MEAN)) / np.array(STD)).transpose(2, 0, 1)[None]
            hits += int(training.network(mx.nd.array(image)).asnumpy().argmax() == label)
            count += 1
    return hits / count


if run.ranks.rank == 0:
    print(json.dumps({"passes": passes, "total": evaluation.total, "by hand": by_hand() if batch_size == 1 else None}))
run.finish()
