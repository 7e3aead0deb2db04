"""Weight files in the formats of the published ones, read into the submitted networks."""

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


class Names(pickle.Pickler):
    """Writes the names of the tar: a tensor is its number, a parameter the class with its tensor."""

    tensors: dict  # of each parameter by its id: its ``data`` is another object each time

    def persistent_id(self, thing: object) -> object:
        return str(id(thing)) if type(thing) is torch.Tensor else None

    def reducer_override(self, thing: object) -> object:
        if not isinstance(thing, torch.nn.Parameter):
            return NotImplemented
        return torch.nn.Parameter, (self.tensors[id(thing)],), (True, False, OrderedDict())


def add_part(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def write_tar(path: Path, content: OrderedDict) -> None:
    """As torch.save did before 2017: one storage and one tensor for each name."""
    parameters = {id(value): value.data for value in content.values() if isinstance(value, torch.nn.Parameter)}
    tensors = [parameters.get(id(value), value) for value in content.values()]
    storages, headers, names = (io.BytesIO(), io.BytesIO(), io.BytesIO())
    for part in (storages, headers):
        pickle.dump(len(tensors), part, 2)
    for number, tensor in enumerate(tensors):
        pickle.dump((number, "cpu", torch.FloatStorage), storages, 2)
        storages.write(struct.pack("<q", tensor.numel()) + tensor.numpy().tobytes())
        pickle.dump((id(tensor), number, torch.FloatTensor), headers, 2)
        headers.write(struct.pack(f"<{2 + 2 * tensor.dim()}q", tensor.dim(), *tensor.shape, *tensor.stride(), 0))
    pickle.dump([], storages, 2)
    pickler = Names(names, 2)
    pickler.tensors = parameters
    pickler.dump(content)
    system = pickle.dumps({"protocol_version": 1000, "little_endian": True}, 2)
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as tar:
        add_part(tar, "sys_info", system)
        for name, part in (("pickle", names), ("tensors", headers), ("storages", storages)):
            add_part(tar, name, part.getvalue())


def test_torchvisions_tar_of_2017_is_read_and_loaded(tmp_path):
    # With the names and shapes of the backbone, whose fourth input channel is padding, and a layer that SSD leaves out
    network, path = model.SSD(SsdConfig(), 81, norms.norm_of(None, CPU)), tmp_path / "resnet34-333f7ec4.pth"
    weights = OrderedDict(
        (name, torch.nn.Parameter(tensor + 1) if name.endswith(("weight", "bias")) else tensor + 1)
        for name, tensor in network.backbone.state_dict().items()
    )
    weights["conv1.weight"] = torch.nn.Parameter(weights["conv1.weight"].detach()[:, :3].clone())
    weights["fc.bias"] = torch.nn.Parameter(torch.ones(1000))
    write_tar(path, weights)
    reference, read = torch.load(path, weights_only=False), files.tensors_of(files.load(path, "", ""))
    assert list(read) == list(weights)
    assert [name for name in weights if not torch.equal(read[name], reference[name])] == []
    model.load_backbone(network, path)
    state = network.backbone.state_dict()
    state["conv1.weight"], padding = state["conv1.weight"].split((3, 1), 1)
    assert not padding.any() and [name for name in state if not torch.equal(state[name], weights[name])] == []


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


def detectron_weights(network: backbone.ResNet) -> dict:
    """Every array of Detectron's R-50.pkl: the 214 names in the submitted logs of v0.6 and v0.7."""
    weights = {"fc1000_w": np.ones((1000, 2048), np.float32), "fc1000_b": np.ones(1000, np.float32)}
    layers = {("conv1", "res_conv1_bn"): network.conv1}
    for stage, block in [(n, block) for n, blocks in enumerate((3, 4, 6, 3)) for block in range(blocks)]:
        name, module = f"res{stage + 2}_{block}_branch", network.layers[stage][block]
        parts = {"1": module.downsample, "2a": module.conv1, "2b": module.conv2, "2c": module.conv3}
        layers.update({(name + end, f"{name}{end}_bn"): layer for end, layer in parts.items() if layer is not None})
    for number, ((name, norm), layer) in enumerate(layers.items()):
        weights[f"{name}_w"] = np.full(layer.weight.shape, number, np.float32)
        for end, array in enumerate((f"{norm}_s", f"{norm}_b", f"{name}_b"), start=1):
            weights[array] = np.full(len(layer.weight), number + end / 4, np.float32)
    return weights


def test_detectrons_pickle_of_python_2_is_read_and_loaded(tmp_path):
    config, path, content = MaskConfig(), tmp_path / "R-50.pkl", io.BytesIO()
    network = backbone.ResNet(config.stages, config.stem_width, config.stride_in_1x1, config.frozen_stages)
    weights = detectron_weights(network)
    assert len(weights) == 214
    Python2(content, 2).dump(weights)
    path.write_bytes(content.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    backbone.load_file(network, path)
    for number, layer in ((0, network.conv1), (11, network.layers[1][0].downsample), (52, network.layers[3][2].conv3)):
        values = [float(tensor.detach().unique()) for tensor in (layer.weight, layer.scale, layer.shift)]
        assert values == [number, number + 0.25, number + 0.5]
    del weights["res2_0_branch2a_w"]
    for wrong, words in (
        (weights, "R-50.pkl has no res2_0_branch2a_w"),
        ({"conv1_w": weights["fc1000_w"]}, "conv1_w has the shape (1000, 2048), this backbone needs (64, 3, 7, 7)"),
        ({"blobs": {}}, "has no conv1.weight"),
    ):
        path.write_bytes(pickle.dumps(wrong, 2))
        with pytest.raises(Problem, match="(?s)" + re.escape(words) + ".*set backbone=FILE"):
            backbone.load_file(network, path)


def test_a_command_in_a_file_is_not_executed(tmp_path):
    """A tar with a pickle that runs a command, and one whose tensor is longer than its storage."""

    class Command:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    write_tar(tmp_path / "right.pth", OrderedDict(a=torch.ones(4)))
    with tarfile.open(tmp_path / "right.pth") as tar:
        parts = {name: tar.extractfile(name).read() for name in ("pickle", "tensors", "storages")}
    too_long = parts["tensors"].replace(struct.pack("<3q", 4, 1, 0), struct.pack("<3q", 4 << 20, 1, 0))
    for change, words in (
        ({"pickle": pickle.dumps({"a": Command()}, 2)}, "it names posix.system"),
        ({"tensors": too_long}, "cannot be read as weights.*out of bounds"),
    ):
        with tarfile.open(tmp_path / "bad.pth", "w:") as tar:
            for name, part in {**parts, **change}.items():
                add_part(tar, name, part)
        with pytest.raises(Problem, match=words):
            files.load(tmp_path / "bad.pth", "weights", "give others")
    assert not (tmp_path / "ran").exists()
