"""When ranks read the data set for the first time, and when rank 0 logs run_start, which takes it a second here.

Arguments: framework, config.json, data folder, empty output folder. Trains ResNet up to its first read, of which each
rank writes the time to OUTPUT/rank_N.
"""

import importlib
import sys
import time
from pathlib import Path

from benchmarks.common.run.mllog import MLLog

name, config, data, output = sys.argv[1:]
framework = importlib.import_module(f"benchmarks.common.frameworks.{name}")
train = importlib.import_module(f"benchmarks.resnet.{name}.train")
inputs = importlib.import_module("benchmarks.resnet.inputs")
run_start = MLLog.run_start
rank = 0


class Read(Exception):
    """The data set was read."""


def start_in_a_second(log):
    time.sleep(1.0 if rank == 0 else 0.0)
    run_start(log)


def read(index):
    (Path(output) / f"rank_{rank}").write_text(f"{time.time():.3f} {index.name}", encoding="ascii")
    raise Read


def started(config):
    global rank
    ranks = start(config)
    rank = ranks.rank
    return ranks


start, framework.start = framework.start, started
MLLog.run_start, inputs.count_records = start_in_a_second, read
try:
    train.main(["--config", config, "--data", data, "--output", output])
except Read:
    framework.finish()
