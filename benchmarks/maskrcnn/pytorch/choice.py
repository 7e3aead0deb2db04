"""Which implementation of suppression, RoIAlign and mask projection a run uses."""

from __future__ import annotations

from typing import Callable, Dict, Mapping, NamedTuple

import torch

from benchmarks.common.ranks import Ranks
from benchmarks.detection.pytorch import nms
from benchmarks.maskrcnn.pytorch import operators
from benchmarks.maskrcnn.pytorch.config import Config


class Chosen(NamedTuple):
    """The implementations of a run."""

    names: Dict[str, str]
    roi_align: Callable[..., torch.Tensor] = operators.roi_align
    suppress: nms.Suppress = nms.keep_of_groups
    project_masks: Callable[..., torch.Tensor] = operators.project_masks


def choose(config: Config, ranks: Ranks, saved: Mapping[str, str]) -> Chosen:
    return Chosen({})
