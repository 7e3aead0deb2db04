"""Files of weights in the layout and with the names of the published ones, into the submitted networks."""

import io
import json
import os
import pickle
import struct
import sys
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from benchmarks.common.data.problem import Problem
from benchmarks.common.torch import files
from benchmarks.maskrcnn.pytorch import backbone
from benchmarks.maskrcnn.pytorch import weights as maskrcnn
from benchmarks.maskrcnn.pytorch.config import Config as MaskConfig
from benchmarks.ssd.pytorch import model, norms
from benchmarks.ssd.pytorch import weights as ssd
from benchmarks.ssd.pytorch.config import Config as SsdConfig

CPU = torch.device("cpu")


def resnet34() -> OrderedDict:
    """Every array of torchvision's ResNet-34 of 2017, which counted no batches."""
    sizes = [("conv1", (64, 3, 7, 7)), ("bn1", (64,))]
    before = 64
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            sizes += [(f"{name}.conv1", (width, before, 3, 3)), (f"{name}.bn1", (width,))]
            sizes += [(f"{name}.conv2", (width, width, 3, 3)), (f"{name}.bn2", (width,))]
            if before != width:
                sizes += [(f"{name}.downsample.0", (width, before, 1, 1)), (f"{name}.downsample.1", (width,))]
            before = width
    found = OrderedDict()
    for name, shape in sizes:
        found[f"{name}.weight"] = torch.nn.Parameter(torch.randn(shape))
        if len(shape) == 1:
            found[f"{name}.bias"] = torch.nn.Parameter(torch.randn(shape))
            found[f"{name}.running_mean"], found[f"{name}.running_var"] = torch.randn(shape), torch.rand(shape)
    found["fc.weight"], found["fc.bias"] = (torch.nn.Parameter(torch.randn(n)) for n in ((1000, 512), (1000,)))
    return found


class Names(pickle.Pickler):
    """Writes the names of the tar: a tensor is its number, a parameter the class with its tensor."""

    def persistent_id(self, thing: object) -> object:
        return str(id(thing)) if type(thing) is torch.Tensor else None

    def reducer_override(self, thing: object) -> object:
        if not isinstance(thing, torch.nn.Parameter):
            return NotImplemented
        return torch.nn.Parameter, (TENSORS[id(thing)],), (True, False, OrderedDict())


TENSORS: dict = {}
"""Tensor of each parameter: its ``data`` is another object each time."""


def write_tar(path: Path, content: OrderedDict) -> None:
    """As torch.save did before 2017: one storage and one tensor for each name."""
    TENSORS.update({id(each): each.data for each in content.values() if isinstance(each, torch.nn.Parameter)})
    tensors = [TENSORS.get(id(each), each) for each in content.values()]
    storages, places, names = io.BytesIO(), io.BytesIO(), io.BytesIO()
    for part in (storages, places):
        pickle.dump(len(tensors), part, 2)
    for number, tensor in enumerate(tensors):
        pickle.dump((number, "cpu", torch.FloatStorage), storages, 2)
        storages.write(struct.pack("<q", tensor.numel()) + tensor.numpy().tobytes())
        pickle.dump((id(tensor), number, torch.FloatTensor), places, 2)
        places.write(struct.pack(f"<{2 + 2 * tensor.dim()}q", tensor.dim(), *tensor.shape, *tensor.stride(), 0))
    pickle.dump([], storages, 2)
    Names(names, 2).dump(content)
    facts = io.BytesIO(pickle.dumps({"protocol_version": 1000, "little_endian": True}, 2))
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as tar:
        for name, part in (("sys_info", facts), ("pickle", names), ("tensors", places), ("storages", storages)):
            entry = tarfile.TarInfo(name)
            entry.size = part.getbuffer().nbytes
            part.seek(0)
            tar.addfile(entry, part)


def in_ssd(folder: Path) -> dict:
    given, path = resnet34(), folder / "resnet34-333f7ec4.pth"
    write_tar(path, given)
    reference = torch.load(path, weights_only=False)
    network = model.build(SsdConfig(), 81, norms.norm_of(None, CPU))
    ssd.load_backbone(network, path)
    state = network.backbone.state_dict()
    read = files.tensors_of(files.load(path, "", ""))
    pad = state["conv1.weight"][:, 3:]
    return {
        "names": list(read) == list(given),
        "as torch reads": all(torch.equal(read[name], reference[name]) for name in given),
        "loaded": all(torch.equal(value[:, :3] if value.dim() > 1 and value.shape[1] == 4 else value, given[name])
                      for name, value in state.items()),
        "padding": [pad.shape[1], float(pad.abs().max())],
        "stages": sorted({name.split(".")[0] for name in state}),
    }  # fmt: skip


