"""Parameter counts, strides, layouts, precisions and the loss of the network in PyTorch, as JSON."""

import dataclasses
import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.frameworks.pytorch import autocast
from benchmarks.common.run import choices
from benchmarks.common.run.metrics import MetricsStream, StepReports
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import abilities
from benchmarks.resnet import memory
from benchmarks.resnet.architecture import STAGES, input_shape
from benchmarks.resnet.pytorch import distributed, model, optimizer, train
from benchmarks.resnet.pytorch.config import Config

BASE = dataclasses.replace(
    Config(), device="cpu", layout="NCHW", precision="fp32", pad_channels=False, batch_size=2, image_size=32,
    depth=18, num_classes=10,
)  # fmt: skip


def trainable(depth):
    with torch.device("meta"):
        network = model.build(dataclasses.replace(BASE, depth=depth, num_classes=1000))
    return sum(parameter.numel() for parameter in network.parameters())


def kept(depth, precision):
    """Bytes that the forward pass keeps besides the weights themselves, and what the model says of them."""
    changes = {"depth": depth, "precision": precision, "image_size": 64, "eval_resize": 64, "batch_size": 8}
    config = dataclasses.replace(BASE, **changes)
    network = model.build(config)
    own = {tensor.untyped_storage().data_ptr() for tensor in network.state_dict().values()}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no other takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with autocast(torch.device("cpu"), precision):
            logits = network(torch.rand(input_shape(config)))
        model.smoothed_loss(logits, torch.zeros(8, dtype=torch.long), 0.1)
    need = memory.needed(config, "pytorch")
    copies = need.weights - 4 * memory.parameters(config)
    return sum(size for size, _ in found.values()), need.activations + copies


def strides_of_first_bottleneck():
    """Strides of the three convolutions of the first block of the second stage of ResNet-50."""
    with torch.device("meta"):
        block = model.build(dataclasses.replace(BASE, depth=50)).stage2.block1
    return [conv.stride[0] for conv in (block.conv1, block.conv2, block.conv3)]


def loss_error(smoothing):
    """Error of the loss against the formula in float64."""
    generator = np.random.RandomState(0)
    logits, labels = generator.randn(5, 7), np.array([0, 3, 6, 2, 2])
    found = model.smoothed_loss(torch.from_numpy(logits), torch.from_numpy(labels), smoothing).item()
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    target = np.full((5, 7), smoothing / 7)
    target[np.arange(5), labels] += 1 - smoothing
    return float(abs(found + (target * logs).sum(axis=1).mean()))


def logits(**changes):
    """Logits of one batch with the weights of the base's seed."""
    config = dataclasses.replace(BASE, **changes)
    torch.manual_seed(9)
    images = torch.rand(input_shape(BASE)).to(memory_format=model.memory_format(config))
    network = model.place(model.build(config), config, torch.device("cpu")).eval()
    with torch.no_grad(), autocast(torch.device("cpu"), config.precision):
        return network(images).float()


def distance(left, right):
    return float((left - right).norm() / right.norm())


CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 0, 1, CPU)


def built(**changes):
    """A training, warmed up as configured; nothing at all by default."""
    config = dataclasses.replace(BASE, warm_up_steps=0, learning_rate=0.1, **changes)
    return train.build(config, ALONE, {})


def batch_of(count=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    images = torch.rand((count, 3, 32, 32), generator=generator)
    return images.to(dtype), torch.randint(0, 10, (count,), generator=generator)


def losses_of(trained, steps=4, rates=(0.1, 0.05, 0.2, 0.2)):
    """Losses of steps on one batch, at rates that change."""
    return [train.train_step(trained, *batch_of(), rate).item() for rate, _ in zip(rates, range(steps))]


def momenta(trained):
    return [state["momentum_buffer"] for state in trained.optimizer.state.values()]


def warm_up_changes():
    """What a warm-up changes: losses with and without one from the start, weights, momenta and random numbers."""
    options = {"optimizer": "lars", "loss_scale": 128.0}
    bare = built(**options)
    torch.manual_seed(5)
    warm = train.warm_up(bare._replace(config=dataclasses.replace(bare.config, warm_up_steps=3)), ALONE)
    changed = (
        [] if torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(5)).item() else ["random"]
    )
    changed += ["momenta"] if any(momentum.any() for momentum in momenta(warm)) else []
    changed += [] if losses_of(warm) == losses_of(built(**options)) else ["first losses"]
    tensors = [*warm.network.state_dict().values(), *momenta(warm)]
    before = [tensor.clone() for tensor in tensors]
    train.warm_up(warm, ALONE)
    same = all(torch.equal(tensor, value) for tensor, value in zip(tensors, before))
    return changed + ([] if same else ["tensors"]) + ([] if warm.network.training else ["evaluation"])


def gradients_of(passes):
    """Loss and gradients of one batch in so many passes, batch-norm with its running statistics."""
    trained = built(accumulation_steps=passes, batch_size=8, loss_scale=128.0)
    trained.network.eval()
    loss = train.forward_backward(trained, *batch_of())
    return loss, torch.cat([parameter.grad.reshape(-1) for parameter in trained.network.parameters()])


