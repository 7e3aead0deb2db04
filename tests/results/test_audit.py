"""The audit: each rule reports a log that was made for it, and no honest log that is close to it."""

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encore.results import findings as rates
from encore.results.audit.audit import RULES, Audit, audit_path
from encore.results.audit.logs import clock_backwards, faster_than_stated
from encore.results.audit.plausibility import peak_rate
from encore.results.compare.run_set import digests
from encore.results.logs.run_log import Phase, RunLog, Stated
from tests.command_line import run_encore
from tests.results.result_logs import START_MS, mll, mllog, resnet_v07, write_files, write_set

HOUR = 3_600_000
# Rules in test_scores.py
DECLARATIONS = {rule.name for rule in RULES if rule.name.startswith("declared_")} | {
    "missing_config",
    "unreadable_profile",
}
Files = dict[str, str]
Event = dict[str, Any]


def parse(text: str) -> list[Event]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in text.splitlines()]


def write_events(events: list[Event]) -> str:
    return "".join(f":::MLLOG {json.dumps(event)}\n" for event in events)


def retimed(text: str, time_ms: Callable[[float, str], float]) -> str:
    # ``time_ms`` gets the time and the key of an event
    return write_events([{**event, "time_ms": round(time_ms(event["time_ms"], event["key"]))} for event in parse(text)])


def edit(text: str, key: str, value: Callable[[Any], object] = lambda same: same, **metadata: object) -> str:
    return write_events([
        {**event, "value": value(event["value"]), "metadata": {**event["metadata"], **metadata}}
        if event["key"] == key
        else event
        for event in parse(text)
    ])  # fmt: skip


def genuine(
    number: int, minutes: float = 40.0, curve: int | None = None, start: int | None = None, **values: object
) -> str:
    # A log as a training writes it: with its own seed, curve and times
    noise = random.Random(number if curve is None else curve)
    quality = (*(round(0.1 + 0.09 * step + noise.uniform(-0.01, 0.01), 5) for step in range(7)), 0.7605)
    start = START_MS + number * 3 * HOUR + 137 * number if start is None else start
    text = resnet_v07(minutes + 0.3 * number, quality=quality, start_ms=start, seed=1000 + number, **values)
    return retimed(text, lambda t, _: t + 2000 * (math.sin((t - start) / 50_000 + number) - math.sin(number)))


def files(*texts: str) -> Files:
    return {f"result_{number}.txt": text for number, text in enumerate(texts)}


def honest() -> Files:
    return files(*(genuine(number) for number in range(5)))


def last(text: str) -> Files:
    return {**honest(), "result_4.txt": text}


def every(change: Callable[[str], str]) -> Files:
    return files(*map(change, honest().values()))


def renamed(old: str, new: str) -> Files:
    return {new if name == old else name: text for name, text in honest().items()}


def later(seconds: float, *keys: str) -> Callable[[str], str]:
    return lambda text: retimed(text, lambda t, key: t + seconds * 1000 if key in keys else t)


def times(text: str, key: str) -> list[int]:
    return [event["time_ms"] for event in parse(text) if event["key"] == key]


def ending(text: str, ms: float, since: str = "run_start") -> str:
    # run_stop that many milliseconds after the last event of a key
    return retimed(text, lambda t, key: times(text, since)[-1] + ms if key == "run_stop" else t)


def one_back(text: str, seconds: float) -> str:
    fourth = times(text, "epoch_stop")[3]
    return retimed(text, lambda t, key: t - 1000 * seconds if (key, t) == ("epoch_stop", fourth) else t)


def scale_quality(text: str, factor: float) -> str:
    return edit(text, "eval_accuracy", lambda value: value * factor)


