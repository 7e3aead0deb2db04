"""Measure communication between the ranks of a node: each pair, all-reduce and all-to-all, by size.

    $ torchrun --standalone --nproc-per-node 4 -m benchmarks.common.checks.link_speeds --device gpu --output links.json

NCCL between GPUs, Gloo between CPUs. Bandwidths are bytes per second sent by a rank: for a pair, the size of the
message; for an all-reduce 2 (n-1) / n and for an all-to-all (n-1) / n of the array. nccl-tests calls the latter bus
bandwidth; it is comparable between numbers of ranks. Rank 0 writes the result as JSON.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.distributed as dist

from benchmarks.common.checks import measured_peaks
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.stopping import end_process
from benchmarks.common.run.timing import seconds_of

# Array size in bytes, by device type
SIZES = {"cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 28), "cpu": (1 << 14, 1 << 18, 1 << 22, 1 << 25)}
BYTES_A_MEASUREMENT = 1 << 28
_MOST_CALLS = 200
REPEATS = 3
PEAK_SECONDS = 0.3  # duration per GEMM or copy measurement


def measure(ranks: Ranks, sizes: List[int], between_pairs: bool = True) -> Dict[str, Any]:
    """Measure on all ranks; the result is rank 0's."""
    device: torch.device = ranks.context
    rows: List[Dict[str, Any]] = []
    for target_bytes in sizes:
        count = max(ranks.size, target_bytes // 4 // ranks.size * ranks.size)
        array, target = (torch.ones(count, device=device) for _ in range(2))
        calls: Dict[str, Callable[[], Any]] = {
            "all-reduce": lambda a=array: dist.all_reduce(a),  # type: ignore[misc]
            "all-to-all": lambda t=target, a=array: dist.all_to_all_single(t, a),  # type: ignore[misc]
        }
        shares = {"all-reduce": 2 * (ranks.size - 1) / ranks.size, "all-to-all": (ranks.size - 1) / ranks.size}
        for kind, call in calls.items():
            size = 4 * count
            seconds = slowest(call, device, size)
            rows.append({"kind": kind, "bytes": size, "seconds": seconds, "rate": shares[kind] * size / seconds})
    everyone = range(ranks.size)
    can_access = torch.cuda.can_device_access_peer
    pairs = everyone if between_pairs else ()
    matrix = [[_pair(ranks, sizes[-1], sender, receiver) for receiver in pairs] for sender in pairs]
    return {
        "device": device.type,
        "backend": dist.get_backend(),
        "ranks": ranks.size,
        "collectives": rows,
        "pair_bytes": sizes[-1],
        "pairs": matrix,
        # Whether a GPU can read another's memory without the host, by CUDA.
        "peer_access": [[peer == other or can_access(peer, other) for other in everyone] for peer in everyone]
        if device.type == "cuda"
        else None,
    }


def peaks(ranks: Ranks) -> List[Dict[str, float]]:
    """Return FLOP/s and copy bandwidth per rank, measured on all devices at the same time."""
    device: torch.device = ranks.context
    precision, n = ("bf16", 0) if device.type == "cuda" else ("fp32", 1024)
    pytorch.barrier()
    flops = measured_peaks.flops_per_second(device, precision, n, PEAK_SECONDS)
    copied = measured_peaks.bytes_per_second(device, 0 if device.type == "cuda" else 1 << 23, PEAK_SECONDS)
    local = torch.tensor([flops, copied["copy"]], dtype=torch.float64, device=device)
    gathered = [torch.empty_like(local) for _ in range(ranks.size)]
    dist.all_gather(gathered, local)
    return [{"flops_per_second": float(peak[0]), "bytes_per_second": float(peak[1])} for peak in gathered]


# Return the bandwidth from one rank to another in bytes per second, or None for the same rank; the others wait.
def _pair(ranks: Ranks, size: int, sender: int, receiver: int) -> Optional[float]:
    if sender == receiver:
        return None
    array = torch.ones(size // 4, device=ranks.context)

    def call() -> None:
        if ranks.rank == sender:
            dist.send(array, receiver)
        elif ranks.rank == receiver:
            dist.recv(array, sender)

    return size / slowest(call, ranks.context, size)


def slowest(call: Callable[[], Any], device: torch.device, size: int) -> float:
    """Return the seconds per call on the slowest rank; the fastest of several measurements."""
    call()
    count = max(1, min(_MOST_CALLS, BYTES_A_MEASUREMENT // max(size, 1)))
    times = []
    for _ in range(REPEATS):
        pytorch.barrier()
        local = seconds_of(call, count, pytorch.synchronize)
        worst = torch.tensor([local], dtype=torch.float64, device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        times.append(float(worst))
    return min(times)


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--output", type=Path, required=True, help="file for the result (JSON)")
    parser.add_argument("--most-bytes", type=int, default=1 << 40, help="largest array; default: all sizes")
    parser.add_argument("--peaks", action="store_true", help="also measure GEMMs and copies on each rank")
    parser.add_argument("--no-pairs", action="store_true", help="measure collectives only")
    arguments = parser.parse_args(argv)
    ranks = pytorch.start(SimpleNamespace(device=arguments.device, precision="fp32"))
    sizes = [size for size in SIZES[ranks.context.type] if size <= arguments.most_bytes]
    if ranks.size < 2 or not sizes:
        print("at least 2 ranks and one size are required", file=sys.stderr)
        return 2
    result = measure(ranks, sizes, not arguments.no_pairs)
    if arguments.peaks:
        result["peaks"] = peaks(ranks)
    pytorch.finish()
    if ranks.rank == 0:
        arguments.output.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    end_process(main)
