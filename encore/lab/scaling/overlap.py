"""Exposed time of the gradient all-reduce in a step, after the backward pass or overlapped with it.

    from encore.lab.scaling.overlap import DGX_H100, exposed_seconds, measured_steps
    print(exposed_seconds(measured_steps()["bert"], 64, DGX_H100, overlap=True))

The all-reduce is a ring within the node and, for each GPU's shard, a ring across nodes, as in
cost_model.py: bytes over bandwidth, no latency. The backward pass produces gradients at a constant rate in two
thirds of the step (two gradient GEMMs per forward GEMM). Buckets are reduced once full, sequentially. The last
bucket is therefore never hidden, nor is transfer beyond the bandwidth. The model ignores the multiprocessors that
NCCL kernels take from the GEMMs when buckets overlap.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from encore import catalogue
from encore.lab.scaling.cost_model import volumes
from encore.results.table import Cell, Table
from encore.run.published_speed import Step, measured

GPUS = (8, 64, 256)
BUCKET_BYTES = 25 << 20
SHARES = (1, 16)  # Divisors of the measured batch per GPU: that many more GPUs divide a global batch
_BYTES = 2  # Bytes per gradient element: fp16, as in the v0.7 submissions
_BACKWARD = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second per GPU and direction, intra-node and inter-node."""

    intra_node_rate: float
    inter_node_rate: float
    gpus: int = 8  # GPUs per node


# 18 NVLinks of 20.6 GB/s (encore/machine/links.py), and one "ConnectX-7 IB NDR 400Gb/s" per GPU, eight per node
# (mlcommons/training_results_v3.1, NVIDIA/systems/eos_n1024_ngc23.09_nemo.json)
DGX_H100 = Links(intra_node_rate=18 * 20.6e9, inter_node_rate=50e9)


def measured_steps() -> dict[str, Step]:
    """Return the steps of all benchmarks with a step in measured.toml."""
    steps = {name: measured(name).step for name in catalogue.benchmarks()}
    return {name: step for name, step in steps.items() if step is not None}


def allreduce_seconds(size: float, gpus: int, links: Links) -> float:
    """Return the seconds to all-reduce ``size`` bytes on otherwise idle links."""
    intra_node, inter_node = volumes(gpus, max(1, gpus // links.gpus))
    return size * (intra_node / links.intra_node_rate + inter_node / links.inter_node_rate)


def exposed_seconds(step: Step, gpus: int, links: Links, *, overlap: bool) -> float:
    """Return the exposed seconds per step of the fp16 gradient all-reduce."""
    size = float(step.parameters * _BYTES)
    all_reduce = allreduce_seconds(size, gpus, links)
    if not overlap:
        return all_reduce
    buckets = max(1.0, size / BUCKET_BYTES)
    return max(all_reduce / buckets, all_reduce - step.seconds * _BACKWARD * (1 - 1 / buckets))


def overlap_table(links: Links = DGX_H100, gpus: Sequence[int] = GPUS) -> Table:
    """Return the exposed all-reduce time per step with the measured batch and a fraction of that batch."""
    return Table(
        title="Gradient all-reduce per step",
        columns=("benchmark", "MB", "samples per GPU", "step, ms", "GPUs", "all-reduce, ms", "exposed, ms", "saved"),
        formats={
            "MB": ".0f", "step, ms": ".1f", "all-reduce, ms": ".2f", "exposed, ms": ".2f", "saved": ".1%",
        },
        rows=tuple(_rows(links, gpus)),
    )  # fmt: skip


def _rows(links: Links, gpus: Sequence[int]) -> Iterator[tuple[Cell, ...]]:
    for name, measured_step in measured_steps().items():
        for share in SHARES:
            step = measured_step.model_copy(update={"samples": measured_step.samples // share})
            for count in gpus:
                after, during = (exposed_seconds(step, count, links, overlap=overlap) for overlap in (False, True))
                saved = (after - during) / (step.seconds + after)
                size, seconds = step.parameters * _BYTES / 1e6, step.seconds * 1e3
                yield name, size, step.samples, seconds, count, after * 1e3, during * 1e3, saved


def allreduce_table(ranks: int, bus_bandwidth: float) -> Table:
    """Return the all-reduce time over a machine's ``ranks`` at a measured bus bandwidth in bytes per second.

    nccl-tests (doc/PERFORMANCE.md) counts 2(n-1)/n of the bytes for all algorithms.
    """
    rows = []
    for name, step in measured_steps().items():
        seconds = step.parameters * _BYTES * 2 * (ranks - 1) / ranks / bus_bandwidth
        rows.append((name, step.parameters * _BYTES / 1e6, seconds * 1e3))
    return Table(
        title="Gradient all-reduce per step on this machine",
        columns=("benchmark", "MB in fp16", "ms"),
        formats={"MB in fp16": ".0f", "ms": ".2f"},
        rows=tuple(rows),
        note=f"At {bus_bandwidth / 1e9:.3g} GB/s, the bus bandwidth of the largest measured all-reduce. "
        "A longer backward pass hides all but the last bucket.",
    )
