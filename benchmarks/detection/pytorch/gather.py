"""Bringing the detections of all ranks together on rank 0."""

from __future__ import annotations

from typing import List, Optional

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.detection.detections import DTYPES, Detections, from_arrays, joined

WIDTH = {name: np.dtype(dtype).itemsize * (4 if name == "boxes" else 1) for name, dtype in DTYPES.items()}
"""Bytes of a detection in each array."""


def gathered(own: Detections, ranks: Ranks) -> Optional[Detections]:
    """Return the detections of all ranks on rank 0, None on the others; call it on all ranks together.

    Each rank gives any number, also none, and all give masks or none does. The images of a rank are its own: one that
    fills a batch up must have been left out. The result is sorted by image id, so that it is the same for any number
    of ranks.
    """
    parts = [own] if ranks.size == 1 else [_from_bytes(data) for data in _of_all_ranks(_to_bytes(own), ranks)]
    return joined(parts) if ranks.rank == 0 else None


def _to_bytes(own: Detections) -> np.ndarray:
    """uint8: number of detections and whether there are masks, arrays, the masks' lengths, masks."""
    header = np.array([len(own), own.masks is not None], np.int64)
    pieces = [header, *(np.ascontiguousarray(getattr(own, name), dtype) for name, dtype in DTYPES.items())]
    pieces.append(np.array([len(mask) for mask in own.masks or ()], np.int32))
    return np.frombuffer(b"".join([*(piece.tobytes() for piece in pieces), *(own.masks or ())]), np.uint8)


def _from_bytes(data: np.ndarray) -> Detections:
    count, has_masks = np.frombuffer(data[:16].tobytes(), np.int64).tolist()
    arrays, begin = {}, 16
    for name, dtype in DTYPES.items():
        end = begin + count * WIDTH[name]
        arrays[name] = np.frombuffer(data[begin:end].tobytes(), dtype).reshape((-1, 4) if name == "boxes" else -1)
        begin = end
    if has_masks:
        end = begin + 4 * count
        arrays["mask_lengths"] = np.frombuffer(data[begin:end].tobytes(), np.int32)
        arrays["mask_bytes"] = data[end : end + int(arrays["mask_lengths"].sum())]
    return from_arrays(arrays)


def _of_all_ranks(own: np.ndarray, ranks: Ranks) -> List[np.ndarray]:
    """Return each rank's bytes on rank 0, nothing elsewhere; as tensors, since pickles run code."""
    # Gloo gathers from the memory of the CPU alone.
    device = ranks.context if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.from_numpy(own.copy()).to(device)
    most = torch.tensor(len(own), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=pytorch.eager())
    filled = torch.nn.functional.pad(mine, (0, int(most) - len(mine)))
    found = [torch.empty_like(filled) for _ in range(ranks.size)] if ranks.rank == 0 else None
    dist.gather(filled, found, dst=0, group=pytorch.eager())
    return [tensor.cpu().numpy() for tensor in found or ()]