class Python2(pickle._Pickler):
    """Writes both kinds of strings as Python 2 wrote its one."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_text(self, text: object) -> None:
        data = text if isinstance(text, bytes) else str(text).encode("ascii")
        short = len(data) < 256
        self.write(
            (pickle.SHORT_BINSTRING + bytes([len(data)]) if short else b"T" + struct.pack("<i", len(data))) + data
        )
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_text


def r50() -> dict:
    """Every array of Detectron's R-50.pkl: the 214 names in the submitted logs of v0.6 and v0.7."""
    random = np.random.default_rng(3)
    found = {}

    def convolution(name: str, norm: str, outputs: int, inputs: int, side: int) -> None:
        found[f"{name}_w"] = random.standard_normal((outputs, inputs, side, side), np.float32)
        for each in (f"{name}_b", f"{norm}_s", f"{norm}_b"):
            found[each] = random.standard_normal(outputs, np.float32)

    convolution("conv1", "res_conv1_bn", 64, 3, 7)
    before = 64
    for stage, blocks in enumerate((3, 4, 6, 3), start=2):
        inner = 64 << (stage - 2)
        for block in range(blocks):
            name = f"res{stage}_{block}_branch"
            if block == 0:
                convolution(f"{name}1", f"{name}1_bn", 4 * inner, before, 1)
            for letter, outputs, inputs, side in (
                ("a", inner, before, 1),
                ("b", inner, inner, 3),
                ("c", 4 * inner, inner, 1),
            ):
                convolution(f"{name}2{letter}", f"{name}2{letter}_bn", outputs, inputs, side)
            before = 4 * inner
    found["fc1000_w"] = random.standard_normal((1000, 2048), np.float32)
    found["fc1000_b"] = random.standard_normal(1000, np.float32)
    return found


def in_maskrcnn(folder: Path) -> dict:
    given, path = r50(), folder / "R-50.pkl"
    content = io.BytesIO()
    Python2(content, 2).dump(given)
    path.write_bytes(content.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    config = MaskConfig()
    network = backbone.ResNet(config.stages, config.stem_width, config.stride_in_1x1, config.frozen_stages)
    maskrcnn.load_backbone(network, path)
    first, last = network.conv1, network.layers[3][2].conv3
    equal = [
        np.array_equal(layer.weight.detach(), given[f"{name}_w"])
        and np.array_equal(layer.scale.detach().flatten(), given[f"{norm}_s"])
        and np.array_equal(layer.shift.detach(), given[f"{norm}_b"])
        for layer, name, norm in (
            (first, "conv1", "res_conv1_bn"), (last, "res5_2_branch2c", "res5_2_branch2c_bn"),
            (network.layers[1][0].downsample, "res3_0_branch1", "res3_0_branch1_bn"),
        )
    ]  # fmt: skip
    found = {"names": len(given), "loaded": equal, "refused": []}
    del given["res2_0_branch2a_w"]
    for wrong in (given, {"conv1_w": given["fc1000_w"]}, {"blobs": {}}):
        path.write_bytes(pickle.dumps(wrong, 2))
        try:
            maskrcnn.load_backbone(network, path)
        except Problem as problem:
            found["refused"].append(str(problem))
    return found


def hostile(folder: Path) -> list:
    """A tar whose names run a command, and one whose tensor reaches behind its storage."""

    class Command:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {folder}/ran",)

    said = []
    good = OrderedDict(a=torch.ones(4))
    write_tar(folder / "long.pth", good)
    with tarfile.open(folder / "long.pth") as tar:
        parts = {name: tar.extractfile(name).read() for name in ("pickle", "tensors", "storages")}
    long = parts["tensors"].replace(struct.pack("<3q", 4, 1, 0), struct.pack("<3q", 4 << 20, 1, 0))
    for change in ({"pickle": pickle.dumps({"a": Command()}, 2)}, {"tensors": long}):
        with tarfile.open(folder / "bad.pth", "w:") as tar:
            for name, part in {**parts, **change}.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(part)
                tar.addfile(entry, io.BytesIO(part))
        try:
            files.load(folder / "bad.pth", "weights", "give others")
        except Problem as problem:
            said.append(str(problem))
    return [*said, (folder / "ran").exists()]


def main() -> None:
    folder = Path(sys.argv[1])
    print(json.dumps({"ssd": in_ssd(folder), "maskrcnn": in_maskrcnn(folder), "hostile": hostile(folder)}))


if __name__ == "__main__":
    main()
