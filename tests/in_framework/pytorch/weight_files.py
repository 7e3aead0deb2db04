"""Files of weights in the layout and with the names of the published ones, into the submitted networks."""

import io
import os
import pickle
import re
import struct
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from benchmarks.common.data.problem import Problem
from benchmarks.common.torch import files
from benchmarks.maskrcnn.pytorch import backbone
from benchmarks.maskrcnn.pytorch.config import Config as MaskConfig
from benchmarks.ssd.pytorch import model, norms
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

    tensors: dict  # of each parameter by its id: its ``data`` is another object each time

    def persistent_id(self, thing: object) -> object:
        return str(id(thing)) if type(thing) is torch.Tensor else None

    def reducer_override(self, thing: object) -> object:
        if not isinstance(thing, torch.nn.Parameter):
            return NotImplemented
        return torch.nn.Parameter, (self.tensors[id(thing)],), (True, False, OrderedDict())


def write_tar(path: Path, content: OrderedDict) -> None:
    """As torch.save did before 2017: one storage and one tensor for each name."""
    parameters = {id(each): each.data for each in content.values() if isinstance(each, torch.nn.Parameter)}
    tensors = [parameters.get(id(each), each) for each in content.values()]
    storages, places, names = io.BytesIO(), io.BytesIO(), io.BytesIO()
    for part in (storages, places):
        pickle.dump(len(tensors), part, 2)
    for number, tensor in enumerate(tensors):
        pickle.dump((number, "cpu", torch.FloatStorage), storages, 2)
        storages.write(struct.pack("<q", tensor.numel()) + tensor.numpy().tobytes())
        pickle.dump((id(tensor), number, torch.FloatTensor), places, 2)
        places.write(struct.pack(f"<{2 + 2 * tensor.dim()}q", tensor.dim(), *tensor.shape, *tensor.stride(), 0))
    pickle.dump([], storages, 2)
    pickler = Names(names, 2)
    pickler.tensors = parameters
    pickler.dump(content)
    facts = io.BytesIO(pickle.dumps({"protocol_version": 1000, "little_endian": True}, 2))
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as tar:
        for name, part in (("sys_info", facts), ("pickle", names), ("tensors", places), ("storages", storages)):
            entry = tarfile.TarInfo(name)
            entry.size = part.getbuffer().nbytes
            part.seek(0)
            tar.addfile(entry, part)


def test_torchvisions_tar_of_2017_is_read_and_loaded(tmp_path):
    given, path = resnet34(), tmp_path / "resnet34-333f7ec4.pth"
    write_tar(path, given)
    reference, read = torch.load(path, weights_only=False), files.tensors_of(files.load(path, "", ""))
    assert list(read) == list(given)
    assert [name for name in given if not torch.equal(read[name], reference[name])] == []
    network = model.SSD(SsdConfig(), 81, norms.norm_of(None, CPU))
    model.load_backbone(network, path)
    state = network.backbone.state_dict()
    padding = state["conv1.weight"][:, 3:]
    assert padding.shape[1] == 1 and not padding.any()
    state["conv1.weight"] = state["conv1.weight"][:, :3]
    assert [name for name, value in state.items() if not torch.equal(value, given[name])] == []
    # The last stage and the classes are left out.
    assert sorted({name.split(".")[0] for name in state}) == ["bn1", "conv1", "layer1", "layer2", "layer3"]


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


def test_detectrons_pickle_of_python_2_is_read_and_loaded(tmp_path):
    given, path, content = r50(), tmp_path / "R-50.pkl", io.BytesIO()
    assert len(given) == 214
    Python2(content, 2).dump(given)
    path.write_bytes(content.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    config = MaskConfig()
    network = backbone.ResNet(config.stages, config.stem_width, config.stride_in_1x1, config.frozen_stages)
    backbone.load_file(network, path)
    places = {
        ("conv1", "res_conv1_bn"): network.conv1,
        ("res5_2_branch2c", "res5_2_branch2c_bn"): network.layers[3][2].conv3,
        ("res3_0_branch1", "res3_0_branch1_bn"): network.layers[1][0].downsample,
    }
    for (name, norm), layer in places.items():
        assert np.array_equal(layer.weight.detach(), given[f"{name}_w"])
        assert np.array_equal(layer.scale.detach().flatten(), given[f"{norm}_s"])
        assert np.array_equal(layer.shift.detach().flatten(), given[f"{norm}_b"])
    del given["res2_0_branch2a_w"]
    for wrong, words in (
        (given, "R-50.pkl has no res2_0_branch2a_w"),
        ({"conv1_w": given["fc1000_w"]}, "conv1_w has the shape (1000, 2048), this backbone needs (64, 3, 7, 7)"),
        ({"blobs": {}}, "has no conv1.weight"),
    ):
        path.write_bytes(pickle.dumps(wrong, 2))
        with pytest.raises(Problem, match="(?s)" + re.escape(words) + ".*set backbone=FILE"):
            backbone.load_file(network, path)


def test_nothing_in_a_file_is_executed(tmp_path):
    """In a tar whose names run a command; and one whose tensor reaches behind its storage is refused."""

    class Command:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    write_tar(tmp_path / "long.pth", OrderedDict(a=torch.ones(4)))
    with tarfile.open(tmp_path / "long.pth") as tar:
        parts = {name: tar.extractfile(name).read() for name in ("pickle", "tensors", "storages")}
    long = parts["tensors"].replace(struct.pack("<3q", 4, 1, 0), struct.pack("<3q", 4 << 20, 1, 0))
    for change, words in (
        ({"pickle": pickle.dumps({"a": Command()}, 2)}, "it names posix.system"),
        ({"tensors": long}, "cannot be read as weights.*out of bounds"),
    ):
        with tarfile.open(tmp_path / "bad.pth", "w:") as tar:
            for name, part in {**parts, **change}.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(part)
                tar.addfile(entry, io.BytesIO(part))
        with pytest.raises(Problem, match=words):
            files.load(tmp_path / "bad.pth", "weights", "give others")
    assert not (tmp_path / "ran").exists()
