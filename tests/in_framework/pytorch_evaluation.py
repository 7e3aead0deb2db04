"""Evaluate fixed random weights by the PyTorch implementation; rank 0 prints the accuracy of two passes.

Arguments: data folder, batch size. Run on any number of ranks: the counts must be the same.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.common import torch_ranks
from benchmarks.common.stopping import Heartbeat, StopRequest
from benchmarks.resnet.pytorch import model, train
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.data import evaluation_input

data, batch_size = Path(sys.argv[1]), int(sys.argv[2])
config = dataclasses.replace(
    Config(), device="cpu", precision="fp32", pad_channels=False, depth=18, num_classes=10,
    image_size=32, eval_resize=32, batch_size=batch_size, dali_threads=1, seed=5,
)  # fmt: skip
stop = StopRequest()
stop.arm()
ranks = torch_ranks.start("cpu")
network = model.place(model.build(config), config, ranks.context)
# Ranks that saw other images have other statistics; they must evaluate with the mean, which is a fresh
# network's here.
for buffer in model.statistics(network):
    buffer += 0.5 * (2 * ranks.rank - ranks.size + 1)
evaluation = evaluation_input(config, data, ranks)
heartbeat = Heartbeat(Path(tempfile.mkdtemp()), ranks.rank)
passes = [train.evaluate(network, config, evaluation, stop, heartbeat, 0) for _ in range(2)]
fresh = model.statistics(model.build(config))
error = max(float((mine - new).abs().max()) for mine, new in zip(model.statistics(network), fresh))
torch_ranks.finish()
if ranks.rank == 0:
    print(json.dumps({"passes": passes, "total": evaluation.total, "error of statistics": error}))
