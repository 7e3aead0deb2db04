"""What a run's machines wrote while it ran: step times of ranks, telemetry of nodes, goodput."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encore.results.logs import goodput, steps, telemetry
from encore.results.logs.run_log import read_run
from encore.results.logs.steps import Window
from encore.results.report.figures import steps_map
from encore.results.report.report import build_report, render
from tests.results.result_logs import START_MS, resnet_v07

START = START_MS / 1000


def line(time: float, waiting: float | None, **more: Any) -> dict[str, Any]:
    return {
        "time": time, "node": "n2", "local_rank": 1, "step": 10, "steps": 10, "window": 10.0, "median": 1.0, "p99": 2.0,
        "waiting": waiting, "input": 0.1, "cpu": 5.0, "delayed": 1.0, **more,
    }  # fmt: skip


def write(path: Path, records: list[dict[str, Any]], tail: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in records) + tail, encoding="utf-8")


def windows(*shares: list[float | None]) -> dict[int, list[Window]]:
    return {
        rank: [Window(rank=rank, **line(START + 10 * number, share)) for number, share in enumerate(of_rank, 1)]
        for rank, of_rank in enumerate(shares)
    }


@pytest.mark.parametrize(
    ("shares", "slow"),
    [
        (([0.4, 0.5], [0.0, 0.1]), 1),
        (([0.2, 0.2], [0.1, 0.1]), None),  # nearer than unharmed ranks come
        (([0.5], [0.4], [0.6], [0.02]), 3),
        (([0.5], [0.1], [0.9], [0.02]), None),  # ranks that differ anyway
        (([None], [None]), None),  # on GPUs
        (([0.5], []), None),  # one that has written nothing yet
        (([0.5],), None),
    ],
)
def test_the_rank_that_waits_least_is_the_slow_one(shares: tuple[list[float | None], ...], slow: int | None) -> None:
    found = steps.slow_rank(windows(*shares))
    assert (found.rank if found else None) == slow
    if found:
        assert str(found).startswith(f"rank {slow} is slow (n2, device 1): the others wait ")


def test_what_was_long_ago_names_no_rank_now() -> None:
    found = windows([0.5], [0.0])
    assert steps.slow_rank(found, START + 20) is not None
    assert steps.slow_rank(found, START + 500) is None


def test_step_lines_are_read_from_the_end_and_past_damage(tmp_path: Path) -> None:
    folder = tmp_path / steps.FOLDER
    write(folder / "rank_0.jsonl", [line(START + number, 0.5) for number in range(100)], '{"time": 1, "no')
    write(folder / "rank_11.jsonl", [line(START, 0.1, unknown=1), {"time": 1}])
    whole, recent = steps.windows_of(tmp_path), steps.windows_of(tmp_path, recent=True)
    assert [len(each) for each in whole.values()] == [100, 1]
    assert list(recent) == [0, 11] and 5 < len(recent[0]) < 100
    assert recent[0][-1] == whole[0][-1]


def test_a_heat_map_is_dark_where_the_others_waited() -> None:
    found = windows([0.5] * 6, [0.5, 0.5, 0.5, 0.0, 0.0, 0.0])
    late = steps.late_shares(found, [START, START + 30, START + 60])
    assert late == {0: [0.0, 0.0], 1: [0.0, pytest.approx(0.5)]}
    plot = steps_map(found, "result_0.txt")
    assert plot is not None and "rank 1 was waited for most" in plot.svg
    assert plot.svg.count("heat5") > 5 and plot.svg.count("heat0") > 20
    assert steps_map(windows([0.5]), "result_0.txt") is None


def reading(second: float, node: str, *watts: float) -> dict[str, Any]:
    return {"time": START + second, "node": node, "gpus": [{"power_watts": each} for each in watts]}


def experiment(tmp_path: Path, minutes: float = 10.0) -> Path:
    folder = tmp_path / "experiment_0"
    folder.mkdir()
    (folder / "result.txt").write_text(resnet_v07(minutes), encoding="utf-8")
    return folder


def test_energy_is_that_of_all_nodes_while_the_clock_ran(tmp_path: Path) -> None:
    folder = experiment(tmp_path, minutes=1.0)
    seconds = range(-5, 70)
    write(folder / "telemetry.jsonl", [reading(each, "n1", 100.0, 300.0) for each in seconds])
    write(folder / "telemetry.n2.jsonl", [reading(each, "n2", 200.0, 200.0) for each in seconds], '{"time": 17')
    run = read_run(folder / "result.txt")
    assert telemetry.gpu_kilojoules(run) == pytest.approx(800 * 60 / 1000)
    write(folder / "telemetry.n2.jsonl", [reading(each, "n2", 200.0, 200.0) for each in (*range(20), *range(50, 61))])
    assert telemetry.gpu_kilojoules(run) is None, "half a minute of one node is a guess"


def cards(second: float, node: str, *clocks: float, use: int = 99, throttle: int = 0) -> dict[str, Any]:
    gpus = [{"sm_mhz": each, "use_percent": use, "throttle": throttle if each < 1500 else 0} for each in clocks]
    return {"time": START + second, "node": node, "gpus": gpus}


def test_a_gpu_with_low_clocks_is_named_with_its_node_and_the_reason(tmp_path: Path) -> None:
    write(tmp_path / "telemetry.jsonl", [cards(each, "n1", 1980, 1965) for each in range(100)])
    second = tmp_path / "telemetry.n2.jsonl"
    write(second, [cards(each, "n2", 1950, 1410, throttle=0x44) for each in range(100)], '{"time": 17')
    found = telemetry.slow_gpu(tmp_path, START + 100)
    assert found == "GPU 1 of n2 is slow: 1410 MHz, the others 1965 (power cap, heat (hardware))"
    assert telemetry.slow_gpu(tmp_path, START + 500) == "", "long ago"
    write(second, [cards(each, "n2", 1950, 1800) for each in range(100)])
    assert telemetry.slow_gpu(tmp_path, START + 100) == "", "GPUs differ by as much"
    write(second, [cards(each, "n2", 1950, 210, use=0) for each in range(100)])
    assert telemetry.slow_gpu(tmp_path, START + 100) == "", "idle"
    write(second, [cards(each, "n2", 300) for each in range(100)])
    (tmp_path / "telemetry.jsonl").unlink()
    assert telemetry.slow_gpu(tmp_path, START + 100) == "", "one alone"


def test_no_power_is_no_energy(tmp_path: Path) -> None:
    folder = experiment(tmp_path)
    write(folder / "telemetry.jsonl", [{"time": START + 1, "gpus": []}, {"time": START + 2, "gpus": [{}]}])
    run = read_run(folder / "result.txt")
    assert telemetry.gpu_kilojoules(run) is None and list(telemetry.by_node(run)) == ["telemetry"]
    assert telemetry.by_node(replace(run, start_s=None)) == {}


def test_goodput_adds_up_to_the_wall_clock(tmp_path: Path) -> None:
    folder = experiment(tmp_path)
    plain = goodput.goodput_of(read_run(folder / "result.txt"))
    assert plain is not None and plain.parts["checkpoints"] == plain.parts["data stall"] == 0.0
    records: list[dict[str, Any]] = [
        {"kind": "start", "time": START, "resumed_step": 0},
        {"kind": "step", "time": START + 100, "step": 10},
        {"kind": "checkpoint", "time": START + 110, "step": 10, "seconds": 6.0},
        {"kind": "start", "time": START + 170, "resumed_step": 10},
        {"kind": "epoch", "time": START + 200, "input_share": 0.25},
        {"kind": "checkpoint", "time": START + 6000, "step": 90, "seconds": 50.0},  # off the clock
        {"kind": "checkpoint_written", "time": START + 6000, "step": 10, "seconds": 36.0},
    ]
    write(folder / "metrics.jsonl", records)
    state = {"started": "2020-06-20T16:07:08Z", "ended": "2020-06-20T16:19:08Z"}  # 60 s before and after
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    found = goodput.goodput_of(read_run(folder / "result.txt"))
    assert found is not None
    trained = plain.parts["training"] - 60 - 6
    parts = {"checkpoints": 6.0, "stopped or repeated": 60.0, "data stall": trained / 4, "training": trained * 3 / 4}
    assert {name: found.parts[name] for name in parts} == {k: pytest.approx(v, abs=0.01) for k, v in parts.items()}
    assert found.wall == pytest.approx(sum(found.parts.values())) == pytest.approx(720, abs=1)
    assert found.share == pytest.approx(found.parts["training"] / found.wall)
    assert found.parts["start"] > 59 and found.parts["end"] > 59
    table = goodput.table_of([read_run(folder / "result.txt")])
    assert table is not None and table.formats[goodput.WRITTEN] == ".1%"
    assert dict(zip(table.columns, table.rows[0], strict=True))[goodput.WRITTEN] == pytest.approx(0.05, abs=0.001)


def test_no_clock_has_no_goodput(tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    log.write_text("".join(resnet_v07().splitlines(keepends=True)[:5]), encoding="utf-8")
    assert goodput.goodput_of(read_run(log)) is None
    assert goodput.table_of([read_run(log)]) is None


def test_a_report_shows_goodput_and_the_ranks(tmp_path: Path) -> None:
    folder = experiment(tmp_path)
    for rank, share in enumerate((0.5, 0.1)):
        write(folder / "steps" / f"rank_{rank}.jsonl", [line(START + 10 * number, share) for number in range(1, 9)])
    write(folder / "metrics.jsonl", [])
    report = build_report([tmp_path])
    page, text = render(report, "report.html.j2"), render(report, "report.md.j2")
    assert "Ranks that others waited for, result.txt" in page and "### Goodput" in text
    assert "| 1 | n2 | 1 | 80 | 1.0000 | 2.0000 | 10.0% | 10.0% | 10.0% |" in text
