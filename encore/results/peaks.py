"""Peak throughput from GPU data sheets, and model FLOPs utilization, MFU (arXiv 2204.02311, appendix B)."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from encore.files import read_toml

_SIZES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@cache
def peak_of(gpu: str, precision: str | None) -> tuple[float, str] | None:
    """Return FLOP/s and source by the driver's GPU name; None without a data sheet.

    Without a precision: the highest of all precisions.
    """
    sheet = _sheet("gpus", gpu) or {"tflops": {}}
    tflops = sheet["tflops"].get(precision) if precision else max(sheet["tflops"].values(), default=None)
    return None if tflops is None else (1e12 * tflops, sheet["source"])


@cache
def bandwidth_of(gpu: str) -> tuple[float, str] | None:
    """Return memory bandwidth in bytes per second, and source; None without a data sheet."""
    sheet = _sheet("memory", gpu)
    return None if sheet is None else (1e12 * sheet["terabytes"], sheet["source"])


def _sheet(table: str, gpu: str) -> Mapping[str, Any] | None:
    sheets = read_toml(Path(__file__).with_suffix(".toml"))[table]
    return next((sheet for sheet in sheets if re.search(sheet["name"], gpu)), None)


def utilization(flops: float, speed: float, unit: str, gpu: str, precision: str, gpus: int) -> dict[str, Any]:
    """Return a training's utilization, as stored in run.json.

    Args:
        flops: model FLOPs per sample.
        speed: samples per second.
        unit: sample name in plural, such as ``samples``.
        gpu: the driver's GPU name; empty on CPUs.
        precision: precision of GEMMs.
        gpus: number of GPUs.
    """
    measured: dict[str, Any] = {
        "unit": unit, "flops_per_sample": flops, "samples_per_second": speed, "flops_per_second": flops * speed,
    }  # fmt: skip
    if gpu and (peak := peak_of(gpu, precision)):
        measured.update(peak_flops_per_second=gpus * peak[0], peak_source=peak[1], mfu=flops * speed / (gpus * peak[0]))
    return measured


def sentence(measured: Mapping[str, Any]) -> str:
    """Return ``24.5 GFLOP per sample x 7,950 samples/s = 195 TFLOP/s: MFU 19.7% of the 990 TFLOP/s of ...``."""
    unit = str(measured["unit"]).removesuffix("s")
    speed = f"{measured['samples_per_second']:,.{0 if measured['samples_per_second'] >= 100 else 1}f}"
    sample, second = written(measured["flops_per_sample"]), written(measured["flops_per_second"])
    text = f"{sample} per {unit} x {speed} {unit}s/s = {second}/s"
    if "mfu" not in measured:
        return f"{text}; no data sheet of the device is known"
    peak = written(measured["peak_flops_per_second"])
    return f"{text}: MFU {measured['mfu']:.1%} of the {peak}/s of {measured['peak_source']}"


def written(flops: float) -> str:
    size, name = next((unit for unit in _SIZES if flops >= unit[0]), _SIZES[-1])
    return f"{flops / size:.3g} {name}FLOP"
