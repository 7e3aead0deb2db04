"""Rooflines and kernel tables of training steps, from the JSON output of benchmarks/common/checks/roofline.py.

    from encore.lab.studies.roofline import load, roofline_table
    print(roofline_table(load(Path("roofline"))).as_markdown())

Attainable operations per second are min(peak, intensity * bandwidth) (Williams, Waterman and Patterson, "Roofline:
an insightful visual performance model", CACM 52, 2009), with peak and bandwidth measured on the same machine.

Common kernels of two frameworks are matched by name in two kernel tables: roofline JSON files, or Nsight Systems
output of any framework: ``nsys stats --report cuda_gpu_kern_sum --format csv REPORT``.
"""

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore.errors import EncoreError
from encore.results.report.figures import WIDTH, Figure
from encore.results.report.svg_plot import Panel, Scale
from encore.results.table import Cell, Table

PEAKS = "peaks.json"
_HEIGHT = 360
_KERNELS = 12


@dataclass(frozen=True)
class Measured:
    peaks: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]

    @property
    def bandwidth(self) -> float:
        """The larger of copy and triad, in bytes per second."""
        return float(max(self.peaks["bytes_per_second"].values()))

    @property
    def is_cpu(self) -> bool:
        return bool(self.peaks["device"] == "cpu")

    def peak(self, step: Mapping[str, Any]) -> float | None:
        peak = self.peaks["flops_per_second"].get(step["precision"])
        return float(peak) if peak is not None else None


def load(folder: Path) -> Measured:
    """Return the contents of the JSON files in a folder; EncoreError without ceilings."""
    peaks: Mapping[str, Any] | None = None
    steps = []
    for path in sorted(folder.glob("*.json")):
        content = _read(path)
        peaks = content.get("peaks") or peaks
        if content.get("step"):
            steps.append({**content["step"], "file": path.stem})
    if peaks is None:
        raise EncoreError(f"{folder} lacks ceilings", expected=PEAKS, hint="encore bench BENCHMARK --roofline -o DIR")
    return Measured(peaks=peaks, steps=tuple(steps))


