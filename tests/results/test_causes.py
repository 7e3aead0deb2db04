"""Records of machines, and causes of slower runs in records that are edited as a faulty machine would write them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from encore.results.compare import causes, explain
from encore.results.compare.run_set import RunSet, first_step_seconds, load_run_sets
from encore.results.logs import goodput, steps, telemetry
from encore.results.logs.run_log import read_run
from encore.results.logs.steps import FOLDER, Window
from encore.results.report.figures import steps_map
from encore.results.report.report import build_report, render
from tests.results.result_logs import START_MS, mllog, resnet_v07, write_files

START = START_MS / 1000
SECONDS = 600


CARD = {"sm_mhz": 1980, "power_watts": 650.0, "throttle": 0, "nvlink_sent_kib": 1e6}
NODE = {"cpu_percent": 25.0, "cores": 16, "disk_read_bytes": 1e5, "network_sent_bytes": 1e6, "io_stall_us": 100.0}
COUNTERS = ("disk_read_bytes", "network_sent_bytes", "io_stall_us")
RANK = {"waiting": 0.1, "input": 0.01, "cpu": 120.0, "delayed": 1.0, "median": 1.0}


@dataclass
class Records:
    """Records of two nodes of two GPUs in ten minutes of training; ``seconds`` is the length of the run."""

    seconds: float = SECONDS
    gpus: Sequence[Sequence[dict[str, Any]]] = ((CARD, CARD), (CARD, CARD))
    node: dict[str, float] = field(default_factory=NODE.copy)
    rank: Sequence[dict[str, Any]] = (RANK,) * 4
    metrics: Sequence[dict[str, Any]] = ({"kind": "epoch", "time": START, "input_share": 0.01},)
    started: str = "2020-06-20T16:07:38Z"  # Half a minute before the clock


def write(folder: Path, records: Records) -> RunSet:
    write_files(folder / "experiment_0", {
        "result.txt": resnet_v07(records.seconds / 60),
        "metrics.jsonl": [*records.metrics],
        "state.json": {"started": records.started},
        **{
            f"telemetry{f'.n{number}' * number}.jsonl": [
                {
                    "time": START + second,
                    "node": f"n{number}",
                    **{name: value * (second if name in COUNTERS else 1) for name, value in records.node.items()},
                    "gpus": [{**card, "nvlink_sent_kib": card["nvlink_sent_kib"] * second} for card in cards],
                }
                for second in range(0, int(records.seconds), 5)
            ]
            for number, cards in enumerate(records.gpus)
        },
        **{
            f"{FOLDER}/rank_{rank}.jsonl": [
                {
                    "time": START + 60 * minute, "p99": 2.0, "node": f"n{rank // 2}", "local_rank": rank % 2,
                    "step": 60, "steps": 60, "window": 60.0, **values,
                }
                for minute in range(1, 10)
            ]
            for rank, values in enumerate(records.rank)
        },
    })  # fmt: skip
    return load_run_sets(folder / "experiment_0" / "result.txt")[0]


def slower(**changes: Any) -> Records:
    return Records(seconds=SECONDS * 1.5, **changes)


def gpus(first: dict[str, Any], rest: Mapping[str, Any] = {}) -> list[list[dict[str, Any]]]:
    card = {**CARD, **rest}
    return [[{**card, **first}, card], [card, card]]


def ranks(first: dict[str, Any], rest: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**RANK, **values} for values in (first, rest, rest, rest)]


UNSEEN = {"waiting": None}
EPOCH = {"kind": "epoch", "time": START + 1}
IDLE, BUSY = {"sm_mhz": 345, "use_percent": 0}, {"use_percent": 99}
# The first cause, if there is one
FAULTS: dict[str, tuple[Records, str | None]] = {
    "power cap everywhere": (slower(gpus=gpus({"throttle": 4}, {"throttle": 4, "sm_mhz": 1300})), "power cap"),
    "heat": (slower(gpus=gpus({"throttle": 0x40}, {"throttle": 0x40, "sm_mhz": 1300})), "heat (hardware)"),
    "heat by software": (slower(gpus=gpus({"throttle": 0x20}, {"throttle": 0x20})), "heat (software)"),
    "power brake": (slower(gpus=gpus({"throttle": 0x80}, {"throttle": 0x80})), "power brake"),
    "hardware slowdown": (slower(gpus=gpus({"throttle": 8}, {"throttle": 8})), "hardware slowdown"),
    "locked clocks": (slower(gpus=gpus({"sm_mhz": 1320}, {"sm_mhz": 1320})), "lower clocks"),
    "locked clocks next to a power limit of one": (
        slower(gpus=gpus({"sm_mhz": 1320, "throttle": 4}, {"sm_mhz": 1320})),
        "lower clocks",
    ),
    "one GPU with low clocks": (slower(gpus=gpus({"sm_mhz": 1300})), "slow rank"),
    "one rank that computes longer": (slower(rank=ranks({"waiting": 0.0}, {"waiting": 0.45})), "slow rank"),
    "one rank without a core": (
        slower(rank=ranks({"waiting": 0.0, "delayed": 25.0}, {"waiting": 0.45})),
        "slow rank",
    ),
    "other programs": (
        slower(node={**NODE, "cpu_percent": 75.0}, rank=ranks({"delayed": 25.0}, {"delayed": 25.0})),
        "other load",
    ),
    "other programs on all cores": (
        slower(node={**NODE, "cpu_percent": 100.0}, rank=ranks({"delayed": 90.0}, {"delayed": 90.0})),
        "other load",
    ),
    "a limit on cycles next to a few other programs": (
        slower(node={**NODE, "cpu_percent": 27.0}, rank=ranks({"delayed": 90.0}, {"delayed": 90.0})),
        "few cores",
    ),
    "a limit on cycles": (slower(rank=ranks({"delayed": 22.0}, {"delayed": 22.0})), "few cores"),
    "a slow link": (slower(rank=ranks({"waiting": 0.45}, {"waiting": 0.45})), "slow link"),
    "TCP": (
        slower(rank=ranks({"waiting": 0.45}, {"waiting": 0.45}), node={**NODE, "network_sent_bytes": 1e9}),
        "slow link",
    ),
    "TCP, where GPUs wait unseen": (
        slower(rank=ranks(UNSEEN, UNSEEN), node={**NODE, "network_sent_bytes": 1e9}),
        "slow link",
    ),
    "no NVLink, where GPUs wait unseen": (
        slower(rank=ranks(UNSEEN, UNSEEN), gpus=gpus({"nvlink_sent_kib": 0}, {"nvlink_sent_kib": 0})),
        "slow link",
    ),
    "a loader that is slow": (slower(metrics=[{**EPOCH, "input_share": 0.35}]), "data stall"),
    "a cold cache": (
        slower(metrics=[{**EPOCH, "input_share": 0.35}], node={**NODE, "disk_read_bytes": 2e8}),
        "cold or slow disk",
    ),
    "a slow disk": (
        slower(metrics=[{**EPOCH, "input_share": 0.35}], node={**NODE, "io_stall_us": 300_000.0}),
        "cold or slow disk",
    ),
    "checkpoints": (
        slower(
            metrics=[
                {**EPOCH, "input_share": 0.01},
                {"kind": "checkpoint", "time": START + 9, "step": 1, "seconds": 280.0},
            ]
        ),
        "checkpoints",
    ),
    "a pause": (
        slower(metrics=[{**EPOCH, "input_share": 0.01}, {"kind": "start", "time": START + 280, "resumed_step": 4}]),
        "stopped or repeated",
    ),
    "a slow start": (Records(started="2020-06-20T16:03:08Z"), "start"),
    "an idle GPU": (slower(gpus=gpus(IDLE, BUSY)), None),
    "an idle GPU next to a power cap": (slower(gpus=gpus(IDLE, {**BUSY, "throttle": 4, "sm_mhz": 1300})), "power cap"),
    # Runs that are not slower have no cause. On CPUs, which share cores with other programs, the margin is larger.
    **{
        f"{factor} times as long on {'GPUs' if any(cards) else 'CPUs'}": (
            Records(seconds=SECONDS * factor, gpus=cards, rank=ranks({"waiting": 0.0}, {"waiting": 0.3})),
            cause,
        )
        for factor, cards, cause in (
            (0.5, Records.gpus, None), (1.04, Records.gpus, None), (1.06, Records.gpus, "slow rank"),
            (1.14, ((),), None), (1.16, ((),), "slow rank"),
        )
    },
}  # fmt: skip


@pytest.fixture
def healthy(tmp_path: Path) -> RunSet:
    return write(tmp_path / "theirs", Records())


def test_cause_is_named_first(healthy: RunSet, tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    on_cpus = write(tmp_path / "CPUs", Records(gpus=((),)))
    ranked = {}
    for number, (fault, (records, _)) in enumerate(FAULTS.items()):
        found = causes.find_causes(write(tmp_path / str(number), records), healthy if any(records.gpus) else on_cpus)
        ranked[fault] = [astuple(cause) for cause in found]
    firsts = {fault: ranking[0][0] if ranking else None for fault, ranking in ranked.items()}
    assert firsts == {fault: name for fault, (_, name) in FAULTS.items()}
    assert causes.find_causes(write(tmp_path / "ours", slower()), replace(healthy, logs=())) == []
    recorded("causes.json", ranked)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("configuration.batch_size", 64, "other hyperparameters"),
        ("image", "nvcr.io/nvidia/pytorch:23.01", "another image or library"),
        ("environment.NCCL_IB_DISABLE", "1", "another image or library"),
        ("configuration.seed", 7, None),
        ("environment.HOME", "/tmp", None),
    ],
)
def test_setting_is_a_cause_if_no_record_is(
    healthy: RunSet, tmp_path: Path, name: str, value: object, expected: str | None
) -> None:
    sides = [write(tmp_path / "a", slower()), write(tmp_path / "b", FAULTS["one rank that computes longer"][0])]
    sides = [replace(side, settings={**side.settings, name: value}) for side in sides]
    unexplained, explained = ([cause.name for cause in causes.find_causes(side, healthy)] for side in sides)
    assert (unexplained[:1], explained[0]) == ([expected] if expected else [], "slow rank")


def test_cause_is_the_first_difference_and_means_of_runs_are_compared(healthy: RunSet, tmp_path: Path) -> None:
    ours = write(tmp_path / "ours", FAULTS["power cap everywhere"][0])
    both = replace(healthy, logs=(*healthy.logs, *write(tmp_path / "second", Records()).logs))
    text = "power cap: active in 100% of the GPU readings (baseline 0%): +47.1% of the baseline time"
    firsts = [explain.explain(ours, baseline).differences[0] for baseline in (healthy, both)]
    assert [(first.area, first.sentence) for first in firsts] == [("cause", text)] * 2


# --- records of one run -------------------------------------------------------------------------------------

Lines = list[dict[str, Any]]


def window(time: float, waiting: float | None, **values: Any) -> dict[str, Any]:
    return {
        "time": time, "node": "n2", "local_rank": 1, "step": 10, "steps": 10, "window": 10.0, "median": 1.0, "p99": 2.0,
        "waiting": waiting, "input": 0.1, "cpu": 5.0, "delayed": 1.0, **values,
    }  # fmt: skip


def windows(*waiting: list[float | None], seconds: float = 10.0, delayed: float = 1.0) -> dict[int, list[Window]]:
    values = {"window": seconds, "delayed": delayed}
    return {
        rank: [Window(rank=rank, **window(START + seconds * n, share, **values)) for n, share in enumerate(shares, 1)]
        for rank, shares in enumerate(waiting)
    }


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    # A log of ten minutes
    return write_files(tmp_path / "experiment_0", {"result.txt": resnet_v07(10.0)})


def test_time_to_the_first_step(tmp_path: Path) -> None:
    stream = [{"kind": "start", "time": START}, *({"kind": "step", "time": START + second} for second in (7.5, 9.0))]
    write_files(tmp_path, {"result_0.txt": resnet_v07(), "experiment_0/metrics.jsonl": stream})
    assert first_step_seconds(load_run_sets(tmp_path)[0]) == pytest.approx({"first_step_s": 7.5}, abs=0.1)


@pytest.mark.parametrize(
    ("waiting", "rank"),
    [
        (([0.4, 0.5], [0.0, 0.1]), 1),
        (([0.2, 0.2], [0.1, 0.1]), None),  # no larger than differences of healthy ranks
        (([0.5, 0.5], [0.0, 0.6]), None),  # rank 1 caught up
        (([0.5] * 2, [0.4] * 2, [0.6] * 2, [0.02] * 2), 3),
        (([0.5] * 2, [0.1] * 2, [0.9] * 2, [0.02] * 2), None),  # all ranks differ
        (([None] * 2, [None] * 2), None),  # on GPUs
        (([0.5, 0.5], []), None),  # one has not written a window
        (([0.5, 0.5],), None),
    ],
)
def test_slow_rank_waits_least(waiting: tuple[list[float | None], ...], rank: int | None) -> None:
    slow = steps.slow_rank(windows(*waiting, seconds=40.0))
    text = f"rank {rank} is slow (n2, device 1): the others wait "
    assert (slow and slow.rank, str(slow).startswith(text)) == (rank, rank is not None)
    assert steps.slow_rank(windows(*waiting, seconds=25.0)) is None  # less than a minute


def test_heat_map_and_slow_rank_of_a_time(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    shared_cores = steps.slow_rank(windows([0.5] * 2, [0.0] * 2, seconds=40.0, delayed=20.0))
    assert str(shared_cores) == "ranks share CPU cores: rank 1 had no core for 50% of its time"
    late = windows([0.5] * 6, [0.5, 0.5, 0.5, 0.0, 0.0, 0.0])
    assert steps.late_shares(late, [START, START + 30, START + 60]) == {0: [0.0, 0.0], 1: [0.0, pytest.approx(0.5)]}
    recorded("steps.svg", steps_map(late, "result_0.txt").svg)
    slow = windows([0.5] * 2, [0.0] * 2, seconds=40.0)
    is_past = [steps.slow_rank(slow, START + seconds) is None for seconds in (90, 500)]
    assert (steps_map(windows([0.5]), "result_0.txt"), is_past) == (None, [False, True])
    # Windows are read from the end, past damaged lines
    long = [*(window(START + number, 0.5) for number in range(100)), '{"time": 1, "no']
    short = [window(START, 0.1, unknown=1), {"time": 1}]
    write_files(tmp_path / FOLDER, {"rank_0.jsonl": long, "rank_11.jsonl": short})
    every, recent = steps.windows_of(tmp_path), steps.windows_of(tmp_path, recent=True)
    assert {rank: len(values) for rank, values in every.items()} == {0: 100, 11: 1}
    assert list(recent) == [0, 11] and 5 < len(recent[0]) < 100 and recent[0][-1] == every[0][-1]


def power(seconds: Any, node: str, *watts: float) -> Lines:
    return [{"time": START + s, "node": node, "gpus": [{"power_watts": value} for value in watts]} for s in seconds]


def test_gpu_energy_of_all_nodes(experiment: Path) -> None:
    seconds, run = range(-5, 610), read_run(experiment / "result.txt")
    first, second = power(seconds, "n1", 100.0, 300.0), [*power(seconds, "n2", 200.0, 200.0), '{"time": 17']
    # More than a tenth of the time of two nodes without readings
    gap = power((*range(20), *range(170, 601)), "n2", 200.0, 200.0)
    none = [{"time": START + 1, "gpus": []}, {"time": START + 2, "gpus": [{}]}]
    energies = []
    for lines in ((first, second), (first, gap), (none, [])):
        write_files(experiment, dict(zip(("telemetry.jsonl", "telemetry.n2.jsonl"), lines, strict=True)))
        energies.append(telemetry.gpu_kilojoules(run))
    assert energies == [pytest.approx(800 * 600 / 1000), None, None]
    assert ([*telemetry.by_node(run)], telemetry.by_node(replace(run, start_s=None))) == (["telemetry"], {})


def clocks(node: str, *mhz: float, use: int = 99, throttle: int = 0) -> Lines:
    gpus = [{"sm_mhz": clock, "use_percent": use, "throttle": throttle if clock < 1500 else 0} for clock in mhz]
    return [{"time": START + second, "node": node, "gpus": gpus} for second in range(100)]


@pytest.mark.parametrize(
    ("second", "age", "text"),
    [
        (
            clocks("n2", 1950, 1410, throttle=0x44),
            0,
            "GPU 1 of n2 is slow: 1410 MHz, the others 1965 (power cap, heat (hardware))",
        ),
        (clocks("n2", 1950, 1410, throttle=0x44), 400, ""),
        (clocks("n2", 1950, 1800), 0, ""),  # GPUs differ by as much
        (clocks("n2", 1950, 210, use=0), 0, ""),  # idle
    ],
)
def test_slow_gpu_is_named_with_its_node_and_reason(second: Lines, age: int, text: str, tmp_path: Path) -> None:
    readings = {"telemetry.jsonl": clocks("n1", 1980, 1965), "telemetry.n2.jsonl": [*second, '{"time": 17']}
    single = write_files(tmp_path / "single", {"telemetry.jsonl": clocks("n2", 300)})
    slow = [telemetry.slow_gpu(folder, START + 100 + age) for folder in (write_files(tmp_path, readings), single)]
    assert slow == [text, ""]


def test_goodput_adds_up_to_the_wall_clock(experiment: Path, recorded: Callable[[str, object], None]) -> None:
    run = read_run(experiment / "result.txt")
    plain = goodput.goodput_of(run)
    write_files(experiment, {
        "metrics.jsonl": [
            {"kind": "start", "time": START, "resumed_step": 0},
            {"kind": "step", "time": START + 100, "step": 10},
            {"kind": "checkpoint", "time": START + 110, "step": 10, "seconds": 6.0},
            {"kind": "start", "time": START + 170, "resumed_step": 10},
            {"kind": "epoch", "time": START + 200, "input_share": 0.25},
            {"kind": "checkpoint", "time": START + 6000, "step": 90, "seconds": 50.0},  # after run_stop
            {"kind": "checkpoint_written", "time": START + 6000, "step": 10, "seconds": 36.0},
        ],
        # A minute before and after the clock
        "state.json": {"started": "2020-06-20T16:07:08Z", "ended": "2020-06-20T16:19:08Z"},
    })  # fmt: skip
    result, table = goodput.goodput_of(run), goodput.table_of([run])
    assert result.wall == pytest.approx(sum(result.parts.values())) == pytest.approx(720, abs=1)
    recorded("goodput.json", [plain.parts, result.parts, result.share, table.columns, table.formats, *table.rows])
    unstarted = read_run(write_files(experiment.parent, {"unstarted.txt": mllog("seed", 1)}) / "unstarted.txt")
    assert (goodput.goodput_of(unstarted), goodput.table_of([unstarted])) == (None, None)


def test_report_has_goodput_and_ranks(experiment: Path, tmp_path: Path) -> None:
    steps = {
        f"steps/rank_{rank}.jsonl": [window(START + 10 * number, share) for number in range(1, 9)]
        for rank, share in enumerate((0.5, 0.1))
    }
    write_files(experiment, {**steps, "metrics.jsonl": ""})
    html, markdown = (render(build_report([tmp_path]), f"report.{form}.j2") for form in ("html", "md"))
    assert "Ranks that others waited for, result.txt" in html and "### Goodput" in markdown
    assert "| 1 | n2 | 1 | 80 | 1.0000 | 2.0000 | 10.0% | 10.0% | 10.0% |" in markdown
