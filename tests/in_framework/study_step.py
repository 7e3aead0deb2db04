"""Parameters after three steps: of a network by a way, on so many devices with so many samples each, into a file."""

import json
import sys
from pathlib import Path

import mxnet as mx
import numpy as np

from benchmarks.common.run import configuration
from benchmarks.study.mxnet import data
from benchmarks.study.mxnet.config import Config
from benchmarks.study.mxnet.measure import train_step
from benchmarks.study.mxnet.training import build, finish, start

for path in map(Path, sys.argv[1:]):
    config = configuration.load(Config, path)
    place = start(config)
    training = build(config, place)
    batches = data.batches(config, place)
    for _ in range(3):
        train_step(training, batches())
    mx.nd.waitall()
    if place.rank == 0:
        # Names hold the number of a network that was built before it in this process; the order is the symbol's.
        parameters = training.network.collect_params().values()
        copies = [[each.asnumpy() for each in parameter.list_data()] for parameter in parameters]
        spread = max(float(np.abs(one - each[0]).max()) for each in copies for one in each)
        np.savez(str(path.with_suffix(".npz")), *[each[0] for each in copies])
        print(json.dumps({"copies_differ_by": spread}))
finish(config)
