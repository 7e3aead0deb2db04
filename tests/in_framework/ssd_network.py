"""SSD's network, its options, its backbone's file, the step and batch-norm over groups; on one rank and on two."""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.ssd.pytorch import norms, weights
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.data import Batch, synthetic_batch
from benchmarks.ssd.pytorch.model import build as build_network
from benchmarks.ssd.pytorch.train import train_step, whole_step
from benchmarks.ssd.pytorch.training import build

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 0, 1, CPU)
SMALL = Config(device="cpu", precision="fp32", layout="NCHW", pad_channels=False, image_size=64, width=8,
               blocks=(1, 2, 1), batch_size=4, optimizer_kernel="fused", warm_up_steps=0)  # fmt: skip
CLASSES = 6
PLAIN = norms.norm_of(None, CPU)


def sizes() -> dict:
    """Shapes of the submitted network, without computing anything."""
    with torch.device("meta"):
        network = build_network(Config(), 81, PLAIN)
        found = network(torch.empty(2, 4, 300, 300))
    counted = sum(parameter.numel() for parameter in network.backbone.parameters())
    return {"predictions": list(found.shape), "backbone": counted}


def layouts() -> dict:
    """NHWC with an empty colour and padded heads is NCHW without, given the same weights."""
    plain = build_network(SMALL, CLASSES, PLAIN).eval()
    padded = build_network(dataclasses.replace(SMALL, layout="NHWC", pad_channels=True), CLASSES, PLAIN).eval()
    with torch.no_grad():
        for name, tensor in padded.state_dict().items():
            theirs = plain.state_dict()[name]
            tensor.zero_()
            tensor[tuple(slice(size) for size in theirs.shape)] = theirs
        images = torch.randn(2, 3, 64, 64)
        expected = plain(images)
        four = torch.cat((images, torch.zeros(2, 1, 64, 64)), 1).to(memory_format=torch.channels_last)
        found = padded.to(memory_format=torch.channels_last)(four)
    return {"error": float((found - expected).abs().max()), "scale": float(expected.abs().max())}


def trained(steps: int, **changes) -> list:
    """Losses of some steps on one batch."""
    config = dataclasses.replace(SMALL, **changes)
    training = build(config, CLASSES, ALONE, {}, whole_step)
    torch.manual_seed(0)
    batch = synthetic_batch(config, CLASSES, CPU)
    return [float(train_step(training, batch, 0.01)) for _ in range(steps)]


def precisions() -> dict:
    found = {precision: trained(6, precision=precision) for precision in ("fp32", "bf16", "fp16")}
    gpu_like = {"precision": "fp16", "layout": "NHWC", "pad_channels": True}
    found["as on GPUs"] = trained(6, **gpu_like)
    found["warmed up"] = trained(6, warm_up_steps=2)

    return found


def rate_on_the_device() -> float:
    """What a captured step reads its rate from does the same to the weights as a number."""
    found = []
    for as_tensor in (False, True):
        training = build(SMALL, CLASSES, ALONE, {}, whole_step)
        if as_tensor:
            training.rate = torch.zeros(())
        torch.manual_seed(0)
        batch = synthetic_batch(SMALL, CLASSES, CPU)
        found.append([float(train_step(training, batch, rate)) for rate in (0.0, 0.02, 0.01, 0.01)])
    return max(abs(a - b) for a, b in zip(*found, strict=True))


def from_file() -> dict:
    """A file with torchvision's names, a stage and a layer more, gives the backbone its weights."""
    torch.manual_seed(9)
    source = build_network(SMALL, CLASSES, PLAIN)
    given = {name: torch.randn_like(tensor) for name, tensor in source.backbone.state_dict().items()}
    given.update(
        {"layer4.0.conv1.weight": torch.zeros(1), "fc.bias": torch.zeros(3), "bn1.num_batches_tracked": torch.tensor(7)}
    )
    folder = Path(tempfile.mkdtemp())
    torch.save(given, str(folder / "resnet34.pth"))
    found = {}
    for padded in (False, True):
        network = build_network(dataclasses.replace(SMALL, pad_channels=padded), CLASSES, PLAIN)
        weights.load_backbone(network, folder / "resnet34.pth")
        state = network.backbone.state_dict()
        found[f"equal, padded {padded}"] = all(
            torch.equal(state[name][:, :3] if name == "conv1.weight" else state[name], given[name]) for name in state
        )
    (folder / "damaged.pth").write_bytes((folder / "resnet34.pth").read_bytes()[:1000])
    torch.save({**given, "layer1.0.conv1.weight": torch.zeros(3, 3)}, str(folder / "other.pth"))
    for name in ("missing.pth", "damaged.pth", "other.pth"):
        try:
            weights.load_backbone(source, folder / name)
        except Problem as problem:
            found[name] = str(problem)
    return found


def grouped(ranks: Ranks) -> dict:
    """Two ranks with a batch-norm over both train as one rank with the whole batch."""
    whole = dataclasses.replace(SMALL, batch_size=8)
    torch.manual_seed(1)
    batch = synthetic_batch(whole, CLASSES, CPU)
    mine = Batch(*(tensor.chunk(2)[ranks.rank].contiguous() for tensor in batch))
    together = build(dataclasses.replace(SMALL, bn_group=2), CLASSES, ranks, {}, whole_step)
    alone = build(whole, CLASSES, ALONE, {}, whole_step)
    errors = []
    for _ in range(3):
        parts = train_step(together, mine, 0.01)
        dist.all_reduce(parts)
        errors.append(abs(float(parts) / 2 - float(train_step(alone, batch, 0.01))))
    statistics = zip(together.network.buffers(), alone.network.buffers(), strict=True)
    return {"losses": errors, "statistics": max(float((a - b).abs().max()) for a, b in statistics)}


if __name__ == "__main__":
    if "RANK" in os.environ:
        ranks = pytorch.start(SMALL)
        found = grouped(ranks)
        try:
            norms.group_of(3, ranks)
        except SystemExit as refusal:
            found["refused"] = str(refusal)
        pytorch.finish()
        if ranks.rank == 0:
            print(json.dumps(found))
        sys.exit()
    checks = {
        "sizes": sizes,
        "layouts": layouts,
        "precisions": precisions,
        "rate": rate_on_the_device,
        "file": from_file,
    }
    print(json.dumps({name: check() for name, check in checks.items()}))
