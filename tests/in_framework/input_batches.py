"""Batches of every precision and layout through a framework's data.py.

Arguments: framework, data folder.
"""

import importlib
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

name, data = sys.argv[1], Path(sys.argv[2])
framework = importlib.import_module(f"benchmarks.common.frameworks.{name}")
tensors = importlib.import_module(f"benchmarks.resnet.{name}.data")

import numpy as np  # noqa: E402

from benchmarks.resnet import inputs  # noqa: E402
from benchmarks.resnet.config import Hyperparameters  # noqa: E402

SMALL = {"image_size": 32, "eval_resize": 32, "batch_size": 8, "dali_threads": 1, "dali_prefetch": 1, "log_interval": 1}
config = Hyperparameters(device="cpu", precision="fp32", **SMALL)
ranks = framework.start(config)


def in_numpy(tensor):
    return tensor.asnumpy() if hasattr(tensor, "asnumpy") else tensor.numpy()


def converted(config, device):
    # What data.py makes of a batch, compared with DALI's, after DALI has filled its memory again
    source = inputs.training_pipeline(config, data, ranks)
    images, labels = source.run()
    wanted = [np.array(output.as_tensor()) for output in (images, labels)]
    found = tensors.convert(replace(config, device=device), ranks, images, labels)
    for _ in range(3):
        source.run()
    pixels = in_numpy(found[0])
    if name == "pytorch" and config.layout == "NHWC":
        pixels = pixels.transpose(0, 2, 3, 1)
    return {
        "type": str(pixels.dtype),
        "shape": list(pixels.shape),
        "images": np.array_equal(pixels, wanted[0]),
        "labels": in_numpy(found[1]).tolist() == wanted[1].reshape(-1).tolist(),
    }


# -- the order of calls on a GPU, of a framework whose copies are queued --------------------------------------


class Labels:
    # Read by a thread; the copy of its batch is done once the step that comes after it is queued, as on a busy GPU
    def __init__(self, calls):
        self.calls, self.step_is_queued = calls, threading.Event()

    def numpy(self):
        assert self.step_is_queued.wait(30), "waited for before the step was queued: the GPU has no work"
        self.calls.append("copied")


def order_of_calls():
    calls = []

    def run():
        calls.append("run")
        return None, Labels(calls)

    def convert(config, ranks, images, labels):
        calls.append("convert")
        return images, labels

    queued = SimpleNamespace(convert=convert, copied=tensors.copied)
    batches = inputs.Batches(queued, replace(config, device="gpu"), ranks, SimpleNamespace(run=run))
    for _ in range(3):
        _, labels = batches.next()
        calls.append("step")
        labels.step_is_queued.set()
    return calls


kinds = [("fp16", "NHWC", True), ("fp16", "NCHW", False), ("fp32", "NHWC", False), ("fp32", "NCHW", True)]
batches, drains = {}, []
if name == "tensorflow":
    framework.tf.test.experimental.sync_devices = lambda: drains.append("drain")
for precision, layout, padded in kinds:
    for device in ("cpu", "gpu"):  # the branch of each; both copy from DALI's memory on the CPU
        made = replace(config, precision=precision, layout=layout, pad_channels=padded)
        batches[f"{precision} {layout} {3 + padded} {device}"] = converted(made, device)
if name == "tensorflow":
    framework._finish_queued()
calls, drained = order_of_calls() if hasattr(tensors, "copied") else [], len(drains)
print(json.dumps({"batches": batches, "calls": calls, "drains": drained}))
framework.finish()