def epochs_from(first: int) -> Callable[[str], str]:
    # Epochs numbered from ``first``, one for each block
    shift = {"epoch_num": lambda number: number // 4, "first_epoch_num": lambda number: number}
    return lambda text: write_events([
        {**event, "metadata": {
            key: shift[key](value) + first - 1 if key in shift else value for key, value in event["metadata"].items()
        }}
        for event in parse(text)
    ])  # fmt: skip


def short_first(seconds: float) -> Callable[[str], str]:
    # Takes that many seconds from the time up to the first evaluation
    return lambda text: retimed(text, lambda t, _: t + 1000 * seconds * (t < times(text, "eval_start")[0]))


def duplicate(key: str, seconds: float, **metadata: object) -> str:
    line = next(line for line in genuine(4).splitlines(keepends=True) if f'"{key}"' in line)
    return genuine(4).replace(line, line + mllog(key, None, parse(line)[0]["time_ms"] + seconds * 1000, **metadata))


ROUND = START_MS - START_MS % 100_000


def public_set(
    change: Callable[[float], float] = lambda minutes: minutes, evenly: bool = False, platform: str = "1xNF5488"
) -> Files:
    # Times and qualities of the runs of a public set, the times changed
    side = next(side for side in digests("v0.7") if side.label == "v0.7/Inspur/nf5488_mxnet")

    def text_of(number: int) -> str:
        minutes, qualities = change(side.minutes[number]), side.curves[number].values["value"]
        start, edges = START_MS + number * HOUR, [0.0, *map(change, side.curves[number].minutes)]
        evenly_ms = [minutes * 60_000 / len(qualities) * step for step in range(len(edges))]
        values = {"seed": number, "submission_platform": platform}
        return retimed(
            resnet_v07(minutes, quality=qualities, start_ms=start, **values),
            lambda t, key: (
                t
                if evenly or key in ("run_start", "run_stop") or t <= start
                else start + 60_000 * float(np.interp(t - start, evenly_ms, edges))
            ),
        )

    return files(*map(text_of, range(len(side.minutes))))


def without_middle(text: str) -> str:
    # Without three of the evaluations, and without the time they took
    lines, (begin, end) = text.splitlines(keepends=True), times(text, "block_start")[3:7:3]
    blocks = [number for number, line in enumerate(lines) if "block_start" in line]
    return retimed("".join(lines[: blocks[3]] + lines[blocks[6] :]), lambda t, _: t - (end - begin) * (t >= end))


IMAGES = 1_281_167


def stating(number: int, factor: float = 1.0, speeds_of: int | None = None, step_time: bool = False) -> str:
    # A log that states its speed at each epoch_stop, ``factor`` times as fast as its clock or that of another log
    clock = genuine(number if speeds_of is None else speeds_of)
    spans = zip(times(clock, "epoch_start"), times(clock, "epoch_stop"), strict=True)
    speeds = iter([factor * 4000 * IMAGES / (end - begin) for begin, end in spans])
    text = ""
    for event in parse(genuine(number)):
        if event["key"] == "epoch_stop":
            value = {"train_step_time": 1664 / next(speeds)} if step_time else {"throughput": next(speeds)}
            text += mllog("tracked_stats", value, event["time_ms"])
        text += write_events([event])
    return text


def evaluated_after(first: int, text: str) -> str:
    # Without eval_start, and without the evaluations of the first blocks
    return write_events([
        event for event in parse(text)
        if not event["key"].startswith("eval_")
        or (event["key"] == "eval_accuracy" and event["metadata"]["epoch_num"] > 4 * first)
    ])  # fmt: skip


# With a case in test_speed_is_compared_with_peak_rate_and_public_sets, and in
# test_number_of_accelerators_is_compared_with_other_places
ELSEWHERE = {"above_peak", "above_published", "below_published"} | {
    "contradicted_system",
    "copy_of_another_set",
    "altered_copy_of_another_set",
}
KINDS = ("reported", "honest")
# By rule: a set that it reports, and one that it does not
CASES: dict[str, tuple[Callable[[], Files], Callable[[], Files]]] = {
    "late_start": (lambda: every(later(600, "run_start")), lambda: every(later(0.5, "run_start"))),
    "missing_epochs": (lambda: every(epochs_from(5)), lambda: every(epochs_from(1))),
    "fast_beginning": (lambda: every(short_first(200)), lambda: every(short_first(-200))),
    "fast_middle": (lambda: every(without_middle), honest),
    "faster_than_stated": (lambda: last(stating(4, 0.9)), lambda: last(stating(4, 0.98))),
    "slower_than_stated": (lambda: last(stating(4, 2.0)), lambda: last(stating(4, 1.5))),
    "equal_statements": (
        lambda: files(*(stating(n) for n in range(4)), stating(4, speeds_of=0)),
        lambda: files(*(stating(n) for n in range(5))),
    ),
    "similar_curves": (
        lambda: last(scale_quality(genuine(4, curve=0), 1.001)),
        lambda: last(scale_quality(genuine(4, curve=0), 1.004)),
    ),
    "published_run": (public_set, lambda: public_set(lambda minutes: 0.9 * minutes)),
    "altered_published_run": (lambda: public_set(lambda minutes: 0.9 * minutes), public_set),
    "published_curve": (lambda: public_set(lambda minutes: 1.1 * minutes, evenly=True), honest),
    "idle_before_start": (
        lambda: every(later(-200, "init_start", "init_stop")),
        lambda: every(later(-60, "init_start", "init_stop")),
    ),
    "implausible_time": (lambda: last(retimed(genuine(4), lambda t, _: t / 1000)), honest),
    "clock_backwards": (lambda: last(one_back(genuine(4), 600)), lambda: last(one_back(genuine(4), 0.5))),
    "round_start": (lambda: last(genuine(4, start=ROUND)), lambda: last(genuine(4, start=ROUND + 1))),
    "round_times": (
        lambda: last(retimed(genuine(4), lambda t, _: t - t % 1000)),
        lambda: last(retimed(genuine(4), lambda t, _: t - t % 10)),
    ),
    "several_starts": (lambda: last(duplicate("run_start", 5)), lambda: last(duplicate("run_start", 0))),
    "several_stops": (
        lambda: last(duplicate("run_stop", 5, status="success")),
        lambda: last(duplicate("run_stop", 0, status="success")),
    ),
    "target_after_stop": (
        lambda: last(ending(genuine(4), -100_000, "eval_accuracy")),
        lambda: last(ending(genuine(4), -500, "eval_accuracy")),
    ),
    "quality_units": (lambda: last(scale_quality(genuine(4), 100)), lambda: last(scale_quality(genuine(4), 1.3))),
    "same_run": (lambda: last(genuine(0)), honest),
    "shifted_copy": (
        lambda: last(retimed(genuine(0), lambda t, _: t + HOUR)),
        lambda: last(retimed(genuine(0), lambda t, key: t + HOUR + (60_000 if key == "epoch_stop" else 0))),
    ),
    "equal_curves": (lambda: last(genuine(4, curve=0)), honest),
    "equal_times": (
        lambda: files(*(ending(genuine(n), 2_500_123) if n < 3 else genuine(n) for n in range(5))),
        lambda: files(*(ending(genuine(n), 2_500_123) if n < 2 else genuine(n) for n in range(5))),
    ),
    "equal_seeds": (lambda: last(genuine(4).replace("1004", "1000")), honest),
    "edited_outlier": (lambda: last(genuine(4, 60.0, start=ROUND)), lambda: last(genuine(4, 41.0, start=ROUND))),
    "outlier": (lambda: last(genuine(4, 240.0)), lambda: last(genuine(4, 120.0))),
    "different_pace": (lambda: last(genuine(4, 70.0)), lambda: last(genuine(4, 50.0))),
    "different_system": (lambda: last(genuine(4, submission_platform="1xA100")), honest),
    "different_batch": (lambda: last(genuine(4, global_batch_size=3328)), honest),
    "different_hyperparameters": (
        lambda: last(genuine(4, sgd_opt_momentum=0.8)),
        lambda: last(genuine(4, model_bn_span=104)),
    ),
    "different_program": (lambda: last(edit(genuine(4), "run_start", lineno=7)), honest),
    "different_format": (lambda: last(genuine(4) + mll("model_note", 1)), honest),
    "surplus_files": (lambda: files(*(genuine(number) for number in range(6))), honest),
    "missing_files": (lambda: files(*(genuine(number) for number in range(4))), honest),
    "skipped_numbers": (
        lambda: renamed("result_4.txt", "result_7.txt"),
        lambda: renamed("result_0.txt", "result_5.txt"),
    ),
    "odd_name": (lambda: renamed("result_4.txt", "result_best.txt"), lambda: renamed("result_4.txt", "result_04.txt")),
    "empty_file": (lambda: last(""), honest),
    "damaged_events": (lambda: last(genuine(4) + ':::MLLOG {"key": "epoch_stop", "val\n'), honest),
    "no_status": (lambda: last(genuine(4).replace(', "status": "success"', "")), honest),
    # Figures in another unit.
    "faster_than_stated by steps": (lambda: files(*(stating(n, 0.9, step_time=True) for n in range(5))), honest),
    # Throughputs that include the evaluation.
    "faster_than_stated with evaluations": (
        lambda: files(*(stating(n, 0.9).replace('"resnet"', '"gpt_oss_20b"') for n in range(5))),
        lambda: files(*(stating(n).replace('"resnet"', '"gpt_oss_20b"') for n in range(5))),
    ),
    # Google's 3D U-Net of v1.0: the first evaluation after 875 epochs, then one every 18, none with an eval_start.
    "fast_beginning without lengths": (
        lambda: every(lambda text: evaluated_after(1, short_first(200)(text))),
        lambda: every(lambda text: evaluated_after(5, short_first(200)(text))),
    ),
    # A busy machine adds more to a part of some seconds than 1.2 times.
    "fast_beginning on small data": (
        lambda: every(short_first(200)),
        lambda: every(lambda text: edit(short_first(200)(text), "train_samples", lambda _: 1500)),
    ),
    "altered_published_run on another platform": (lambda: public_set(platform="1xMINE"), honest),
    "shifted_copy five times": (
        lambda: files(*(retimed(genuine(0), lambda t, _, n=n: t + n * HOUR) for n in range(5))),
        honest,
    ),
    "equal_times of all": (lambda: files(*(ending(genuine(n), 2_500_123) for n in range(5))), honest),
}


def audit_files(folder: Path, content: Files) -> Audit:
    (audit,) = audit_path(write_files(folder, content))
    return audit


def test_rules_report_their_cases_and_no_honest_neighbours(
    tmp_path: Path, recorded: Callable[[str, object], None]
) -> None:
    assert audit_files(tmp_path / "honest", honest()).findings == ()
    assert {rule.name for rule in RULES} - {*CASES} - DECLARATIONS == ELSEWHERE
    findings: dict[str, dict[str, list[list[str]]]] = {}
    for case, sets in CASES.items():
        findings[case] = {
            kind: [
                [item.severity, item.rule, item.location, item.found]
                for item in audit_files(tmp_path / case / kind, make()).findings
            ]
            for kind, make in zip(KINDS, sets, strict=True)
        }
        reported = [case.partition(" ")[0] in {rule for _, rule, *_ in findings[case][kind]} for kind in KINDS]
        assert reported == [True, False], case
    recorded("audits.json", findings)


def test_copies_within_a_tree_and_of_another_tree(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    # An honest set, one with a log of it, and all of it with other times
    write_set(tmp_path / "tree" / "a", list(honest().values()))
    write_set(tmp_path / "tree" / "b", [*(genuine(number) for number in range(5, 9)), genuine(0)])
    write_files(tmp_path / "mine", every(lambda text: retimed(text, lambda t, _: START_MS + (t - START_MS) * 1.18)))
    assert [audit.passed for audit in audit_path(tmp_path / "tree", [tmp_path / "tree"])] == [True, True]
    outputs = []
    for code, words in ((0, [tmp_path / "tree"]), (1, [tmp_path / "mine", "--against", tmp_path / "tree"])):
        text, plain = (run_encore("audit", *words, *form, width=1000) for form in ([], ["--json"]))
        assert (text.exit_code, plain.exit_code) == (code, code)
        outputs += [text.output, json.dumps(json.loads(plain.stdout), indent=1)]
    recorded("audit_copies.txt", "\n".join(outputs))


@pytest.mark.parametrize(
    ("stated_s", "texts"), [(103.0, []), (110.0, ["110 s of validation in the log, 100 s by the timestamps"])]
)
def test_stated_times_of_validations(stated_s: float, texts: list[str]) -> None:
    stated = (Stated("validation_time", stated_s, 200.0, 7), Stated("validation_time", 9.0, 99.0, 8))
    run = RunLog(path=Path("result_0.txt"), phases=(Phase("eval_start", 100.0),), stated=stated)
    backwards = [(oddity.found, oddity.line) for oddity in clock_backwards(run)]
    assert backwards == [("validation_time 101 s before validation_time in line 7", 8)]
    assert [oddity.found for oddity in faster_than_stated(run)] == texts


@pytest.mark.parametrize(("rate", "severity"), [(0.005, "error"), (0.0051, "warning"), (None, "warning")])
def test_rules_that_fire_often_or_were_never_measured_are_no_errors(rate: float | None, severity: str) -> None:
    assert (rates.severity_at(rate, "error"), rates.severity_at(rate, "note")) == (severity, "note")
    measured = rates.measured("audit")
    assert measured["sets"] > 2000 and {*measured["rules"]} == {rule.name for rule in RULES}
    severities = {rule.name: rates.severity_at(rates.rate_of("audit", rule.name), rule.severity) for rule in RULES}
    assert severities == {rule.name: rule.severity for rule in RULES}


def test_findings_are_wrapped_at_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    write_files(tmp_path, every(later(600, "run_start")))
    lines = re.sub(r"\x1b\[[\d;]*m", "", run_encore("audit", tmp_path, width=60, color=True).output).splitlines()
    assert max(len(line) for line in lines if line.startswith("    ")) <= 60


@pytest.mark.parametrize(
    ("nodes", "per_node", "system", "platform", "local_batch", "found"),
    [
        (4, 8, "dgxh100_n4", "4xDGXH100", 52, []),
        (
            2,
            8,
            "dgxh100_n4",
            "4xDGXH100",
            104,
            ["4 nodes or accelerators in the name 4xDGXH100", "4 nodes in the name"],
        ),
        (1, 8, "XE8640x4H100-SXM", "", 208, ["4 accelerators per node or accelerators in the name XE8640x4H100-SXM"]),
        (2, 4, "1xKinabalux2x4H100", "", 208, []),
        (1, 4, "dgxh100", "1xNVIDIA DGX H100", 416, ["8 accelerators per node in a DGX H100"]),
        (1, 4, "dgxa100", "", 416, ["no NVIDIA H100-SXM5-80GB in the name dgxa100"]),
        (1, 8, "tpu-v3-8", "", 208, ["8 cores in the name tpu-v3-8"]),
        (1, 8, "two", "1xTwo", 104, ["global batch 1664 is 16 local batches"]),
        (1, 16, "two", "1xTwo", 104, ["at most 8 accelerators per node in the public sets"]),
    ],
)
def test_number_of_accelerators_is_compared_with_other_places(
    nodes: int, per_node: int, system: str, platform: str, local_batch: int, found: list[str], tmp_path: Path
) -> None:
    description = {
        "number_of_nodes": nodes, "accelerators_per_node": per_node, "accelerator_model_name": "NVIDIA H100-SXM5-80GB"
    }  # fmt: skip
    log = mllog("d_batch_size", local_batch, START_MS - 2000) + resnet_v07(10**4, submission_platform=platform)
    folder = tmp_path / "results" / system / "resnet"
    audit = audit_files(folder, {"result_0.txt": log, "system.json": json.dumps(description)})
    messages = [finding.found for finding in audit.findings if finding.rule == "contradicted_system"]
    stated = f": {nodes} x {per_node} in the system description"
    assert [(text in message, stated in message) for text, message in zip(found, messages, strict=True)] == [
        (True, True)
    ] * len(found)


# The public sets with 4 to 16 V100-SXM2 train 0.44 to 0.52 epochs a minute on 8; these logs have 8 epochs.
@pytest.mark.parametrize(
    ("accelerator", "count", "minutes", "excess", "published"),
    [
        ("NVIDIA V100-SXM2-32GB", 8, 5.0, None, "above_published"),
        ("NVIDIA V100-SXM2-32GB", 1, 5.0, 6.6, "above_published"),
        ("NVIDIA V100-SXM2-32GB", 8, 1.0, 4.2, "above_published"),
        ("NVIDIA V100-SXM2-32GB", 8, 17.0, None, None),
        ("NVIDIA V100-SXM2-32GB", 8, 800.0, None, "below_published"),
        ("NVIDIA H100-SXM5-80GB", 8, 1.0, None, "above_published"),
        ("NVIDIA H100-SXM5-80GB", 1, 1.0, 2.1, "above_published"),
        ("Google TPU v1", 1, 1.0, None, None),  # No data sheet, no public set
    ],
)
def test_speed_is_compared_with_peak_rate_and_public_sets(
    accelerator: str, count: int, minutes: float, excess: float | None, published: str | None, tmp_path: Path
) -> None:
    system = {"number_of_nodes": 1, "accelerators_per_node": count, "accelerator_model_name": accelerator}
    audit = audit_files(tmp_path / "logs", {**files(*[resnet_v07(minutes)] * 5), "system.json": json.dumps(system)})
    messages = {item.rule: item.found for item in audit.findings if item.rule.endswith(("_peak", "_published"))}
    rules = sorted(item.rule for item in audit.findings if item.rule in messages)
    assert rules == ["above_peak"] * (5 if excess else 0) + ([published] if published else [])
    patterns = {"above_peak": rf"on {count} accelerators: [\d.]+ [TP]FLOP/s each, {excess} times the peak of"}
    speed = r"[\d.e+]+ times the speed per accelerator of v[\d.]+/"
    assert [rule for rule in messages if not re.search(patterns.get(rule, speed), messages[rule])] == []


@pytest.mark.parametrize(("precision", "peak"), [("bfloat16", 989.5e12), ("fp8", 1979e12), (None, 1979e12)])
def test_peak_rate_is_that_of_the_declared_precision(precision: str | None, peak: float) -> None:
    declared = {"lowest_numerical_precision_in_linear": precision} if precision else {}
    assert peak_rate("NVIDIA H100-SXM5-80GB", RunLog(path=Path("x"), hyperparameters={**declared}))[0] == peak
