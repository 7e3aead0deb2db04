"""OpenMetrics text for node_exporter, its Grafana dashboard, and the notice at the end of a run."""

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from encore import files, paths
from encore.cli.run import notify_end
from encore.machine import openmetrics, telemetry
from tests.results.result_logs import write_files
from tests.trainings import held_port, wait_until

READING: dict[str, Any] = {
    "time": 100.0, "node": 'n"1', "cpu_percent": 50.0, "memory_used_mib": 2, "disk_read_bytes": 7,
    "disk_write_bytes": 8, "network_received_bytes": 9, "network_sent_bytes": 10,
    "cpu_stall_us": 1_500_000, "io_stall_us": None,
    "gpus": [
        {"use_percent": 99, "memory_mib": 1, "sm_mhz": 1980, "power_watts": 700.5, "temperature_celsius": 60,
         "throttle": 4, "ecc_uncorrected": 0, "nvlink_sent_kib": 1},
        {"power_watts": None},
    ],
}  # fmt: skip


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    window = {"median": 0.25, "p99": 0.5}
    return write_files(tmp_path / "20261126-run" / "experiment_0", {
        "metrics.jsonl":
            '{"kind": "step", "time": 1, "epoch": 2, "step": 40, "loss": 0.5}\n{"kind": "eval"}\n{"kind": "st',
        "steps/rank_0.jsonl": [{"node": 'n"1', **window, "waiting": 0.125}],
        "steps/rank_1.jsonl": [{"node": "n2", **window, "waiting": None}],
    })  # fmt: skip


def test_metrics_match_the_golden_file(experiment: Path, recorded: Callable[[str, Any], None]) -> None:
    # Without samples of the values None: the stall of I/O, the second GPU's power and the waiting time of rank 1
    recorded("openmetrics.txt", openmetrics.render(READING, experiment))


def test_dashboard_shows_existing_metrics() -> None:
    panels = files.read_json(paths.ROOT / "docs" / "grafana-dashboard.json")["panels"]
    shown = set(re.findall(r"encore_\w+", json.dumps(panels)))
    tables = (openmetrics.OF_NODE, openmetrics.OF_GPU, openmetrics.OF_RANK, openmetrics.OF_RUN)
    metrics = {name + "_total" * (kind == "counter") for table in tables for _, name, kind, _, _ in table}
    assert shown <= metrics and len(shown) > 12 and len({panel["id"] for panel in panels}) == len(panels)


def test_file_exists_while_telemetry_is_sampled(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "INTERVAL_SECONDS", 0.02)
    path = tmp_path / "encore-20261126-run-experiment_0.prom"
    for folder in ("", tmp_path / "none", tmp_path):
        monkeypatch.setenv(openmetrics.VARIABLE, str(folder))
        openmetrics.Textfile(experiment).write(READING)
    with telemetry.sample_nodes(experiment / "telemetry.jsonl"):
        wait_until(path.exists, "the first text file")
        assert "encore_cpu_used_ratio" in path.read_text(encoding="utf-8")
    assert not path.exists()
    file = openmetrics.Textfile(experiment)
    for seconds, is_due in ((0.0, True), (1.0, False), (openmetrics.WRITTEN_SECONDS, True)):  # interval of scrapes
        path.unlink(missing_ok=True)
        file.write({**READING, "time": 100.0 + seconds})
        assert path.exists() is is_due


@pytest.fixture
def hook() -> Iterator[tuple[str, list[Any]]]:
    # An HTTP server that answers 200 to /ok and 500 to other paths; its address and the received JSON
    received: list[Any] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if self.path == "/ok" else 500)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


def test_notice_is_posted_to_a_url(hook: tuple[str, list[Any]]) -> None:
    address, received = hook
    assert notify_end(f"{address}/ok", {"exit_code": 0}) == "" and received == [{"exit_code": 0}]
    with held_port() as unused:  # bound, but without a server
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}/ok"
        for url, problem in ((f"{address}/error", "500"), ("http://a b/", "not a valid URL"), (closed, "refused")):
            assert problem in notify_end(url, {})


def test_notice_is_passed_to_a_command(tmp_path: Path) -> None:
    assert notify_end(f"tee '{tmp_path}/the end.json'", {"run": "x"}) == ""
    assert json.loads((tmp_path / "the end.json").read_text(encoding="utf-8")) == {"run": "x"}
    assert notify_end(f"touch {tmp_path}/a;b", {}) == "" and (tmp_path / "a;b").exists(), "no shell runs it"
    assert "none/x" in notify_end(f"cat {tmp_path}/none/x", {})
    assert all(notify_end(command, {}) for command in (f"{tmp_path}/none", "echo 'no end", " "))
