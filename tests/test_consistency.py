"""Forgeries of a run folder before it is signed: files that contradict each other, and what cannot be detected."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from encore.lab.submissions.consistency import contradictions
from encore.run.run_folder import checksum
from tests.results.result_logs import mllog

START, SECONDS = 1_760_000_000.0, 900
Record = dict[str, Any]


def metrics() -> list[Record]:
    start = {"kind": "start", "time": START, "ranks": 2, "global_batch_size": 64, "batch_unit": "samples"}
    records: list[Record] = [{**start, "resumed_step": 0}]
    for number, quality in enumerate((0.5, 0.7, 0.76), 1):
        end = START + 300 * number
        records += [{"kind": "step", "time": end - 240 + 60 * n, "step": 5 * number - 4 + n} for n in range(4)]
        records.append({"kind": "eval", "time": end, "epoch": 4 * number, "qualities": {"accuracy": quality}})
    return [*records, {"kind": "end", "time": START + SECONDS + 1, "outcome": "reached"}]


def log() -> list[Record]:
    texts = {"submission_benchmark": "resnet", "submission_division": "closed", "seed": 7, "global_batch_size": 64}
    events = [{"key": key, "time": START - 1, "value": value} for key, value in texts.items()]
    events.append({"key": "run_start", "time": START, "value": None})
    for number, quality in enumerate((0.5, 0.7, 0.76), 1):
        end, epoch = START + 300 * number, 4 * number
        events.append({"key": "eval_start", "time": end - 30, "value": None, "epoch_num": epoch})
        events.append({"key": "eval_accuracy", "time": end, "value": quality, "epoch_num": epoch})
    return [*events, {"key": "run_stop", "time": START + SECONDS + 1, "value": None, "status": "success"}]


def passport() -> Record:
    config = {"batch_size": 32, "device": "cpu"}
    return {
        "round": "v0.7", "nodes": 1, "ranks_per_node": 2, "seeds": [7], "implementation": "x", "data": {},
        "configuration": {key: {"value": value} for key, value in config.items()},
        "node": {"cpu": "CPU", "sockets": 1, "cores": 2, "memory_gib": 8, "operating_system": "Linux", "gpus": []},
    }  # fmt: skip


@dataclass
class Run:
    """The files of a run, which a forgery changes before they are written."""

    log: list[Record] = field(default_factory=log)
    metrics: list[Record] = field(default_factory=metrics)
    steps: list[Record] = field(
        default_factory=lambda: [
            {"time": START + 60 * n, "step": n, "window": 60.0, "median": 50.0} for n in range(1, 16)
        ]
    )
    telemetry: list[Record] = field(default_factory=lambda: [{"time": START - 20 + 5 * n} for n in range(186)])
    passport: Record = field(default_factory=passport)
    config: Record = field(default_factory=lambda: {"batch_size": 32, "device": "cpu", "seed": 7})
    ended: float = START + SECONDS + 5

    def events(self, key: str) -> list[Record]:
        return [event for event in self.log if event["key"] == key]

    def records(self, kind: str) -> list[Record]:
        return [record for record in self.metrics if record["kind"] == kind]

    def stop(self, seconds: float) -> None:
        # The number in the log, and the one in metrics.jsonl
        self.events("run_stop")[0]["time"] = self.records("end")[0]["time"] = START + seconds

    def write(self, folder: Path) -> None:
        place = folder / "experiment_0"
        (place / "steps").mkdir(parents=True)
        text = "".join(
            mllog(each["key"], each["value"], round(each["time"] * 1000), **{
                key: value for key, value in each.items() if key not in ("key", "value", "time")
            })
            for each in self.log
        )  # fmt: skip
        for path in (folder / "result_0.txt", place / "result.txt"):
            path.write_text(text)
        lists = {"metrics.jsonl": self.metrics, "steps/rank_0.jsonl": self.steps, "telemetry.jsonl": self.telemetry}
        for name, records in lists.items():
            (place / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        state = {"status": "reached", "started": utc(START - 30), "ended": utc(self.ended)}
        system = {
            "number_of_nodes": str(self.passport["nodes"]), "host_processor_model_name": "CPU",
            "host_processors_per_node": "1", "host_processor_vcpu_count": "2", "host_memory_capacity": "8 GiB",
            "accelerators_per_node": "0", "accelerator_model_name": "", "accelerator_memory_capacity": "",
            "framework": "x", "operating_system": "Linux",
        }  # fmt: skip
        signed = {**self.passport, "sha256": checksum(self.passport)}
        files = {"run.json": signed, "system.json": system, "experiment_0/state.json": state}
        for name, content in {**files, "experiment_0/config.json": self.config}.items():
            (folder / name).write_text(json.dumps(content))


def utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def scale(*lists: list[Record]) -> None:
    # Tenfold faster after the start
    for record in (record for records in lists for record in records):
        if record["time"] > START:
            record["time"] = START + (record["time"] - START) / 10
            for key in record.keys() & {"window", "median"}:
                record[key] /= 10


def scaled_to_the_end(run: Run, *, is_telemetry_cut: bool) -> None:
    scale(run.log, run.metrics, run.steps)
    run.ended = START + 95
    if is_telemetry_cut:
        run.telemetry = [reading for reading in run.telemetry if reading["time"] <= run.ended]


def remove_evaluation(run: Run) -> None:
    run.log.remove(run.events("eval_accuracy")[0])
    run.metrics.remove(run.records("eval")[0])


def change_batch(run: Run) -> None:
    run.config["batch_size"] = run.passport["configuration"]["batch_size"]["value"] = 16


DETECTED: dict[str, Callable[[Run], object]] = {
    "run_stop earlier": lambda run: run.stop(90),
    "run_stop later": lambda run: run.stop(1300),
    "run_start later": lambda run: run.events("run_start")[0].update(time=START + 200),
    "clocks of the log scaled": lambda run: (scale(run.log), run.records("end")[0].update(time=START + 90.1)),
    "metrics and log scaled": lambda run: scale(run.log, run.metrics),
    "metrics, log and steps scaled": lambda run: scale(run.log, run.metrics, run.steps),
    "everything but telemetry scaled": lambda run: scaled_to_the_end(run, is_telemetry_cut=False),
    "exit of the ranks earlier": lambda run: setattr(run, "ended", START + 300),
    "quality raised": lambda run: run.events("eval_accuracy")[2].update(value=0.79),
    "quality not finite": lambda run: run.records("eval")[0].update(qualities={"accuracy": math.nan}),
    "time not finite": lambda run: run.records("end")[0].update(time=math.inf),
    "evaluation removed": remove_evaluation,
    "epochs renumbered": lambda run: run.events("eval_accuracy")[2].update(epoch_num=9),
    "global batch of the log": lambda run: run.events("global_batch_size")[0].update(value=128),
    "batch of run.json and config.json": change_batch,
    "ranks": lambda run: run.passport.update(ranks_per_node=4),
    "seed": lambda run: run.events("seed")[0].update(value=8),
    "step times scaled": lambda run: [step.update(window=step["window"] / 10) for step in run.steps],
    "telemetry removed": lambda run: run.telemetry.clear(),
    "telemetry cut": lambda run: run.telemetry.__delitem__(slice(60, 120)),
}
# docs/report.md has the reasons
NOT_DETECTED: dict[str, Callable[[Run], object]] = {
    "every file scaled": lambda run: scaled_to_the_end(run, is_telemetry_cut=True),
    "quality raised in both files": lambda run: (
        run.events("eval_accuracy")[2].update(value=0.79),
        run.records("eval")[2].update(qualities={"accuracy": 0.79}),
    ),
    "evaluation with its start removed": lambda run: (
        run.log.remove(run.events("eval_start")[0]),
        remove_evaluation(run),
    ),
}


@pytest.mark.parametrize("forgery", DETECTED)
def test_forgery_contradicts_another_file(forgery: str, tmp_path: Path) -> None:
    run = Run()
    DETECTED[forgery](run)
    run.write(tmp_path)
    assert list(contradictions(tmp_path))


@pytest.mark.parametrize("forgery", [None, *NOT_DETECTED])
def test_consistent_files_do_not_contradict(forgery: str | None, tmp_path: Path) -> None:
    run = Run()
    if forgery:
        NOT_DETECTED[forgery](run)
    run.write(tmp_path)
    assert list(contradictions(tmp_path)) == []
