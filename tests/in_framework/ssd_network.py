"""SSD's network, its options, its backbone's file, the step and batch-norm over groups; on one rank and on two."""

import contextlib
import dataclasses
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.ssd.pytorch import apex_norms, norms, weights
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.data import Batch, synthetic_batch
from benchmarks.ssd.pytorch.model import build as build_network
from benchmarks.ssd.pytorch.train import build, evaluate, train_step

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
    training = build(config, CLASSES, ALONE, {})
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
        training = build(SMALL, CLASSES, ALONE, {})
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
    together = build(dataclasses.replace(SMALL, bn_group=2), CLASSES, ranks, {})
    alone = build(whole, CLASSES, ALONE, {})
    errors = []
    for _ in range(3):
        parts = train_step(together, mine, 0.01)
        dist.all_reduce(parts)
        errors.append(abs(float(parts) / 2 - float(train_step(alone, batch, 0.01))))
    statistics = zip(together.network.buffers(), alone.network.buffers(), strict=True)
    return {"losses": errors, "statistics": max(float((a - b).abs().max()) for a, b in statistics)}


def averaged(ranks: Ranks) -> dict:
    """A batch-norm's statistics when an evaluation begins, averaged and not; each rank's are its number."""
    found = {}
    for average in (True, False):
        training = build(dataclasses.replace(SMALL, average_statistics=average), CLASSES, ranks, {})
        for buffer in training.network.buffers():
            buffer.fill_(ranks.rank)
        nothing = SimpleNamespace(one_pass=lambda: iter(()), part=None)
        evaluate(training, nothing, SimpleNamespace(watch=iter, interrupted=False, ranks=ranks))
        found[str(average)] = [float(buffer.double().mean()) for buffer in training.network.buffers()][:2]
    return found


class Groupbn(nn.Module):
    """apex's layer as its callers see it: (N, h, w, C), groups of neighbours by their size alone; computed by ours."""

    def __init__(self, num_features, fuse_relu=False, bn_group=1):
        super().__init__()
        self.ours = norms.GroupBatchNorm(
            num_features, norms.group_of(bn_group, Ranks(dist.get_rank(), dist.get_world_size(), 0, 1, CPU))
        )
        self.weight = self.bias = self.running_mean = self.running_var = None

    def forward(self, x, z=None):
        assert x.is_contiguous() and z is None
        ours = self.ours
        ours.weight, ours.bias = self.weight, self.bias
        ours.running_mean, ours.running_var = self.running_mean, self.running_var
        return ours(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).contiguous()


def by_apex(ranks: Ranks) -> dict:
    """apex's layers where fakes of their names stand: what is found, compared, refused, trained and saved."""

    class Gbn(nn.Module):
        """The other one takes channels_last, and is wrong here."""

        def __init__(self, num_features, group_size):
            super().__init__()
            self.ours = Groupbn(num_features, bn_group=group_size)

        def forward(self, x):
            ours = self.ours
            ours.weight, ours.bias = self.weight, self.bias
            ours.running_mean, ours.running_var = self.running_mean, self.running_var
            return 1.1 * ours(x.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)

    modules = {
        "apex.contrib.groupbn.batch_norm": SimpleNamespace(BatchNorm2d_NHWC=Groupbn),
        "apex.contrib.cudnn_gbn": SimpleNamespace(GroupBatchNorm2d=Gbn),
    }
    others = apex_norms.find(2, modules.__getitem__)
    plain = norms.norm_of(norms.group_of(2, ranks), CPU)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        chosen = apex_norms.choose(plain, others, ranks, torch.float32, (2, 8, 6, 6))
    config = dataclasses.replace(SMALL, bn_group=2)
    batch = synthetic_batch(config, CLASSES, CPU)
    trained = {}
    for name in ("plain", "groupbn"):
        norms.choose = lambda config, ranks, saved, name=name: (name, apex_norms.named(name, plain, others))
        made = build(config, CLASSES, ranks, {})
        trained[name] = [float(train_step(made, batch, 0.01)) for _ in range(3)]
        state = list(made.network.state_dict())
        trained[f"{name} names"] = [len(state), state[:4]]
        made.network.eval()
        trained[f"{name} detects"] = float(made.network(batch.images).detach().double().abs().sum())
    try:
        apex_norms.named("groupbn", plain, {})
    except ValueError as problem:
        trained["elsewhere"] = str(problem)
    found = [sorted(others), sorted(apex_norms.find(2))]
    return {**trained, "found": found, "chosen": chosen, "said": said.getvalue()}


if __name__ == "__main__":
    if "RANK" in os.environ:
        ranks = pytorch.start(SMALL)
        found = {**grouped(ranks), "averaged": averaged(ranks), "apex": by_apex(ranks)}
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
