"""ResNet-34's weights from a file with torchvision's names, as the submissions begin with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import torch

from benchmarks.common.data.problem import Problem
from benchmarks.ssd.pytorch.model import SSD

WHAT = "a ResNet-34 in torchvision's names (resnet34-333f7ec4.pth and later ones)"


def load_backbone(network: SSD, path: Path) -> None:
    """Give the backbone the weights of ``path``; the stage and the layer after its third one are left out.

    Raises:
        Problem: the file is not there, cannot be read, or does not fit the network.
    """
    remedy = "name a file with --set backbone=FILE, in the data folder or anywhere, or leave it out"
    try:
        saved: Dict[str, Any] = torch.load(str(path), map_location="cpu", weights_only=True)
        given = {name: tensor for name, tensor in saved.items() if torch.is_tensor(tensor)}
    except Exception as error:  # a damaged file may raise anything
        raise Problem(f"{path}: {type(error).__name__}: {str(error).splitlines()[0]}", WHAT, remedy) from None
    with torch.no_grad():
        for name, ours in network.backbone.state_dict().items():
            theirs = given.get(name)
            # The colour that is empty has no weights in the file.
            place = ours[:, : theirs.shape[1]] if theirs is not None and name == "conv1.weight" else ours
            if theirs is None or theirs.shape != place.shape:
                found = "nothing" if theirs is None else f"shape {tuple(theirs.shape)}"
                raise Problem(f"{path}: {found} for {name}", f"{WHAT}: {tuple(ours.shape)}", remedy)
            place.copy_(theirs)
