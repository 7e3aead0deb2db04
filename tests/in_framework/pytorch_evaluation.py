"""Evaluate fixed random weights by the PyTorch implementation; rank 0 prints the accuracy of two passes.

Arguments: data folder, batch size. Run on any number of ranks: the counts must be the same.
"""

import dataclasses
import json
import sys
from pathlib import Path

from benchmarks.common.frameworks import pytorch
from benchmarks.resnet.inputs import EvaluationInput
from benchmarks.resnet.pytorch import data as tensors
from benchmarks.resnet.pytorch import model, train
from benchmarks.resnet.pytorch.config import Config
from tests.in_framework.some_run import some_run

data, batch_size = Path(sys.argv[1]), int(sys.argv[2])
config = dataclasses.replace(
    Config(), device="cpu", precision="fp32", pad_channels=False, depth=18, num_classes=10,
    image_size=32, eval_resize=32, batch_size=batch_size, dali_threads=1, seed=5,
)  # fmt: skip
run = some_run(config, pytorch, data)
ranks = run.ranks
training = train.build(config, ranks, {})
network = training.network
# Ranks that saw other images have other statistics; they must evaluate with the mean, which is a fresh
# network's here.
for buffer in model.statistics(network):
    buffer += 0.5 * (2 * ranks.rank - ranks.size + 1)
evaluation = EvaluationInput(tensors, config, data, ranks)
passes = [train.evaluate(training, evaluation, run)["accuracy"] for _ in range(2)]
fresh = model.statistics(model.build(config))
error = max(float((mine - new).abs().max()) for mine, new in zip(model.statistics(network), fresh))
run.finish()
if ranks.rank == 0:
    print(json.dumps({"passes": passes, "total": evaluation.total, "error of statistics": error}))
