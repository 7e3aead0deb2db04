"""Comparison of servers: tables of runs, use of the hardware, pages, rooflines and kernels."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encore import paths
from encore.errors import EncoreError
from encore.lab.studies import roofline, server_comparison, topology
from encore.machine.links import parse_topology
from encore.results.table import Table
from tests.command_line import output_of
from tests.results.result_logs import START_MS, resnet_v07, write_files

TOPOLOGY = paths.ROOT / "tests" / "samples" / "topology"
START_S = START_MS / 1000


def reading(time: float, cpu: float, nvlink_kib: int) -> dict[str, Any]:
    card = {"use_percent": cpu + 10, "pcie_sent_kib_s": 2048, "nvlink_sent_kib": nvlink_kib, "power_watts": None}
    return {"time": time, "cpu_percent": cpu, "memory_used_mib": 100, "gpus": [card, card]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    # Runs of two servers, one five times as fast, with telemetry before, in and after the timed part, whose last line
    # is cut. The slow run has a passport with links.
    folders, root = {}, tmp_path_factory.mktemp("runs")
    passport = {"nodes": 1, "ranks_per_node": 8, "links": replace(dgx1(), name="box").as_json()}
    write_files(root, {"old/experiment_0/run.json": passport})
    for name, minutes in (("old", 50.0), ("new", 10.0)):
        stop = START_S + minutes * 60
        readings = (START_S - 5, 3.0, 0), (START_S + 1, 40.0, 1024), (stop - 1, 60.0, 1024 * 1025), (stop + 30, 2.0, 0)
        telemetry = [*(reading(*values) for values in readings), '{"time": 1']
        run = {"experiment_0/result.txt": resnet_v07(minutes), "experiment_0/telemetry.jsonl": telemetry}
        folders[name] = write_files(root / name, run)
    return folders


def dgx1() -> topology.Server:
    return parse_topology((TOPOLOGY / "dgx1-v100.txt").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runs(folders: dict[str, Path]) -> list[server_comparison.ServerRun]:
    return server_comparison.load_runs([f"{name}={path}" for name, path in folders.items()])


def variant(
    run: server_comparison.ServerRun, server: str, links: str = "", **changed: Any
) -> server_comparison.ServerRun:
    measured = replace(run.measured, label=server, system=server, **{"gpus": 4, "framework": "mxnet", **changed})
    return server_comparison.ServerRun(server=server, side=run.side, measured=measured, links=links)


def plain(tables: Iterable[Table]) -> dict[str, object]:
    return {table.title: [table.columns, *table.rows] for table in tables}


def test_tables_of_servers(runs: list[server_comparison.ServerRun], recorded: Callable[[str, object], None]) -> None:
    # Runs with different links, precision, framework, batch and GPUs; the second part is one server. The base is the
    # first run of the named server, with the same batch if there is one.
    several = [
        variant(runs[0], "a", "PCIe", minutes=100.0, precision="fp16"),
        variant(runs[0], "b", "NVLink", minutes=80.0, precision="fp16"),
        variant(runs[0], "a", "PCIe", minutes=400.0, precision="fp32"),
        variant(runs[0], "a", "PCIe", minutes=110.0, precision="fp16", framework="tensorflow"),
        variant(runs[0], "a", "PCIe", minutes=90.0, precision="fp16", batch=3328.0),
        variant(runs[0], "a", "PCIe", minutes=160.0, precision="fp16", gpus=2),
    ]
    box = server_comparison._label_runs([
        variant(runs[0], "box", minutes=60.0, precision="fp32", batch=64.0, gpus=1),
        variant(runs[0], "box", minutes=50.0, precision="fp32", batch=32.0, gpus=1),
        variant(runs[0], "box", minutes=30.0, precision="fp16", batch=64.0, gpus=1),
        variant(runs[0], "box", minutes=40.0, precision="fp32", batch=128.0, gpus=2),
    ])  # fmt: skip
    two_epochs = replace(runs[0], side=replace(runs[0].side, phases={"first_epoch_s": 90.0, "epoch_s": 60.0}))
    recorded("servers.json", {
        "two": plain(server_comparison.tables(runs, "new")), "base of two": server_comparison.base_of(runs, None),
        "links that the runs found": [run.links for run in runs],
        "several": plain(server_comparison.tables(several, "a")),
        "labels": [run.measured.label for run in box], "box": plain(server_comparison.tables(box)),
        "epochs": plain([server_comparison.first_epochs([two_epochs])]),
        "published": plain(server_comparison.published_tables()),
        "use": {run.server: server_comparison.mean_utilisation(run.side.logs) for run in runs},
    })  # fmt: skip
    with pytest.raises(EncoreError, match="base"):
        server_comparison.tables(runs, "newer")


def test_gpus_needed_within_a_day(
    runs: list[server_comparison.ServerRun], recorded: Callable[[str, object], None]
) -> None:
    # 2,000 minutes on one GPU, and 2 % lost per doubling: two GPUs for a day, 16 for four hours
    several = [variant(runs[0], "a", gpus=gpus, minutes=2000 / gpus * 1.02**gpus) for gpus in (1, 2, 4)]
    table = server_comparison.gpus_needed([*several, variant(runs[0], "b", gpus=8, minutes=130.0)])
    recorded("gpus_needed.json", [
        [float(f"{cell:.3g}") if isinstance(cell, float) else cell for cell in row] for row in table.rows
    ])  # fmt: skip


@pytest.mark.parametrize("name", ["dgx1-v100", "dgx-a100", "no GPU"])
def test_picture_of_a_server(name: str, recorded: Callable[[str, object], None]) -> None:
    listing = TOPOLOGY / f"{name}.txt"
    server = parse_topology(listing.read_text("utf-8")) if listing.exists() else topology.Server(name=name, sockets=2)
    recorded(f"machines/{name}.svg", topology.picture(server).svg)


def test_output_of_nccl_tests_is_parsed() -> None:
    text = "#  size  count type redop root time algbw busbw\n   65536  16384  float  sum  -1  25.67  2.55  4.47  0\n"
    assert topology.parse_nccl_tests(text) == [[65536.0, 4.47e9]]


STEP = {"step": {
    "module": "benchmarks.resnet.pytorch", "precision": "fp32", "batch_size": 8, "samples_per_step": 8,
    "model_flops": 3e12, "seconds": {"median": 2.0}, "flops": 4e12, "moved": 1e12,
    "by_class": {"matrix products": [4e12, 1e12]},
    "classes": {"matrix products": 0.8, "other": 0.2}, "uncounted": [], "busy_seconds": 1.0,
    "kernels": [{"name": "gemm", "class": "matrix products", "seconds": 0.8, "calls": 1, "share": 0.8}],
}}  # fmt: skip


def test_roofline_of_a_step(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    # 4 FLOP/byte are below the ridge of 10 TFLOP/s at 1 TB/s: memory limits the step to 4 TFLOP/s
    peaks = {
        "device": "cuda", "name": "GPU", "library": "2", "threads": None,
        "flops_per_second": {"fp32": 1e13, "fp16": 4e13, "tf32": 3.8e13},
        "bytes_per_second": {"copy": 1e12, "triad": 0.9e12},
    }  # fmt: skip
    measured = roofline.load(write_files(tmp_path, {roofline.PEAKS: {"peaks": peaks}, "a.json": STEP}))
    table, figure = roofline.roofline_table(measured), roofline.roofline_figure(measured)
    assert [dict(zip(table.columns, row, strict=True)) for row in table.rows] == [{
        "step": "resnet", "precision": "fp32", "batch": 8, "GFLOP": 4000.0, "GB": 1000.0, "model GFLOP": 3000.0,
        "FLOP/byte": 4.0, "ms": 2000.0, "per second": 4.0, "of": "samples", "TFLOP/s": 2.0, "of the roof": 0.5,
        "of the peak": 0.2, "MFU": 0.15, "not counted": "",
    }]  # fmt: skip
    recorded("roofline.svg", figure.svg)
    output_of("study", "report", tmp_path, "-o", tmp_path / "page")
    assert (tmp_path / "page" / "roofline.svg").read_text(encoding="utf-8") == figure.standalone_svg()


def test_ceilings_are_the_fastest_measurements_of_the_device(tmp_path: Path) -> None:
    def peaks(flops: float, copied: float, threads: int = 2) -> dict[str, Any]:
        speeds = {"flops_per_second": {"fp32": flops}, "bytes_per_second": {"copy": copied}}
        return {"device": "cpu", "name": "", "library": "2", "threads": threads, **speeds}

    path = write_files(tmp_path, {roofline.PEAKS: {"peaks": peaks(3.0, 1.0)}}) / roofline.PEAKS
    assert roofline.fastest(peaks(1.0, 2.0), tmp_path / "none") == peaks(1.0, 2.0)
    fastest = [roofline.fastest(peaks(1.0, 2.0, threads), path) for threads in (1, 2)]
    assert fastest == [peaks(1.0, 2.0, 1), peaks(3.0, 2.0)]


def test_kernels_of_two_profiles_are_compared(tmp_path: Path) -> None:
    report = "Processing\n\nTime (%),Total Time (ns),Instances,Name\n45.0,450000000,3,gemm\n55.0,550000000,1,sort\n"
    write_files(tmp_path, {"a.json": STEP, "b.csv": report, "c.csv": "no table"})
    profiles = [roofline.read_kernels(tmp_path / name) for name in ("a.json", "b.csv")]
    assert roofline.common_kernels_table(*profiles).rows == (("gemm", 0.8, pytest.approx(0.45)),)
    with pytest.raises(EncoreError, match="not a kernel table"):
        roofline.read_kernels(tmp_path / "c.csv")


def test_page_of_servers(folders: dict[str, Path], tmp_path: Path) -> None:
    write_files(tmp_path, {topology.FILE: topology.Machine(replace(dgx1(), name="new")).as_json()})
    servers = [f"{name}={path}" for name, path in folders.items()]
    output_of("study", "report", *servers, tmp_path, "-o", tmp_path / "page", "--json")
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    texts = (
        "Score relative to old",
        "Utilisation over the timed part",
        "<svg",
        *(title for _, title in server_comparison.PLACES),
    )
    assert [text for text in texts if text not in page] == [] and "http" not in page.replace("http://www.w3.org", "")
    assert sorted(path.name for path in (tmp_path / "page").glob("server-*")) == [
        "server-box.csv", "server-box.svg", "server-new.csv", "server-new.svg",
    ]  # fmt: skip
