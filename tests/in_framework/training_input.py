"""What the training pipeline hands out: all images, in shards, and the same ones after a checkpoint."""

import collections
import dataclasses
import json
import sys
from pathlib import Path

import mxnet as mx
import numpy as np

from benchmarks.common.data.recordio import read_index, read_record, unpack
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import pipeline
from benchmarks.resnet.config import Hyperparameters
from benchmarks.resnet.inputs import TrainingInput
from benchmarks.resnet.mxnet import data as tensors
from benchmarks.resnet.mxnet.config import Config

data = Path(sys.argv[1])
config = dataclasses.replace(
    Config(), device="cpu", layout="NCHW", precision="fp32", pad_channels=False, num_classes=10,
    image_size=32, eval_resize=32, batch_size=50, dali_threads=1, dali_shuffle_buffer=100, seed=5,
)  # fmt: skip


def source(shard, shards):
    return TrainingInput(tensors, config, data, Ranks(shard, shards, shard, shards, mx.cpu()))


def labels_of_files():
    with (data / "train.rec").open("rb") as file:
        offsets = [offset for _, offset in read_index(data / "train.idx")]
        return collections.Counter(int(unpack(read_record(file, offset))[0]) for offset in offsets)


seen = collections.Counter()
for shard in range(2):
    stream = source(shard, 2)
    for _ in range(1500 // 2 // config.batch_size):
        seen.update(int(label) for label in stream.next()[1].asnumpy())

unbroken = source(0, 1)
for _ in range(40):
    unbroken.next()
state = unbroken.checkpoint()
resumed = TrainingInput(tensors, config, data, Ranks(0, 1, 0, 1, mx.cpu()), state)
same = True
for _ in range(40):
    for left, right in zip(unbroken.next(), resumed.next()):
        same = same and np.array_equal(left.asnumpy(), right.asnumpy())

padded = Hyperparameters(device="cpu", batch_size=8, image_size=32, dali_threads=1, dali_prefetch=1, dali_mmap=False)
shape = pipeline.training_pipeline(padded, data, Ranks(0, 1, 0, 1, None)).run()[0].as_tensor().shape()

# Two ranks over the same single shard would draw the same images in the same order, but other crops.
first = source(0, 1).next()[0].asnumpy()
other = (
    TrainingInput(tensors, dataclasses.replace(config, seed=6), data, Ranks(0, 1, 0, 1, mx.cpu())).next()[0].asnumpy()
)
print(
    json.dumps(
        {
            "labels of two shards over an epoch": sorted(seen.items()),
            "labels of the files": sorted(labels_of_files().items()),
            "resumed equals unbroken": bool(same),
            "crops differ between ranks": not np.array_equal(first, other),
            "shape NHWC padded": list(shape),
        }
    )
)
