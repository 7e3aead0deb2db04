"""ResNet's evaluation in MXNet counts each image once on any number of ranks: next to one image at a time by Pillow."""

import io

import numpy as np
import pytest
from PIL import Image

from benchmarks.common.data.recordio import read_index, read_record, unpack
from benchmarks.common.frameworks import mxnet
from benchmarks.resnet.inputs import MEAN, STD, EvaluationInput
from benchmarks.resnet.mxnet import data as tensors
from benchmarks.resnet.mxnet import train
from benchmarks.resnet.mxnet.config import Config
from tests.in_framework import resnet

import mxnet as mx  # isort: skip

LONG = True
RANKS = (1, 2)


def test_accuracy_is_that_of_single_images(digits, together):
    # One of two ranks has 149 images, which are a batch more than the other's 148.
    config = resnet.config_of(Config, batch_size=37)
    run = resnet.run_of(config, mxnet, digits, together)
    training = train.build(config, run.ranks, {})
    evaluation = EvaluationInput(tensors, config, digits, run.ranks)
    assert evaluation.total == 297
    first, second = (train.evaluate(training, evaluation, run)["accuracy"] for _ in range(2))
    hits = 0
    with (digits / "val.rec").open("rb") as file:
        for _, offset in read_index(digits / "val.idx"):
            label, jpeg = unpack(read_record(file, offset))
            pixels = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"), dtype="float32")
            image = ((pixels - np.array(MEAN)) / np.array(STD)).transpose(2, 0, 1)[None]
            hits += training.network(mx.nd.array(image)).asnumpy().argmax() == label
    run.finish()
    # Pillow and DALI decode JPEG a little differently: an image or two may fall to the other side.
    assert first == second == pytest.approx(hits / 297, abs=2 / 297)
