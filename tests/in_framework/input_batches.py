"""Batches of every precision and layout through a framework's data.py, and the share of the time waiting for them.

Arguments: framework, data folder.
"""

import importlib
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

name, data = sys.argv[1], Path(sys.argv[2])
framework = importlib.import_module(f"benchmarks.common.frameworks.{name}")
tensors = importlib.import_module(f"benchmarks.resnet.{name}.data")

import numpy as np  # noqa: E402

from benchmarks.common.checks import bench  # noqa: E402
from benchmarks.common.run.timing import InputWait  # noqa: E402
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


# -- the share of waiting: an input and a device that take known times ---------------------------------------

STEPS, STEP, TRIES = 6, 0.05, 3


class Sleeps:
    # Sleeps, which take longer than asked for on a busy machine: how long they took
    def __init__(self, seconds):
        self.seconds, self.took = seconds, []

    def __call__(self, *_):
        started = time.perf_counter()
        time.sleep(self.seconds)
        self.took.append(time.perf_counter() - started)


def make_step(sleep):
    # A step that keeps the device busy, queued where the framework queues
    if name != "mxnet":
        return lambda batch: (sleep(), scalar())[1]
    mx = importlib.import_module("mxnet")

    class Sleep(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            sleep()
            self.assign(out_data[0], req[0], in_data[0])

    @mx.operator.register("sleep")
    class SleepProperties(mx.operator.CustomOpProp):
        def create_operator(self, context, shapes, types):
            return Sleep()

    state = {"last": mx.nd.zeros((1,))}  # each step needs the one before, as weights do

    def step(batch):
        state["last"] = mx.nd.Custom(state["last"], op_type="sleep")
        return state["last"]

    return step


def scalar():
    return importlib.import_module("torch").zeros(()) if name == "pytorch" else 0.0


class Stream:
    # A CUDA stream whose work takes known times, and its events
    def __init__(self):
        self.busy_until = 0.0

    def step(self, batch):
        self.busy_until = max(self.busy_until, time.perf_counter()) + STEP

    def event(self, enable_timing):
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", max(self.busy_until, time.perf_counter()))
        event.synchronize = lambda: time.sleep(max(0.0, event.at - time.perf_counter()))
        event.query = lambda: event.at <= time.perf_counter()
        event.elapsed_time = lambda other: (other.at - event.at) * 1000
        return event


def on_a_stream(fetch):
    # The share of the same loop over a GPU that is simulated: by events in PyTorch, else by the watcher
    stream = Stream()
    if name == "pytorch":
        framework.torch.cuda, kept = SimpleNamespace(Event=stream.event), framework.torch.cuda
        wait = framework.input_wait(replace(ranks, context=framework.torch.device("cuda")))
    else:
        wait = InputWait(lambda: time.sleep(max(0.0, stream.busy_until - time.perf_counter())))
    started = time.perf_counter()
    for _ in range(STEPS):
        stream.step(wait.fetch(fetch))
    waited = wait.take()
    if name == "pytorch":
        framework.torch.cuda = kept
    return waited / (stream.busy_until - started)


def shares(seconds):
    fetch, step, simulated = Sleeps(seconds), Sleeps(STEP), Sleeps(seconds)
    loop = bench.training_loop(framework, config, ranks, make_step(step), fetch)
    own = {"share": loop(STEPS), "fetches": fetch.took, "steps": step.took}
    return {
        "own": own,
        "simulated": {"share": on_a_stream(simulated), "fetches": simulated.took, "steps": [STEP] * STEPS},
    }


kinds = [("fp16", "NHWC", True), ("fp16", "NCHW", False), ("fp32", "NHWC", False), ("fp32", "NCHW", True)]
batches = {}
drains = []
if name == "tensorflow":
    framework.tf.test.experimental.sync_devices = lambda: drains.append("drain")
for precision, layout, padded in kinds:
    for device in ("cpu", "gpu"):  # the branch of each; both copy from DALI's memory on the CPU
        made = replace(config, precision=precision, layout=layout, pad_channels=padded)
        batches[f"{precision} {layout} {3 + padded} {device}"] = converted(made, device)
if name == "tensorflow":
    framework._finish_queued()
calls, drained = order_of_calls() if hasattr(tensors, "copied") else [], len(drains)
found = {str(seconds): [shares(seconds) for _ in range(TRIES)] for seconds in (0.0, 0.03, 0.1)}
print(json.dumps({"batches": batches, "shares": found, "calls": calls, "drains": drained}))
framework.finish()
