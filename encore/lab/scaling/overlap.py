"""What a step loses to the sum of its gradients over the ranks, after the backward pass or begun in it.

    from encore.lab.scaling.overlap import DGX_H100, lost, measured_steps
    print(lost(measured_steps()["bert"], 64, DGX_H100, overlap=True))

The sum is a ring over the GPUs of a node and one over the nodes, of whose gradient each GPU carries its share, as in
cost_model.py: bytes over bandwidth, no latency. The backward pass makes gradients at an even pace in its two thirds of
the step (each product's two gradients for one product forward); a bucket is summed once it is whole, one after the
other. So the last one is never hidden, nor is what the links cannot carry meanwhile. Where buckets begin early, NCCL's
kernels take multiprocessors from the products: that has no term.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from encore import catalogue
from encore.lab.scaling.cost_model import volumes
from encore.results.table import Cell, Table
from encore.run.published_speed import Step, measured

GPUS = (8, 64, 256)
BUCKET_BYTES = 25 << 20
SHARES = (1, 16)  # Of the measured batch that a GPU has: as many GPUs more divide a global batch
_BYTES = 2  # Of a gradient in fp16, the type in which the submissions of v0.7 send it
_BACKWARD = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second of a GPU in one direction, between the GPUs of a node and between nodes."""

    inside: float
    between: float
    gpus: int = 8  # of a node


# 18 NVLinks of 20.6 GB/s (encore/machine/links.py), and for each GPU one "ConnectX-7 IB NDR 400Gb/s" of the eight of a
# node (mlcommons/training_results_v3.1, NVIDIA/systems/eos_n1024_ngc23.09_nemo.json)
DGX_H100 = Links(inside=18 * 20.6e9, between=50e9)


def measured_steps() -> dict[str, Step]:
    """Return the step in each benchmark's measured.toml that has one."""
    found = {name: measured(name).step for name in catalogue.benchmarks()}
    return {name: step for name, step in found.items() if step is not None}


def sum_seconds(size: float, gpus: int, links: Links) -> float:
    """Seconds of a sum of ``size`` bytes over the ranks, with nothing else on the links."""
    inside, between = volumes(gpus, max(1, gpus // links.gpus))
    return size * (inside / links.inside + between / links.between)


def lost(step: Step, gpus: int, links: Links, *, overlap: bool) -> float:
    """Seconds by which the sum of the gradients, in fp16, makes a step longer."""
    size = float(step.parameters * _BYTES)
    whole = sum_seconds(size, gpus, links)
    if not overlap:
        return whole
    buckets = max(1.0, size / BUCKET_BYTES)
    return max(whole / buckets, whole - step.seconds * _BACKWARD * (1 - 1 / buckets))


def overlap_table(links: Links = DGX_H100, gpus: Sequence[int] = GPUS) -> Table:
    """Return what the sum of the gradients adds to a step, of a measured batch and of a part of it."""
    return Table(
        title="Sum of the gradients of a step",
        columns=("benchmark", "MB", "samples per GPU", "step, ms", "GPUs", "all-reduce, ms", "exposed, ms", "saved"),
        formats={
            "MB": ".0f", "step, ms": ".1f", "all-reduce, ms": ".2f", "exposed, ms": ".2f", "saved": ".1%",
        },
        rows=tuple(_rows(links, gpus)),
    )  # fmt: skip


def _rows(links: Links, gpus: Sequence[int]) -> Iterator[tuple[Cell, ...]]:
    for name, whole in measured_steps().items():
        for share in SHARES:
            step = whole.model_copy(update={"samples": whole.samples // share})
            for count in gpus:
                after, during = (lost(step, count, links, overlap=each) for each in (False, True))
                saved = (after - during) / (step.seconds + after)
                size, seconds = step.parameters * _BYTES / 1e6, step.seconds * 1e3
                yield name, size, step.samples, seconds, count, after * 1e3, during * 1e3, saved


def sums_table(ranks: int, bus_bandwidth: float) -> Table:
    """Return how long the sum takes over ``ranks`` of a machine, at a measured bus bandwidth in bytes per second.

    nccl-tests (doc/PERFORMANCE.md) counts 2(n-1)/n of the bytes, whatever the algorithm.
    """
    rows = []
    for name, step in measured_steps().items():
        seconds = step.parameters * _BYTES * 2 * (ranks - 1) / ranks / bus_bandwidth
        rows.append((name, step.parameters * _BYTES / 1e6, seconds * 1e3))
    return Table(
        title="Sum of the gradients of a step here",
        columns=("benchmark", "MB in fp16", "ms"),
        formats={"MB in fp16": ".0f", "ms": ".2f"},
        rows=tuple(rows),
        note=f"At {bus_bandwidth / 1e9:.3g} GB/s, the bus bandwidth of the largest all-reduce that was measured. "
        "A backward pass that takes longer hides all but its last bucket.",
    )
