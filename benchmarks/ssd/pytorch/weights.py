"""ResNet-34's weights from a file with torchvision's names, as the submissions begin with them."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.common.data.problem import Problem
from benchmarks.common.torch import files
from benchmarks.ssd.pytorch.model import SSD

WHAT = "a ResNet-34 in torchvision's names (resnet34-333f7ec4.pth and later ones)"


def load_backbone(network: SSD, path: Path) -> None:
    """Give the backbone the weights of ``path``; the stage and the layer after its third one are left out.

    Raises:
        Problem: the file is not there, cannot be read, or does not fit the network.
    """
    remedy = "name a file with --set backbone=FILE, in the data folder or anywhere, or leave it out"
    given = files.tensors_of(files.load(path, WHAT, remedy))
    with torch.no_grad():
        for name, ours in network.backbone.state_dict().items():
            theirs = given.get(name)
            # The colour that is empty has no weights in the file.
            place = ours[:, : theirs.shape[1]] if theirs is not None and name == "conv1.weight" else ours
            if theirs is None or theirs.shape != place.shape:
                found = "nothing" if theirs is None else f"shape {tuple(theirs.shape)}"
                raise Problem(f"{path}: {found} for {name}", f"{WHAT}: {tuple(ours.shape)}", remedy)
            place.copy_(theirs)