def all_reduces(passes):
    """How many gradient buckets a step of so many passes sums over the ranks."""
    trained = built(accumulation_steps=passes, batch_size=8)
    wrapped = distributed.replicated(trained.network, dataclasses.replace(trained.config, bucket_mb=1000), ALONE)
    sent = []

    def hook(state, bucket):
        sent.append(bucket.index())
        return dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(None, bucket)

    wrapped.register_comm_hook(None, hook)
    losses_of(trained._replace(parallel=wrapped), steps=1)
    return len(sent)


def compiled_graphs():
    """How many graphs torch.compile makes of the network inside DistributedDataParallel, in one bucket."""
    trained = built(batch_size=8)
    wrapped = distributed.replicated(trained.network, dataclasses.replace(trained.config, bucket_mb=1000), ALONE)
    losses_of(trained._replace(parallel=torch.compile(wrapped, backend="eager", dynamic=False)), steps=1)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def capturable_error():
    """The update from tensors, which a graph captures, against the plain one: largest difference of the losses."""
    worst = 0.0
    for name in ("sgd", "lars"):
        plain, tensors = built(optimizer=name), built(optimizer=name)
        tensors.optimizer.make_capturable(CPU)
        again = optimizer.build(tensors.network, tensors.config)
        found = losses_of(tensors, 2)
        # A checkpoint of a captured run resumes with and without a capture.
        again.load_state_dict(tensors.optimizer.state_dict())
        again.make_capturable(CPU)
        found += losses_of(tensors._replace(optimizer=again), 2, (0.2, 0.2))
        worst = max(worst, max(abs(a - b) / b for a, b in zip(found, losses_of(plain))))
    return worst


def end_of_overflow(precision, loss_scale):
    """What a run says whose gradients overflow in the first step, and after how many steps."""
    # Its device is a GPU by the configuration, which refuses fp16 elsewhere; the tensors are on the CPU.
    options = {"device": "gpu", "compile": "none", "cuda_graph": False}
    config = dataclasses.replace(BASE, precision=precision, loss_scale=loss_scale, **options)
    trained = built(layout="NHWC")._replace(config=config)
    trained = trained._replace(optimizer=optimizer.build(trained.network, trained.config))
    stream, sums = MetricsStream(Path("/dev/null"), 0), pytorch.LaggedSums(ALONE, "step")
    reports = StepReports(stream, sums, pytorch.input_wait(ALONE), ALONE, 8, 100, 1)
    dtype = torch.float16 if precision == "fp16" else torch.float32
    for step in range(10):
        try:
            reports.add(range(step, step + 1), train.train_step(trained, *batch_of(dtype=dtype), 0.1), False, 0.1)
        except SystemExit as error:
            return step + 1, str(error).splitlines()[0]
    return None


def settled(**changes):
    """What "auto" becomes on a GPU of this PyTorch with ``changes`` of it, and what is said about it."""
    said = StringIO()
    config = dataclasses.replace(BASE, device="gpu")
    gpu = Ranks(0, 1, 0, 1, torch.device("cuda", 0))
    with mock.patch.multiple(abilities, LACKS={**abilities.LACKS, **changes}), redirect_stderr(said):
        chosen = abilities.settle(config, gpu)
        try:
            abilities.settle(dataclasses.replace(config, compile="default", cuda_graph=True), gpu)
        except choices.UnavailableError as error:  # on which Run and bench leave the other ranks
            said.write(f"; {error}")
    return chosen.compile, chosen.cuda_graph, said.getvalue()


NOTHING = {"compile": lambda device: None, "cuda_graph": lambda device: None}
LACKING = {"compile": lambda device: "no compiler", "cuda_graph": lambda device: "no graphs"}
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
(whole_loss, whole), (loss, parts) = gradients_of(1), gradients_of(4)
first = logits()
print(
    json.dumps(
        {
            "parameters": {depth: trainable(depth) for depth in STAGES},
            "kept": {f"{depth} {kind}": kept(depth, kind) for depth in (18, 50) for kind in ("fp32", "bf16")},
            "strides": strides_of_first_bottleneck(),
            "loss error": max(loss_error(0.0), loss_error(0.1)),
            "same seed": distance(logits(), first),
            "other seed": distance(logits(seed=2), first),
            "NHWC": distance(logits(layout="NHWC"), first),
            "bf16": distance(logits(precision="bf16"), first),
            "changed by a warm-up": warm_up_changes(),
            "accumulated": [float((loss - whole_loss).abs()), distance(parts, whole)],
            "all-reduces": [all_reduces(1), all_reduces(4)],
            "compiled graphs": compiled_graphs(),
            "capturable": capturable_error(),
            "overflow": [end_of_overflow("fp32", float("inf")), end_of_overflow("fp16", 2.0**40)],
            "settled": [settled(**NOTHING), settled(**LACKING)],
            "cpu": dataclasses.astuple(abilities.settle(BASE, ALONE))
            == dataclasses.astuple(dataclasses.replace(BASE, compile="none", cuda_graph=False)),
            "lacks": [abilities.lack_of_graphs(CPU), abilities.lack_of_compiler(CPU)],
            "group": {kind: str(pytorch.group_options(torch.device(kind, 0))) for kind in ("cpu", "cuda")},
        }
    )
)
