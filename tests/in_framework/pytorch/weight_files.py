"""Weight files in the formats of the published ones, read into the submitted networks."""

import os
import pickle
import re
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common.data.problem import Problem
from benchmarks.common.torch import files
from benchmarks.maskrcnn.pytorch import backbone
from benchmarks.maskrcnn.pytorch.config import Config as MaskConfig

SAMPLES = Path(__file__).parents[2] / "samples" / "weights"


def test_tar_of_before_2017_and_pickle_of_python_2_are_read():
    """Formats of torchvision's resnet34-333f7ec4.pth, which torch.load reads by executing it, and of R-50.pkl."""
    tensors = files.tensors_of(files.load(SAMPLES / "tar_2016.pth", "", ""))
    # As torch.load(weights_only=False) of PyTorch 2.13 reads it
    expected = {
        "conv1.weight": torch.arange(24.0).reshape(2, 3, 2, 2),
        "bn1.running_mean": torch.tensor([0.5, -1.5]),
        "fc.bias": torch.tensor([1.0, 2.0, 4.0]),
    }
    assert list(tensors) == list(expected) and all(map(torch.equal, tensors.values(), expected.values()))
    arrays = files.load(SAMPLES / "python2.pkl", "", "")
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "conv1_w": [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]],
        "conv1_b": [0.5, -2],
    }


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


def test_detectrons_backbone_is_loaded(tmp_path):
    config, path = MaskConfig(), tmp_path / "R-50.pkl"
    network = backbone.ResNet(config.stages, config.stem_width, config.stride_in_1x1, config.frozen_stages)
    weights = detectron_weights(network)
    assert len(weights) == 214
    path.write_bytes(pickle.dumps(weights, 2))
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

    with tarfile.open(SAMPLES / "tar_2016.pth") as tar:
        tar.extractall(tmp_path / "parts", filter="data")
    tensors = (tmp_path / "parts" / "tensors").read_bytes()
    for name, content, words in (
        ("pickle", pickle.dumps({"a": Command()}, 2), "it names posix.system"),
        # Sizes, strides and offset of the second tensor
        ("tensors", tensors.replace(struct.pack("<3q", 2, 1, 0), struct.pack("<3q", 4 << 20, 1, 0)), "out of bounds"),
    ):
        parts = Path(shutil.copytree(tmp_path / "parts", tmp_path / f"damaged {name}"))
        (parts / name).write_bytes(content)
        with tarfile.open(tmp_path / "bad.pth", "w:") as tar:
            tar.add(parts, "")
        with pytest.raises(Problem, match=f"cannot be read as weights.*{words}"):
            files.load(tmp_path / "bad.pth", "weights", "give others")
    assert not (tmp_path / "ran").exists()
