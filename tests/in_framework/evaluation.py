"""Evaluate fixed random weights by the implementation, and one image at a time; rank 0 prints both.

Arguments: data folder, batch size. Run on any number of ranks: the counts must be the same.
"""

import dataclasses
import io
import json
import sys
import tempfile
from pathlib import Path

import mxnet as mx
import numpy as np
from PIL import Image

from benchmarks.common import horovod_mxnet
from benchmarks.common.data.recordio import RecordReader, unpack
from benchmarks.common.stopping import Heartbeat, StopRequest
from benchmarks.resnet.mxnet import model, train
from benchmarks.resnet.mxnet.config import Config
from benchmarks.resnet.mxnet.data import evaluation_input
from benchmarks.resnet.pipeline import MEAN, STD

data, batch_size = Path(sys.argv[1]), int(sys.argv[2])
config = dataclasses.replace(
    Config(), device="cpu", layout="NCHW", precision="fp32", pad_channels=False, depth=18, num_classes=10,
    image_size=32, eval_resize=32, batch_size=batch_size, dali_threads=1, seed=5,
)  # fmt: skip
stop = StopRequest()
stop.arm()
ranks = horovod_mxnet.start("cpu")
network = model.build(config)
model.initialize(network, config, ranks.context)
evaluation = evaluation_input(config, data, ranks)
heartbeat = Heartbeat(Path(tempfile.mkdtemp()), ranks.rank)
passes = [train.evaluate(network, evaluation, stop, heartbeat, 0) for _ in range(2)]


def by_hand():
    """Accuracy by Pillow and one image at a time: no DALI, no batches, no ranks."""
    hits = count = 0
    with RecordReader(data / "val.rec") as reader:
        for record in reader:
            header, jpeg = unpack(record)
            pixels = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"), dtype="float32")
            image = ((pixels - np.array(MEAN)) / np.array(STD)).transpose(2, 0, 1)[None]
            hits += int(network(mx.nd.array(image)).asnumpy().argmax() == header.label)
            count += 1
    return hits / count


if ranks.rank == 0:
    print(json.dumps({"passes": passes, "total": evaluation.total, "by hand": by_hand()}))
horovod_mxnet.finish()
