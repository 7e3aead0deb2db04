"""Causes of slower runs, from the records of an unharmed run that are edited as a harmed machine would write them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from encore.results.compare import causes, explain
from encore.results.compare.sides import Side, load_sides
from encore.results.logs.steps import FOLDER
from tests.results.result_logs import START_MS, resnet_v07

START = START_MS / 1000
SECONDS = 600


@dataclass
class Records:
    """What two nodes of two GPUs wrote in ten minutes of training; ``seconds`` is the time of the whole."""

    seconds: float = SECONDS
    gpus: list[list[dict[str, Any]]] = field(
        default_factory=lambda: [
            [{"sm_mhz": 1980, "power_watts": 650.0, "throttle": 0, "nvlink_sent_kib": 1e6} for _ in range(2)]
            for _ in range(2)
        ]
    )
    node: dict[str, float] = field(
        default_factory=lambda: {
            "cpu_percent": 25.0, "cores": 16, "disk_read_bytes": 1e5, "network_sent_bytes": 1e6, "io_stall_us": 100.0,
        }
    )  # fmt: skip
    rank: list[dict[str, float | None]] = field(
        default_factory=lambda: [
            {"waiting": 0.1, "input": 0.01, "cpu": 120.0, "delayed": 1.0, "median": 1.0} for _ in range(4)
        ]
    )
    metrics: list[dict[str, Any]] = field(
        default_factory=lambda: [{"kind": "epoch", "time": START, "input_share": 0.01}]
    )
    started: str = "2020-06-20T16:07:38Z"  # Half a minute before the clock


def write(folder: Path, records: Records) -> Side:
    experiment = folder / "experiment_0"
    (experiment / FOLDER).mkdir(parents=True)
    (experiment / "result.txt").write_text(resnet_v07(records.seconds / 60), encoding="utf-8")
    counters = ("disk_read_bytes", "network_sent_bytes", "io_stall_us")
    for number, cards in enumerate(records.gpus):
        lines = []
        for second in range(0, int(records.seconds), 5):
            host = {name: value * second if name in counters else value for name, value in records.node.items()}
            sent = [{**card, "nvlink_sent_kib": card["nvlink_sent_kib"] * second} for card in cards]
            lines.append(json.dumps({"time": START + second, "node": f"n{number}", **host, "gpus": sent}))
        name = "telemetry.jsonl" if number == 0 else f"telemetry.n{number}.jsonl"
        (experiment / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    for rank, given in enumerate(records.rank):
        place = {"node": f"n{rank // 2}", "local_rank": rank % 2, "step": 60, "steps": 60, "window": 60.0, "p99": 2.0}
        lines = [json.dumps({"time": START + 60 * minute, **place, **given}) for minute in range(1, 10)]
        (experiment / FOLDER / f"rank_{rank}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = "".join(json.dumps(each) + "\n" for each in records.metrics)
    (experiment / "metrics.jsonl").write_text(text, encoding="utf-8")
    (experiment / "state.json").write_text(json.dumps({"started": records.started}), encoding="utf-8")
    (side,) = load_sides(experiment / "result.txt")
    return side


def harmed(**changes: Any) -> Records:
    return replace(Records(), seconds=SECONDS * 1.5, **changes)


def gpus(first: dict[str, Any], others: dict[str, Any] | None = None) -> list[list[dict[str, Any]]]:
    cards = Records().gpus
    found = [{**card, **(others or {})} for node in cards for card in node]
    found[0] = {**found[0], **first}
    return [found[:2], found[2:]]


def ranks(first: dict[str, Any], others: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**each, **(others if number else first)} for number, each in enumerate(Records().rank)]


def node(**changes: float) -> dict[str, float]:
    return {**Records().node, **changes}


UNSEEN = {"waiting": None}
EPOCH = {"kind": "epoch", "time": START + 1}
HARMS: dict[str, tuple[Records, str]] = {
    "power cap everywhere": (harmed(gpus=gpus({"throttle": 4}, {"throttle": 4, "sm_mhz": 1300})), "power cap"),
    "heat": (harmed(gpus=gpus({"throttle": 0x40}, {"throttle": 0x40, "sm_mhz": 1300})), "heat (hardware)"),
    "heat by software": (harmed(gpus=gpus({"throttle": 0x20}, {"throttle": 0x20})), "heat (software)"),
    "power brake": (harmed(gpus=gpus({"throttle": 0x80}, {"throttle": 0x80})), "power brake"),
    "hardware slowdown": (harmed(gpus=gpus({"throttle": 8}, {"throttle": 8})), "hardware slowdown"),
    "locked clocks": (harmed(gpus=gpus({"sm_mhz": 1320}, {"sm_mhz": 1320})), "lower clocks"),
    "locked clocks next to a power limit of one": (
        harmed(gpus=gpus({"sm_mhz": 1320, "throttle": 4}, {"sm_mhz": 1320})),
        "lower clocks",
    ),
    "one GPU with low clocks": (harmed(gpus=gpus({"sm_mhz": 1300})), "slow rank"),
    "one rank that computes longer": (harmed(rank=ranks({"waiting": 0.0}, {"waiting": 0.45})), "slow rank"),
    "one rank without a core": (
        harmed(rank=ranks({"waiting": 0.0, "delayed": 25.0}, {"waiting": 0.45})),
        "slow rank",
    ),
    "other programs": (
        harmed(node=node(cpu_percent=75.0), rank=ranks({"delayed": 25.0}, {"delayed": 25.0})),
        "other load",
    ),
    "other programs on all cores": (
        harmed(node=node(cpu_percent=100.0), rank=ranks({"delayed": 90.0}, {"delayed": 90.0})),
        "other load",
    ),
    "a limit on cycles next to a few other programs": (
        harmed(node=node(cpu_percent=27.0), rank=ranks({"delayed": 90.0}, {"delayed": 90.0})),
        "few cores",
    ),
    "a limit on cycles": (harmed(rank=ranks({"delayed": 22.0}, {"delayed": 22.0})), "few cores"),
    "a slow link": (harmed(rank=ranks({"waiting": 0.45}, {"waiting": 0.45})), "slow link"),
    "TCP": (
        harmed(rank=ranks({"waiting": 0.45}, {"waiting": 0.45}), node=node(network_sent_bytes=1e9)),
        "slow link",
    ),
    "TCP, where GPUs wait unseen": (
        harmed(rank=ranks(UNSEEN, UNSEEN), node=node(network_sent_bytes=1e9)),
        "slow link",
    ),
    "no NVLink, where GPUs wait unseen": (
        harmed(rank=ranks(UNSEEN, UNSEEN), gpus=gpus({"nvlink_sent_kib": 0}, {"nvlink_sent_kib": 0})),
        "slow link",
    ),
    "a loader that is slow": (harmed(metrics=[{**EPOCH, "input_share": 0.35}]), "data stall"),
    "a cold cache": (
        harmed(metrics=[{**EPOCH, "input_share": 0.35}], node=node(disk_read_bytes=2e8)),
        "cold or slow disk",
    ),
    "a slow disk": (
        harmed(metrics=[{**EPOCH, "input_share": 0.35}], node=node(io_stall_us=300_000.0)),
        "cold or slow disk",
    ),
    "checkpoints": (
        harmed(metrics=[*Records().metrics, {"kind": "checkpoint", "time": START + 9, "step": 1, "seconds": 280.0}]),
        "checkpoints",
    ),
    "a pause": (
        harmed(metrics=[*Records().metrics, {"kind": "start", "time": START + 280, "resumed_step": 4}]),
        "stopped or repeated",
    ),
    "a slow start": (replace(Records(), started="2020-06-20T16:03:08Z"), "start"),
}


@pytest.fixture
def unharmed(tmp_path: Path) -> Side:
    return write(tmp_path / "theirs", Records())


@pytest.mark.parametrize("name", HARMS)
def test_the_cause_is_named_first(unharmed: Side, tmp_path: Path, name: str) -> None:
    records, expected = HARMS[name]
    found = causes.causes_of(write(tmp_path / "ours", records), unharmed)
    assert found and found[0].name == expected, found
    assert 0.3 < found[0].share < 0.6 and found[0].sentence


def test_what_is_not_slower_has_no_cause(unharmed: Side, tmp_path: Path) -> None:
    for number, records in enumerate((Records(), Records(seconds=SECONDS * 1.04), Records(seconds=SECONDS * 0.5))):
        changed = replace(records, rank=ranks({"waiting": 0.0}, {"waiting": 0.3}))
        assert causes.causes_of(write(tmp_path / str(number), changed), unharmed) == []
    assert causes.causes_of(unharmed, replace(unharmed, logs=())) == []


def setting(name: str, value: object) -> Callable[[Side], Side]:
    return lambda side: replace(side, settings={**side.settings, name: value})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (setting("configuration.batch_size", 64), "other hyperparameters"),
        (setting("image", "nvcr.io/nvidia/pytorch:23.01"), "another image or library"),
        (setting("environment.NCCL_IB_DISABLE", "1"), "another image or library"),
        (setting("configuration.seed", 7), None),
        (setting("environment.HOME", "/tmp"), None),
    ],
)
def test_a_setting_explains_steps_that_nothing_else_does(
    unharmed: Side, tmp_path: Path, change: Callable[[Side], Side], expected: str | None
) -> None:
    found = causes.causes_of(change(write(tmp_path / "ours", harmed())), unharmed)
    assert (found[0].name if found else None) == expected
    # A slow rank that explains all of it comes before a setting that might.
    slow = write(tmp_path / "slow", harmed(rank=ranks({"waiting": 0.0}, {"waiting": 0.45})))
    assert causes.causes_of(change(slow), unharmed)[0].name == "slow rank"


def test_gpus_that_computed_nothing_are_no_evidence(unharmed: Side, tmp_path: Path) -> None:
    idle = {"sm_mhz": 345, "use_percent": 0}
    ours = write(tmp_path / "ours", harmed(gpus=gpus(idle, {"use_percent": 99})))
    assert causes.causes_of(ours, unharmed) == []
    throttled = harmed(gpus=gpus(idle, {"use_percent": 99, "throttle": 4, "sm_mhz": 1300}))
    assert causes.causes_of(write(tmp_path / "throttled", throttled), unharmed)[0].name == "power cap"


def test_causes_come_first_among_the_differences(unharmed: Side, tmp_path: Path) -> None:
    ours = write(tmp_path / "ours", HARMS["power cap everywhere"][0])
    first = explain.explain(ours, unharmed).differences[0]
    assert (first.area, first.name) == ("cause", "power cap")
    assert first.sentence == (
        "power cap: GPUs were slowed by it in 100% of the readings, theirs in 0%: +47.1% of their time"
    )


def test_the_mean_of_several_runs_is_compared(unharmed: Side, tmp_path: Path) -> None:
    second = write(tmp_path / "second", Records())
    both = replace(unharmed, logs=(*unharmed.logs, *second.logs))
    ours = write(tmp_path / "ours", HARMS["a slow link"][0])
    assert causes.causes_of(ours, both)[0] == causes.causes_of(ours, unharmed)[0]
