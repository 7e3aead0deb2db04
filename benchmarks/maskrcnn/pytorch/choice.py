"""Which implementation of suppression, RoIAlign and mask projection a run uses: plain, Triton's or torchvision's.

torchvision is in NGC's images, and is never required. What gives other values than the plain path is not used.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.common.torch.kernels import Operator
from benchmarks.detection.pytorch import nms
from benchmarks.detection.pytorch import operators as of_detection
from benchmarks.detection.pytorch.boxes import Found
from benchmarks.maskrcnn.pytorch import operators
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.operators import BOX_BINS, MASK_SIZE
from benchmarks.maskrcnn.pytorch.proposals import detect

OPERATORS: Dict[str, Operator] = {**of_detection.OPERATORS, **operators.OPERATORS}


class Chosen(NamedTuple):
    """The implementations of a run."""

    names: Dict[str, str]
    suppress: nms.Suppress = nms.keep_of_groups
    match: Callable[..., torch.Tensor] = operators.match
    roi_align: Callable[..., torch.Tensor] = operators.roi_align
    project_masks: Callable[..., torch.Tensor] = operators.project_masks
    detect: Callable[..., Found] = detect


def torchvision_operators(found: Any) -> Dict[str, Any]:
    """Return the operators that the module ``found``, torchvision.ops, offers; empty where it is None."""
    if found is None:
        return {}

    def suppress(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
        group, place = alive.nonzero(as_tuple=True)
        # The order within a group is that of the scores; torchvision takes any number that falls.
        kept = found.batched_nms(boxes[group, place].float(), -place.float(), group, threshold)
        result = torch.zeros_like(alive)
        result[group[kept], place[kept]] = True
        return result

    def roi_align(
        levels: Sequence[torch.Tensor], rois: torch.Tensor, images: torch.Tensor, bins: int, edge: float = 0.0
    ) -> torch.Tensor:
        level = operators.levels_of(rois, edge)
        result = levels[0].new_zeros(len(rois), levels[0].shape[1], bins, bins)
        for number, feature in enumerate(levels):
            mine = (level == number).nonzero().squeeze(1)
            listed = torch.cat((images[mine].to(rois.dtype).unsqueeze(1), rois[mine]), 1).to(feature.dtype)
            scale = 0.25 / (1 << number)
            pooled = found.roi_align(feature, listed, bins, scale, operators.SAMPLES, aligned=False)
            result = result.index_copy(0, mine, pooled.to(result.dtype))
        return result.contiguous(memory_format=torch.channels_last)

    return {"suppression": suppress, "roi_align": roi_align}


def find_torchvision() -> Any:
    """Return the module torchvision.ops, or None where it is not installed or lacks its compiled part."""
    try:
        found = importlib.import_module("torchvision.ops")
        found.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    # Next to a PyTorch of another build it fails in many ways.
    except Exception:
        return None
    return found


def choose(config: Config, ranks: Ranks, saved: Mapping[str, str], found: Optional[Any] = None) -> Chosen:
    """Choose by measuring on the sizes of a step; ``saved`` is a checkpoint's choice, ``found`` torchvision.ops.

    Raises ValueError where torchvision's operators are wanted and are not there.
    """
    theirs = torchvision_operators(found or find_torchvision())
    theirs = {name: theirs[name] for name in pytorch.everywhere(theirs, OPERATORS)}
    if config.kernels == "torchvision" and not theirs:
        raise choices.UnavailableError(
            "kernels=torchvision: torchvision is not installed, or not for this PyTorch; use kernels=auto"
        )
    dtype, names = pytorch.DTYPES[config.precision], dict(saved)
    if saved:  # a run that began when there were fewer
        names = {**dict.fromkeys(OPERATORS, "plain"), **saved}
    else:
        wanted = "plain" if config.kernels == "torchvision" else config.kernels
        names = kernels.choose(OPERATORS, wanted, ranks, dtype, sizes_of(config))
    for name in theirs if not saved else ():
        if config.kernels == "torchvision":
            names[name] = "torchvision"
        elif config.kernels == "auto":
            other, sizes = kernels.Other("torchvision", theirs[name]), sizes_of(config)[name]
            names[name] = kernels.or_other(name, OPERATORS[name], names[name], other, ranks, dtype, sizes)
    choices.record("kernels", names)
    implementations: List[Any] = [
        theirs[name] if names[name] == "torchvision" else kernels.implementation(OPERATORS[name], names[name])
        for name in OPERATORS
    ]
    return Chosen(names, *implementations)


def is_captured(chosen: Chosen, asked: Any, ranks: Ranks) -> bool:
    """Return whether a CUDA graph can hold a step with these operators: the others wait for the device.

    Raises ValueError where ``asked`` is true, and not "auto", and it cannot.
    """
    waiting = [f"{name} {kind}" for name, kind in chosen.names.items() if kind != "triton" and name != "matching"]
    if waiting and asked is True:
        raise choices.UnavailableError(
            f"cuda_graph=true needs the Triton kernels, and not {', '.join(waiting)}: set kernels=triton"
        )
    if waiting and ranks.rank == 0:
        print(f"cuda_graph=false, which is slower: {', '.join(waiting)}, which wait for the device", file=sys.stderr)
    choices.record("cuda_graph", not waiting)
    return not waiting


def sizes_of(config: Config) -> Dict[str, Mapping[str, Any]]:
    """Return the sizes of a training step, by operator."""
    groups = config.batch_size * len(config.anchor_sizes)
    rois = config.batch_size * config.rois_per_image
    side = max(32, config.short_side // 32 * 8)
    positive = max(1, int(rois * config.roi_fg_fraction))
    # Of the five levels, a third of the first one behind it.
    anchors = len(config.anchor_ratios) * config.short_side * config.long_side // 16 * 4 // 3
    align = {"batch": config.batch_size, "rois": rois, "channels": config.fpn_width, "side": side, "bins": BOX_BINS}
    return {
        "suppression": {"groups": groups, "count": config.rpn_pre_nms_top_n},
        "matching": {"batch": config.batch_size, "objects": config.objects, "count": anchors},
        "roi_align": align,
        "project_masks": {"rois": positive, "points": 40, "size": MASK_SIZE},
    }
