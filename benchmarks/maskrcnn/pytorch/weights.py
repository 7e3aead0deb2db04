"""A backbone's weights from a file: Detectron's pickle of numpy arrays, or PyTorch's state_dict."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.data.problem import Problem
from benchmarks.common.torch import files
from benchmarks.maskrcnn.pytorch import backbone

EXPECTED = "R-50.pkl of Detectron (MSRA's ResNet-50), or a state_dict of PyTorch by torchvision's names"
REMEDY = "set backbone=FILE to such a file, or leave it empty"


def load_backbone(network: backbone.ResNet, path: Path) -> None:
    """Give the backbone the weights of ``path``; Problem where it is no such file or does not fit."""
    found = files.load(path, EXPECTED, REMEDY)
    try:
        # Detectron's networks have their arrays in "blobs", its ImageNet weights at the top.
        backbone.load(network, files.tensors_of(found.get("blobs", found)))
    except KeyError as missing:
        raise Problem(f"{path} has no {missing.args[0]}", EXPECTED, REMEDY) from None
    except ValueError as problem:
        raise Problem(f"{path}: {problem}", EXPECTED, REMEDY) from None
