"""Bringing the detections of all ranks together on rank 0."""

from __future__ import annotations

from typing import List, Optional

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.detection.detections import Detections, from_bytes, joined, to_bytes


def gathered(own: Detections, ranks: Ranks) -> Optional[Detections]:
    """Return the detections of all ranks on rank 0, None on the others; call it on all ranks together.

    Each rank gives any number, also none, and all give masks or none does. The images of a rank are its own: one that
    fills a batch up must have been left out. The result is sorted by image id, so that it is the same for any number
    of ranks.
    """
    parts = [own] if ranks.size == 1 else [from_bytes(data) for data in _of_all_ranks(to_bytes(own), ranks)]
    return joined(parts) if ranks.rank == 0 else None


def _of_all_ranks(own: bytes, ranks: Ranks) -> List[bytes]:
    # Each rank's bytes on rank 0, nothing elsewhere; as tensors, since pickles run code
    # Gloo gathers from the memory of the CPU alone.
    device = ranks.context if dist.get_backend() == "nccl" else torch.device("cpu")
    lengths = torch.zeros(ranks.size, dtype=torch.int64, device=device)
    lengths[ranks.rank] = len(own)
    dist.all_reduce(lengths, group=pytorch.eager())
    filled = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    filled[: len(own)] = torch.from_numpy(np.frombuffer(own, np.uint8).copy()).to(device)
    found = [torch.empty_like(filled) for _ in range(ranks.size)] if ranks.rank == 0 else None
    dist.gather(filled, found, dst=0, group=pytorch.eager())
    return [each.cpu().numpy().tobytes()[:length] for each, length in zip(found or (), lengths.tolist())]
