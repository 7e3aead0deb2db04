"""Run metrics in the format of node_exporter's textfile collector; no additional daemon is needed.

    $ node_exporter --collector.textfile.directory=/var/lib/node_exporter       # the site's
    $ ENCORE_TEXTFILE=/var/lib/node_exporter encore run resnet 8                 # or textfile in cluster.toml

The format is the subset of OpenMetrics 1.0 that is also valid in Prometheus' older text format.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from encore import files
from encore.files import json_objects, lines_at_end

VARIABLE = "ENCORE_TEXTFILE"
WRITTEN_SECONDS = 15.0  # Between two writings: a usual interval of scrapes
_LAST_BYTES = 4096

# Key in the sample, metric, type, factor to the base unit, and help text.
OF_NODE = (
    ("cpu_percent", "encore_cpu_used_ratio", "gauge", 0.01, "Fraction of CPU time in use, all cores"),
    ("memory_used_mib", "encore_memory_used_bytes", "gauge", 2.0**20, "Memory in use"),
    ("disk_read_bytes", "encore_disk_read_bytes", "counter", 1.0, "Read from disks since boot"),
    ("disk_write_bytes", "encore_disk_written_bytes", "counter", 1.0, "Written to disks since boot"),
    ("network_received_bytes", "encore_network_received_bytes", "counter", 1.0, "Received since boot"),
    ("network_sent_bytes", "encore_network_sent_bytes", "counter", 1.0, "Sent since boot"),
    ("cpu_stall_us", "encore_cpu_stalled_seconds", "counter", 1e-6, "Time in which a process waited for a core"),
    ("io_stall_us", "encore_io_stalled_seconds", "counter", 1e-6, "Time in which a process waited for a disk"),
)
OF_GPU = (
    ("use_percent", "encore_gpu_used_ratio", "gauge", 0.01, "Fraction of time in which a kernel ran"),
    ("memory_mib", "encore_gpu_memory_used_bytes", "gauge", 2.0**20, "Memory in use"),
    ("sm_mhz", "encore_gpu_sm_clock_hertz", "gauge", 1e6, "Clock of the SMs"),
    ("power_watts", "encore_gpu_power_watts", "gauge", 1.0, "Power"),
    ("temperature_celsius", "encore_gpu_temperature_celsius", "gauge", 1.0, "Temperature"),
    ("throttle", "encore_gpu_throttle_reasons", "gauge", 1.0, "Sum of the bits of nvmlClocksEventReason"),
    ("ecc_uncorrected", "encore_gpu_uncorrectable_errors", "counter", 1.0, "Memory errors since the driver was loaded"),
    ("nvlink_sent_kib", "encore_gpu_nvlink_sent_bytes", "counter", 1024.0, "Sent over all NVLinks"),
)
OF_RANK = (
    ("median", "encore_rank_step_seconds", "gauge", 1.0, "Median of the last window's steps"),
    ("p99", "encore_rank_step_p99_seconds", "gauge", 1.0, "99th percentile of the last window's steps"),
    ("waiting", "encore_rank_waiting_ratio", "gauge", 1.0, "Fraction of time spent waiting for other ranks"),
)
OF_RUN = (
    ("step", "encore_run_step", "gauge", 1.0, "Last step"),
    ("epoch", "encore_run_epoch", "gauge", 1.0, "Current epoch, from 1"),
    ("loss", "encore_run_loss", "gauge", 1.0, "Mean loss since the previous record"),
)


def render(reading: Mapping[str, Any], experiment: Path) -> str:
    """Render metrics for a node's sample, its ranks, and the run's progress."""
    labels = {"run": experiment.parent.name, "experiment": experiment.name.rpartition("_")[2], "node": reading["node"]}
    gpus = [({**labels, "gpu": number}, gpu) for number, gpu in enumerate(reading["gpus"])]
    ranks = [({**labels, "rank": rank}, line) for rank, line in _ranks(experiment, str(reading["node"]))]
    run = [(labels, step)] if (step := _last(experiment / "metrics.jsonl", '"kind": "step"')) else []
    lines: list[str] = []
    for table, sources in ((OF_NODE, [(labels, reading)]), (OF_GPU, gpus), (OF_RANK, ranks), (OF_RUN, run)):
        for key, name, kind, factor, description in table:
            samples = [
                (source_labels, source[key] * factor)
                for source_labels, source in sources
                if source.get(key) is not None
            ]
            if samples:
                lines += [f"# TYPE {name} {kind}", f"# HELP {name} {description}."]
                end = "_total" if kind == "counter" else ""
                lines += [f"{name}{end}{_labels(source_labels)} {value:.10g}" for source_labels, value in samples]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _labels(labels: Mapping[str, Any]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{name}="{str(value).translate(escapes)}"' for name, value in labels.items()) + "}"


def _ranks(experiment: Path, node: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    # The last record of every rank on a node. Each node reports its ranks.
    for path in sorted((experiment / "steps").glob("rank_*.jsonl")):
        line = _last(path, '"median"')
        if line and line.get("node") == node:
            yield int(path.stem[5:]), line


def _last(path: Path, mark: str) -> dict[str, Any]:
    lines = reversed(lines_at_end(path, _LAST_BYTES))
    return next(json_objects(line for line in lines if mark in line), {})


class Textfile:
    """A run's file in the collector's folder, if configured. Call ``remove`` when the run ends."""

    def __init__(self, experiment: Path) -> None:
        folder = os.environ.get(VARIABLE)
        name = f"encore-{experiment.parent.name}-{experiment.name}.prom"
        self._experiment, self._path = experiment, Path(folder, name) if folder else None
        self._next = 0.0

    def write(self, reading: Mapping[str, Any]) -> None:
        """Write the file atomically, no more than once per interval."""
        if self._path is None or reading["time"] < self._next:
            return
        self._next = reading["time"] + WRITTEN_SECONDS
        # The collector only reads *.prom files.
        with suppress(OSError), files.replaced(self._path) as file:
            file.write(render(reading, self._experiment).encode())

    def remove(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
