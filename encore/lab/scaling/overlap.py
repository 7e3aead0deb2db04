"""Time of the gradient all-reduce: hierarchical as in cost_model.py, bytes over bandwidth, no latency.

    from encore.lab.scaling.overlap import Links, allreduce_seconds
    print(allreduce_seconds(51e6, 64, Links(intra_node_rate=450e9, inter_node_rate=50e9)))

projection.py has the fraction that published results hide in the backward pass.
"""

from dataclasses import dataclass

from encore import catalogue
from encore.lab.scaling.cost_model import volumes
from encore.results.table import Table
from encore.run.published_speed import Step, measured

_BYTES = 2  # Bytes per gradient element: fp16, as in the v0.7 submissions


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second per GPU and direction, intra-node and inter-node."""

    intra_node_rate: float
    inter_node_rate: float
    gpus: int = 8  # GPUs per node


def measured_steps() -> dict[str, Step]:
    """Return the steps of all benchmarks with a step in measured.toml."""
    steps = {name: measured(name).step for name in catalogue.benchmarks()}
    return {name: step for name, step in steps.items() if step is not None}


def allreduce_seconds(size: float, gpus: int, links: Links) -> float:
    """Return the seconds to all-reduce ``size`` bytes on otherwise idle links."""
    intra_node, inter_node = volumes(gpus, max(1, gpus // links.gpus))
    return size * (intra_node / links.intra_node_rate + inter_node / links.inter_node_rate)


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
