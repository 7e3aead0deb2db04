"""The text for node_exporter's textfile collector, the dashboard that shows it, and the report of a run's end."""

import http.server
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from encore import paths
from encore.machine import openmetrics, telemetry
from encore.run import notice

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


def experiment(tmp_path: Path) -> Path:
    folder = tmp_path / "20261126-run" / "experiment_0"
    (folder / "steps").mkdir(parents=True)
    step = {"kind": "step", "time": 1, "epoch": 2, "step": 40, "loss": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(step) + '\n{"kind": "eval"}\n{"kind": "st', encoding="utf-8")
    for rank, node in ((0, 'n"1'), (1, "n2")):
        line = {"node": node, "median": 0.25, "p99": 0.5, "waiting": None if rank else 0.125}
        (folder / "steps" / f"rank_{rank}.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    return folder


def test_metrics_of_a_node_its_gpus_its_ranks_and_the_run(tmp_path: Path) -> None:
    text = openmetrics.render(READING, experiment(tmp_path))
    labels = 'run="20261126-run",experiment="0",node="n\\"1"'
    for line in (
        f"encore_cpu_used_ratio{{{labels}}} 0.5",
        f"encore_cpu_stalled_seconds_total{{{labels}}} 1.5",
        f'encore_gpu_power_watts{{{labels},gpu="0"}} 700.5',
        f'encore_rank_step_seconds{{{labels},rank="0"}} 0.25',
        f'encore_rank_waiting_ratio{{{labels},rank="0"}} 0.125',
        f"encore_run_step{{{labels}}} 40",
        "# TYPE encore_network_sent_bytes counter",
    ):
        assert f"{line}\n" in text, line
    assert text.endswith("# EOF\n") and "io_stalled" not in text and 'gpu="1"' not in text and 'rank="1"' not in text
    named = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(named) == len(set(named))
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'\w+\{(?:\w+="(?:[^"\\]|\\.)*",?)+\} [\d.e+-]+', line) for line in samples)


def test_the_dashboard_shows_metrics_that_are_written() -> None:
    board = json.loads((paths.ROOT / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    shown = set(re.findall(r"encore_\w+", json.dumps(board["panels"])))
    tables = (openmetrics.OF_NODE, openmetrics.OF_GPU, openmetrics.OF_RANK, openmetrics.OF_RUN)
    written = {name + "_total" * (kind == "counter") for table in tables for _, name, kind, _, _ in table}
    assert shown <= written and len(shown) > 12
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_file_lasts_as_long_as_the_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = experiment(tmp_path)
    monkeypatch.delenv(openmetrics.VARIABLE, raising=False)
    openmetrics.Textfile(folder).write(READING)
    monkeypatch.setenv(openmetrics.VARIABLE, str(tmp_path))
    monkeypatch.setattr(telemetry, "INTERVAL_SECONDS", 0.02)
    path = tmp_path / "encore-20261126-run-experiment_0.prom"
    with telemetry.sampled(folder / "telemetry.jsonl"):
        end = threading.Event()
        while not path.exists():
            assert not end.wait(0.01)
        first = path.read_text(encoding="utf-8")
    assert "encore_cpu_used_ratio" in first and not path.exists()
    file = openmetrics.Textfile(folder)
    file.write(READING)
    path.unlink()
    file.write({**READING, "time": 101.0})
    assert not path.exists(), "no scrape comes within a second"
    file.write({**READING, "time": 100.0 + openmetrics.WRITTEN_SECONDS})
    assert path.exists()
    monkeypatch.setenv(openmetrics.VARIABLE, str(tmp_path / "none"))
    openmetrics.Textfile(folder).write(READING)


def test_the_end_of_a_run_is_reported_to_a_command_and_to_a_url(tmp_path: Path) -> None:
    got: list[Any] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if self.path == "/well" else 500)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert notice.send(f"{address}/well", {"exit_code": 0}) == "" and got == [{"exit_code": 0}]
        assert "500" in notice.send(f"{address}/ill", {})
        server.shutdown()
    assert notice.send(f"{address}/well", {})  # nobody listens any more
    assert "control characters" in notice.send("http://exa mple.org/x", {})
    assert notice.send(f"tee '{tmp_path}/the end.json'", {"run": "x"}) == ""
    assert json.loads((tmp_path / "the end.json").read_text(encoding="utf-8")) == {"run": "x"}
    assert notice.send(f"touch {tmp_path}/a;b", {}) == "" and (tmp_path / "a;b").exists(), "no shell runs it"
    assert "none/x" in notice.send(f"cat {tmp_path}/none/x", {})
    assert notice.send(f"{tmp_path}/none", {}) and notice.send("echo 'no end", {}) and notice.send(" ", {})