def fastest(peaks: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the maximum of the ceilings and those in the file ``path``, if from the same device and library.

    Interference can only slow a measurement down, so the fastest one is closest to the device limit.
    """
    previous = (_read(path) if path.is_file() else {}).get("peaks", {})
    if any(previous.get(name) != peaks[name] for name in ("device", "name", "library", "threads")):
        return dict(peaks)
    speeds = ("flops_per_second", "bytes_per_second")
    return {
        **peaks,
        **{kind: {name: max(value, previous[kind][name]) for name, value in peaks[kind].items()} for kind in speeds},
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EncoreError(f"{path} cannot be read: {error}", expected="JSON of a roofline") from error
    return content if isinstance(content, dict) else {}


def step_title(step: Mapping[str, Any]) -> str:
    return f"{_benchmark(step)}, {step['precision']}, batch {step['batch_size']}"


def _benchmark(step: Mapping[str, Any]) -> str:
    return str(step["module"].split(".")[1])


def _names(measured: Measured) -> list[str]:
    # Step names: the benchmark, with the full title if it has multiple steps.
    count = Counter(map(_benchmark, measured.steps))
    return [step_title(step) if count[_benchmark(step)] > 1 else _benchmark(step) for step in measured.steps]


def _unit(measured: Measured) -> tuple[str, float]:
    return ("GFLOP/s", 1e9) if measured.is_cpu else ("TFLOP/s", 1e12)


def peaks_table(measured: Measured) -> Table:
    unit, size = _unit(measured)
    flops, bandwidths = measured.peaks["flops_per_second"], measured.peaks["bytes_per_second"]
    rows = (
        *((f"product of matrices, {name}", value / size, unit) for name, value in flops.items()),
        *((f"memory, {name}", value / 1e9, "GB/s") for name, value in bandwidths.items()),
    )
    device = measured.peaks["name"] or f"CPU, {measured.peaks['threads']} threads"
    return Table(
        title=f"Ceilings of {device}", columns=("ceiling", "measured", "unit"), rows=rows,
        note=f"Measured by {measured.peaks['library']} on this machine before the benchmarks;"
        " maximum over all measurements.",
    )  # fmt: skip


def roofline_table(measured: Measured) -> Table:
    rows = []
    unit, size = _unit(measured)
    for step in measured.steps:
        seconds, peak = step["seconds"]["median"], measured.peak(step)
        attained, intensity = step["flops"] / seconds, step["flops"] / step["moved"]
        model = step.get("model_flops")
        roof = min(peak, intensity * measured.bandwidth) if peak else None
        rows.append(
            (
                _benchmark(step), step["precision"], step["batch_size"], step["flops"] / 1e9, step["moved"] / 1e9,
                model / 1e9 if model else None, intensity, seconds * 1e3, step["samples_per_step"] / seconds,
                step.get("unit", "samples"), attained / size,
                attained / roof if roof else None, attained / peak if peak else None,
                model / seconds / peak if model and peak else None, ", ".join(step["uncounted"]),
            )
        )  # fmt: skip
    columns = (
        "step", "precision", "batch", "GFLOP", "GB", "model GFLOP", "FLOP/byte", "ms", "per second", "of", unit,
        "of the roof", "of the peak", "MFU", "not counted",
    )  # fmt: skip
    return Table(
        title="Roofline",
        columns=columns,
        rows=tuple(rows),
        formats={"of the roof": ".1%", "of the peak": ".1%", "MFU": ".1%"},
        note="GFLOP: PyTorch's count of GEMMs, convolutions and attention. GB: reads and writes of single operators; "
        "compiler fusion and caches avoid part of these, so that a step may be above the roof. "
        "Model GFLOP: from the network sizes, without padding or recomputation; MFU: their fraction of the "
        "measured peak.",
    )


def classes_table(measured: Measured) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for step, title in zip(measured.steps, _names(measured), strict=True):
        class_totals = dict.fromkeys(step["classes"], (0, 0)) | step["by_class"]
        classes = sorted(step["classes"].items(), key=lambda item: -item[1])
        rows += [
            (title, name, share, class_totals[name][0] / 1e9, class_totals[name][1] / 1e9) for name, share in classes
        ]
    return Table(
        title="Kernels by class",
        columns=("step", "class", "share of the time", "GFLOP", "GB"),
        formats={"share of the time": ".1%"},
        rows=tuple(rows),
        note="Fraction of the kernel time, by kernel name on GPUs and operator name on CPUs.",
    )


def kernels_table(measured: Measured) -> Table:
    rows = tuple(
        (
            title,
            short_kernel(kernel["name"]),
            kernel["class"],
            kernel["share"],
            kernel["calls"],
            kernel["seconds"] * 1e3,
        )
        for step, title in zip(measured.steps, _names(measured), strict=True)
        for kernel in step["kernels"][:_KERNELS]
    )
    columns = ("step", "kernel", "class", "share of the time", "calls", "ms")
    note = "Names without namespaces and arguments, truncated; complete in the JSON files."
    return Table(title="Longest kernels", columns=columns, formats={"share of the time": ".1%"}, rows=rows, note=note)


def short_kernel(name: str) -> str:
    """Return a kernel name without return type, namespaces and arguments, cut to 60 characters."""
    bare = _NAMESPACES.sub("", name)
    depth = 0
    for index, letter in enumerate(bare):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            bare = bare[:index]
            break
    return bare if len(bare) <= _LONGEST_NAME else f"{bare[: _LONGEST_NAME - 1]}…"


_NAMESPACES = re.compile(r"^void |\(anonymous namespace\)::|\b(?:at|native|c10|std|cuda|cudnn|cutlass|pytorch_flash)::")
_LONGEST_NAME = 60


def roofline_figure(measured: Measured) -> Figure | None:
    """Return the steps below the ceilings, both axes logarithmic."""
    if not measured.steps:
        return None
    spots = [(s["flops"] / s["moved"], s["flops"] / s["seconds"]["median"]) for s in measured.steps if s["moved"]]
    roofs = {name: float(value) for name, value in measured.peaks["flops_per_second"].items()}
    ridge = max(roofs.values()) / measured.bandwidth
    x = _decades([*(spot[0] for spot in spots), ridge * 2, 1.0])
    y = _decades([*(spot[1] for spot in spots), *roofs.values()])
    panel = Panel(WIDTH, _HEIGHT, left=58)
    panel.axes(x, None, "FLOP per byte", "FLOP/s", x_ticks=_powers(x))
    panel.y = Scale(*y, panel.bottom, panel.top, True)
    for level in _powers(y):
        panel.line([(x[0], level), (x[1], level)], "grid")
        panel.text(panel.left - 6, panel.y(level) + 4, _short(level), "end")
    panel.clip()
    for roof in roofs.values():
        start = max(x[0], y[0] / measured.bandwidth)
        panel.line([(start, start * measured.bandwidth), (roof / measured.bandwidth, roof), (x[1], roof)], "level")
    panel.clip(end=True)
    for height, label in _labels(roofs, panel):
        panel.text(panel.right, height - 4, label, "end halo")
    for number, (step, spot) in enumerate(zip(measured.steps, spots, strict=False), 1):
        panel.marks([spot], number)
        panel.name(number, step_title(step))
    panel.name(None, f"measured ceilings, {measured.bandwidth / 1e9:.4g} GB/s")
    title = "Roofline" + (" of this machine's CPU" if measured.is_cpu else f" of {measured.peaks['name']}")
    return Figure("roofline", title, panel.svg(title), roofline_table(measured))


def _labels(roofs: Mapping[str, float], panel: Panel) -> list[tuple[float, str]]:
    # Heights and labels of the ceilings; labels that would overlap are combined.
    labels: list[tuple[float, str]] = []
    for name, roof in sorted(roofs.items(), key=lambda item: -item[1]):
        height, label = panel.y(roof), f"{name} {_short(roof)}"
        if labels and height - labels[-1][0] < _LETTER:
            labels[-1] = (labels[-1][0], f"{labels[-1][1]}, {label}")
        else:
            labels.append((height, label))
    return labels


_LETTER = 14.0  # line height of a text


def _decades(values: Sequence[float]) -> tuple[float, float]:
    positive = [value for value in values if value > 0]
    return 10.0 ** math.floor(math.log10(min(positive))), 10.0 ** math.ceil(math.log10(max(positive)) + 0.1)


def _powers(span: tuple[float, float]) -> list[float]:
    return [10.0**power for power in range(round(math.log10(span[0])), round(math.log10(span[1])) + 1)]


def _short(value: float) -> str:
    # ``200 G`` or ``1.2 T``.
    unit, letter = next((u, n) for u, n in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, "")) if value >= u)
    return f"{value / unit:.3g} {letter}".strip()


_TIME, _NAME = "Total Time (ns)", "Name"


@dataclass(frozen=True)
class Kernels:
    title: str
    seconds: dict[str, float]
    total: float

    def share(self, name: str) -> float:
        return self.seconds[name] / self.total if self.total else 0.0


def read_kernels(path: Path) -> Kernels:
    try:
        text = path.read_text(encoding="utf-8")
        step = json.loads(text).get("step") or {} if text.lstrip().startswith("{") else {}
    except (OSError, ValueError) as error:
        raise EncoreError(f"{path} cannot be read: {error}", expected="a table of kernels") from error
    if "kernels" in step:
        seconds_by_name = {kernel["name"]: float(kernel["seconds"]) for kernel in step["kernels"]}
        return Kernels(path.stem, seconds_by_name, float(step["busy_seconds"]))
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if _TIME in line and _NAME in line), None)
    if start is None:
        raise EncoreError(
            f"{path} is not a kernel table",
            expected="the JSON of `encore bench --roofline`, or CSV of `nsys stats --report cuda_gpu_kern_sum`",
        )
    seconds: dict[str, float] = {}
    for row in (row for row in csv.DictReader(lines[start:]) if row.get(_NAME) and (row.get(_TIME) or "").isdigit()):
        seconds[row[_NAME]] = seconds.get(row[_NAME], 0.0) + int(row[_TIME]) / 1e9
    return Kernels(path.stem, seconds, sum(seconds.values()))


def common_kernels_table(first: Kernels, second: Kernels) -> Table:
    """Return the common kernels, with their fraction of the time in both programs."""
    names = sorted(first.seconds.keys() & second.seconds.keys(), key=lambda name: -first.share(name))
    shares = [(name, first.share(name), second.share(name)) for name in names]
    share_a, share_b = sum(row[1] for row in shares), sum(row[2] for row in shares)
    columns = ("kernel", first.title, second.title if second.title != first.title else f"{second.title} (2)")
    return Table(
        title="Kernels in common",
        columns=columns,
        formats=dict.fromkeys(columns[1:], ".1%"),
        rows=tuple(shares),
        note=f"{len(names)} kernels in common: {share_a:.0%} of the time of {first.title},"
        f" {share_b:.0%} of {second.title}.",
    )
