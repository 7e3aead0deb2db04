"""The audit: each rule fires on a log that was made for it, and not on its nearest honest neighbour."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import ExitCode
from encore.results.audit import rates
from encore.results.audit.clocks import clock_backwards, implausible_time
from encore.results.audit.judge import Audit, audit_path
from encore.results.audit.rules import RULES
from encore.results.audit.stated import faster_than_stated
from encore.results.compare.compare import compare_path
from encore.results.compare.digest import digests
from encore.results.compare.sides import load_side
from encore.results.logs.run_log import Phase, RunLog, Stated
from tests.results.mutants import mutate
from tests.results.result_logs import START_MS, mll, mllog, resnet_v07, write_set

HOUR = 3_600_000
Files = dict[str, str]
Event = dict[str, object]


def changed(text: str, change: Callable[[int, Event], None]) -> str:
    """Return a log with each event, numbered from 0, as ``change`` leaves it."""
    lines = []
    for number, line in enumerate(text.splitlines()):
        event = json.loads(line.removeprefix(":::MLLOG "))
        change(number, event)
        lines.append(f":::MLLOG {json.dumps(event)}\n")
    return "".join(lines)


def retimed(text: str, at: Callable[[float, str], float]) -> str:
    """Return a log with each time as ``at`` makes it of the old one and the event's key."""
    return changed(text, lambda _, event: event.update(time_ms=round(at(event["time_ms"], str(event["key"])))))  # type: ignore[arg-type]


def genuine(
    number: int, minutes: float = 40.0, curve: int | None = None, start: int | None = None, **own: object
) -> str:
    """Return a log as a training writes it: with a seed, a curve and times of its own."""
    noise = random.Random(number if curve is None else curve)
    quality = (*(round(0.1 + 0.09 * step + noise.uniform(-0.01, 0.01), 5) for step in range(7)), 0.7605)
    start = START_MS + number * 3 * HOUR + 137 * number if start is None else start
    text = resnet_v07(minutes + 0.3 * number, quality=quality, start_ms=start, seed=1000 + number, **own)  # type: ignore[arg-type]
    return retimed(text, lambda t, _: t + 2000 * (math.sin((t - start) / 50_000 + number) - math.sin(number)))


def files(*texts: str) -> Files:
    return {f"result_{number}.txt": text for number, text in enumerate(texts)}


def honest() -> Files:
    return files(*(genuine(number) for number in range(5)))


def last(text: str) -> Files:
    """Return an honest set with this log as its last one."""
    return {**honest(), "result_4.txt": text}


def each(change: Callable[[str], str]) -> Files:
    return {name: change(text) for name, text in honest().items()}


def later(seconds: float, *keys: str) -> Callable[[str], str]:
    """Return a change that moves the events with these keys, and no other."""
    return lambda text: retimed(text, lambda t, key: t + seconds * 1000 if key in keys else t)


def late_stop(text: str, seconds: float) -> str:
    """Return a log whose run_stop is so many seconds before its last evaluation."""
    end = max(json.loads(line[9:])["time_ms"] for line in text.splitlines() if '"eval_accuracy"' in line)
    return retimed(text, lambda t, key: end - seconds * 1000 if key == "run_stop" else t)


def epochs_from(first: int) -> Callable[[str], str]:
    def change(_: int, event: Event) -> None:
        metadata = event["metadata"]
        if isinstance(metadata, dict) and "epoch_num" in metadata:
            metadata["epoch_num"] = metadata["epoch_num"] // 4 + first - 1
        if isinstance(metadata, dict) and "first_epoch_num" in metadata:
            metadata["first_epoch_num"] += first - 1

    return lambda text: changed(text, change)


def short_first(seconds: float) -> Callable[[str], str]:
    """Return a change that takes so many seconds from the time up to the first evaluation."""

    def change(text: str) -> str:
        stop = min(number for number, line in enumerate(text.splitlines()) if '"eval_start"' in line)
        move = lambda number, event: event.update(time_ms=event["time_ms"] + 1000 * seconds * (number < stop))  # noqa: E731
        return changed(text, move)

    return change


def one_back(seconds: float) -> Callable[[str], str]:
    def change(_: int, event: Event) -> None:
        if event["key"] == "epoch_stop" and event["metadata"]["epoch_num"] == 16:  # type: ignore[index]
            event["time_ms"] -= 1000 * seconds  # type: ignore[operator]

    return lambda text: changed(text, change)


def ending(text: str, taken_ms: int) -> str:
    start = next(json.loads(line[9:])["time_ms"] for line in text.splitlines() if '"run_start"' in line)
    return retimed(text, lambda t, key: start + taken_ms if key == "run_stop" else t)


def stretched(text: str, factor: float) -> str:
    return retimed(text, lambda t, _: START_MS + (t - START_MS) * factor)


def again(key: str, seconds: float, **metadata: object) -> str:
    """Return an honest log with a second event of this key."""
    found = next(line for line in genuine(4).splitlines(keepends=True) if f'"{key}"' in line)
    event = json.loads(found[9:])
    return genuine(4).replace(found, found + mllog(key, None, event["time_ms"] + seconds * 1000, **metadata))


def percent(text: str, factor: float) -> str:
    def change(_: int, event: Event) -> None:
        if event["key"] == "eval_accuracy":
            event["value"] *= factor  # type: ignore[operator]

    return changed(text, change)


def moved_code(text: str) -> str:
    return changed(text, lambda _, event: event["metadata"].update(lineno=7) if event["key"] == "run_start" else None)  # type: ignore[attr-defined]


def without_status(text: str) -> str:
    return changed(text, lambda _, event: event["metadata"].pop("status", None))  # type: ignore[attr-defined]


def renamed(old: str, new: str) -> Files:
    return {new if name == old else name: text for name, text in honest().items()}


ROUND = START_MS - START_MS % 100_000


def public(
    change: Callable[[float], float] = lambda minutes: minutes, evenly: bool = False, platform: str = "1xNF5488"
) -> Files:
    """Return logs with the times and qualities of a public set's runs, the times changed."""
    side = next(each for each in digests("v0.7") if each.label == "v0.7/Inspur/nf5488_mxnet")
    texts: list[str] = []
    for minutes, curve in zip(side.minutes, side.curves, strict=True):
        qualities = curve.values["value"]
        own = {"seed": len(texts), "submission_platform": platform}
        text = resnet_v07(change(minutes), quality=qualities, start_ms=START_MS + len(texts) * HOUR, **own)  # type: ignore[arg-type]
        start, step = START_MS + len(texts) * HOUR, change(minutes) * 60_000 / len(qualities)
        edges = [0.0, *curve.minutes]

        def at(t: float, key: str, edges: list[float] = edges, start: int = start, step: float = step) -> float:
            done = (t - start) / step
            if key in ("run_start", "run_stop") or done <= 0 or evenly:
                return t
            part = min(int(done), len(edges) - 2)
            minutes = edges[part] + (done - part) * (edges[part + 1] - edges[part])
            return start + change(minutes) * 60_000

        texts.append(retimed(text, at))
    return files(*texts)


def without_middle(text: str) -> str:
    """Return a log without the third of its evaluations in the middle, and without their time."""
    lines = text.splitlines(keepends=True)
    marks = [number for number, line in enumerate(lines) if "block_start" in line]
    one, two = (json.loads(lines[marks[part]].removeprefix(":::MLLOG "))["time_ms"] for part in (3, 6))
    rest = "".join(lines[: marks[3]] + lines[marks[6] :])
    return retimed(rest, lambda t, _: t - (two - one) if t >= two else t)


IMAGES = 1_281_167


def speeds(text: str) -> list[float]:
    """Return the images per second of each four epochs of a log, by its clock."""
    at: dict[str, list[int]] = {"epoch_start": [], "epoch_stop": []}
    for line in text.splitlines():
        event = json.loads(line[9:])
        at.get(event["key"], []).append(event["time_ms"])
    return [4000 * IMAGES / (end - begin) for begin, end in zip(at["epoch_start"], at["epoch_stop"], strict=True)]


def stating(number: int, factor: float = 1.0, of: int | None = None, step_time: bool = False) -> str:
    """Return a log that states its speed at the end of each epoch, ``factor`` times as fast; ``of``: another log's."""
    figures = iter(speeds(genuine(number if of is None else of)))
    lines = []
    for line in genuine(number).splitlines(keepends=True):
        if '"epoch_stop"' in line:
            speed = next(figures) * factor
            value = {"train_step_time": 1664 / speed} if step_time else {"throughput": speed}
            lines.append(mllog("tracked_stats", value, json.loads(line[9:])["time_ms"]))
        lines.append(line)
    return "".join(lines)


def seldom_evaluated(number: int, first: int) -> str:
    """Return a log with its first evaluation after so many blocks, one of a minute after each later block, unmarked."""
    noise = random.Random(number)
    quality = (*(round(0.3 + 0.02 * step + noise.uniform(-0.01, 0.01), 5) for step in range(15)), 0.7605)
    lines, done = [], 0
    for line in resnet_v07(40.0, quality=quality, seed=number, start_ms=START_MS + number * HOUR).splitlines():
        event = json.loads(line[9:])
        done += event["key"] == "eval_accuracy"
        event["time_ms"] += 60_000 * max(done - first, 0)
        if not event["key"].startswith("eval_") or (event["key"] == "eval_accuracy" and done >= first):
            lines.append(f":::MLLOG {json.dumps(event)}\n")
    return "".join(lines)


CASES: dict[str, tuple[Callable[[], Files], Callable[[], Files]]] = {
    "late_start": (lambda: each(later(600, "run_start")), lambda: each(later(0.5, "run_start"))),
    "missing_epochs": (lambda: each(epochs_from(5)), lambda: each(epochs_from(1))),
    "fast_beginning": (lambda: each(short_first(200)), lambda: each(short_first(-200))),
    "fast_middle": (lambda: each(without_middle), honest),
    "faster_than_stated": (lambda: last(stating(4, 0.9)), lambda: last(stating(4, 0.98))),
    "equal_statements": (
        lambda: files(*(stating(n) for n in range(4)), stating(4, of=0)),
        lambda: files(*(stating(n) for n in range(5))),
    ),
    "similar_curves": (
        lambda: last(percent(genuine(4, curve=0), 1.001)),
        lambda: last(percent(genuine(4, curve=0), 1.004)),
    ),
    "published_run": (public, lambda: public(lambda minutes: 0.9 * minutes)),
    "altered_published_run": (lambda: public(lambda minutes: 0.9 * minutes), public),
    "published_curve": (lambda: public(lambda minutes: 1.1 * minutes, evenly=True), honest),
    "idle_before_start": (
        lambda: each(later(-200, "init_start", "init_stop")),
        lambda: each(later(-60, "init_start", "init_stop")),
    ),
    "implausible_time": (lambda: last(retimed(genuine(4), lambda t, _: t / 1000)), honest),
    "clock_backwards": (lambda: last(one_back(600)(genuine(4))), lambda: last(one_back(0.5)(genuine(4)))),
    "round_start": (lambda: last(genuine(4, start=ROUND)), lambda: last(genuine(4, start=ROUND + 1))),
    "round_times": (
        lambda: last(retimed(genuine(4), lambda t, _: t - t % 1000)),
        lambda: last(retimed(genuine(4), lambda t, _: t - t % 10)),
    ),
    "several_starts": (lambda: last(again("run_start", 5)), lambda: last(again("run_start", 0))),
    "several_stops": (
        lambda: last(again("run_stop", 5, status="success")),
        lambda: last(again("run_stop", 0, status="success")),
    ),
    "target_after_stop": (lambda: last(late_stop(genuine(4), 100)), lambda: last(late_stop(genuine(4), 0.5))),
    "quality_units": (lambda: last(percent(genuine(4), 100)), lambda: last(percent(genuine(4), 1.3))),
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
    "different_program": (lambda: last(moved_code(genuine(4))), honest),
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
    "no_status": (lambda: last(without_status(genuine(4))), honest),
}


def audited(folder: Path, content: Files) -> Audit:
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(text, encoding="utf-8")
    audits = audit_path(folder)
    assert len(audits) == 1
    return audits[0]


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} == {*CASES, "copy_of_another_set", "altered_copy_of_another_set"}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_where_it_should_and_nowhere_else(rule: str, tmp_path: Path) -> None:
    fires, silent = CASES[rule]
    found = [finding for finding in audited(tmp_path / "fires", fires()).findings if finding.rule == rule]
    assert found
    assert all(finding.expected and finding.remedy and finding.kind == "audit" for finding in found)
    assert rule not in {finding.rule for finding in audited(tmp_path / "silent", silent()).findings}


def test_an_honest_set_has_no_finding(tmp_path: Path) -> None:
    assert audited(tmp_path / "logs", honest()).findings == ()


def test_all_starts_ten_minutes_late(tmp_path: Path) -> None:
    """The times are the official ones of a whole set, 10 minutes shorter: nothing but the epochs gives it away."""
    audit = audited(tmp_path / "logs", each(later(600, "run_start")))
    found = [finding for finding in audit.findings if finding.rule == "late_start"]
    assert [(finding.severity, finding.path and finding.path.name) for finding in found] == [
        ("error", f"result_{number}.txt") for number in range(5)
    ]
    line = next(n for n, text in enumerate(genuine(0).splitlines(), 1) if '"run_start"' in text)
    assert found[0].place == f"result_0.txt line {line}"
    assert "600 s after block_start" in found[0].found


def test_figures_in_other_units_and_of_validations(tmp_path: Path) -> None:
    audit = audited(tmp_path / "steps", files(*(stating(n, 0.9, step_time=True) for n in range(5))))
    assert [finding.rule for finding in audit.findings] == ["faster_than_stated"] * 5
    assert "1.111 times as fast by its clock" in audit.findings[0].found
    run = RunLog(path=Path("result_0.txt"), phases=(Phase("eval_start", 100.0),))
    for stated, texts in ((103.0, []), (110.0, ["110 s of validation by the log itself, 100 s by its clock"])):
        noted = replace(
            run, stated=(Stated("validation_time", stated, 200.0, 7), Stated("validation_time", 9.0, 99.0, 8))
        )
        assert [oddity.found for oddity in faster_than_stated(noted)] == texts
    (back,) = clock_backwards(noted)
    assert (back.found, back.line) == ("validation_time 101 s before validation_time in line 7", 8)


def test_evaluations_without_a_length_are_no_fast_beginning(tmp_path: Path) -> None:
    """Google's 3D U-Net of v1.0: the first evaluation after 875 epochs, then one every 18, none with an eval_start."""
    for first, found in ((10, False), (3, True)):
        audit = audited(tmp_path / str(first), files(*(seldom_evaluated(number, first) for number in range(5))))
        assert ("fast_beginning" in {finding.rule for finding in audit.findings}) is found


def test_a_run_on_a_small_data_set_has_no_pace(tmp_path: Path) -> None:
    """A busy machine adds more to a part of some seconds than 1.2 times."""

    def small(_: int, event: Event) -> None:
        event.update(value=1500 if event["key"] == "train_samples" else event["value"])

    logs = {name: changed(text, small) for name, text in each(short_first(200)).items()}
    assert "train_samples" in logs["result_0.txt"]
    assert "fast_beginning" not in {finding.rule for finding in audited(tmp_path / "logs", logs).findings}


def test_the_runs_of_a_public_set_on_another_platform(tmp_path: Path) -> None:
    audit = audited(tmp_path / "logs", public(platform="1xMINE"))
    (found,) = [finding.found for finding in audit.findings if finding.rule == "altered_published_run"]
    assert found == "the runs of v0.7/Inspur/nf5488_mxnet on 1xNF5488, here on 1xMINE"


@pytest.mark.parametrize(
    ("start_s", "stop_s", "found"),
    [
        (1.0, 61.0, "1970-01-01 00:00:01 UTC"),
        (-5.0, 61.0, "1969-12-31 23:59:55 UTC"),
        (1_592_669.0, 1_592_729.0, "1970-01-19 10:24:29 UTC: seconds where milliseconds belong"),
        (1.6e12, 1.6e12 + 60, "in the future"),
        (-1e300, 1e300, "-1e+300 s"),
        (1.6e9, 1.6e9 + 61 * 86400, "a run of 61 days"),
        (1.6e9, 1.6e9 + 59 * 86400, ""),
    ],
)
def test_times_that_cannot_be(start_s: float, stop_s: float, found: str) -> None:
    run = RunLog(path=Path("result_0.txt"), start_s=start_s, stop_s=stop_s)
    texts = [oddity.found for oddity in implausible_time(run)]
    assert any(found in text for text in texts) if found else not texts


def test_one_log_five_times_at_other_hours(tmp_path: Path) -> None:
    copies = files(*(retimed(genuine(0), lambda t, _, n=n: t + n * HOUR) for n in range(5)))  # type: ignore[misc]
    audit = audited(tmp_path / "logs", copies)
    errors = {finding.rule for finding in audit.findings if finding.severity == "error"}
    assert errors == {"shifted_copy", "equal_curves", "equal_times"}
    assert [finding.found for finding in audit.findings if finding.rule == "shifted_copy"] == [
        f"the events of result_0.txt, {n * 3600}.000 s later" for n in range(1, 5)
    ]


def test_findings_count_in_units_and_name_how_many_more(tmp_path: Path) -> None:
    fast = audited(tmp_path / "fast", each(short_first(200)))
    (found, *_) = [finding.found for finding in fast.findings if finding.rule == "fast_beginning"]
    assert "4 epochs in the first" in found
    equal = audited(tmp_path / "equal", files(*(ending(genuine(n), 2_500_123) for n in range(5))))
    (found,) = [finding.found for finding in equal.findings if finding.rule == "equal_times"]
    assert found == "5 runs of 2500.123 s: result_0.txt, result_1.txt, result_2.txt and 2 more"


def test_a_published_set_with_all_times_multiplied(tmp_path: Path) -> None:
    write_set(tmp_path / "published", list(honest().values()))
    write_set(tmp_path / "mine", [stretched(text, 1.18) for text in honest().values()])
    (audit,) = audit_path(tmp_path / "mine", [tmp_path / "published"])
    found = [finding.found for finding in audit.findings if finding.rule == "altered_copy_of_another_set"]
    assert len(found) == 5
    assert all("all times multiplied by 1.1800" in each for each in found)
    assert not audit.passed
    assert audit_path(tmp_path / "mine", [tmp_path / "mine"])[0].findings == ()


def test_a_log_in_two_sets_of_a_tree(tmp_path: Path) -> None:
    write_set(tmp_path / "a", list(honest().values()))
    write_set(tmp_path / "b", [*(genuine(number) for number in range(5, 9)), genuine(0)])
    first, second = audit_path(tmp_path)
    assert first.findings == ()
    assert [(finding.rule, finding.place) for finding in second.findings] == [("copy_of_another_set", "result_4.txt")]


def test_errors_are_rules_that_hardly_ever_fire_on_public_sets() -> None:
    for rule in RULES:
        rate = rates.rate_of(rule)
        assert rate is not None, f"{rule.name} was not measured: tools/audit_rates.py"
        assert rates.severity_of(rule) == rule.severity, f"{rule.name} fires too often for an error"
        assert rule.severity != "error" or rate <= 0.005
    entry = rates.measured()
    assert entry["sets"] > 2000
    assert set(entry["rules"]) == {rule.name for rule in RULES}


def test_a_rule_that_fires_often_or_was_never_measured_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = next(rule for rule in RULES if rule.name == "late_start")
    for sets, severity in ((5, "error"), (6, "warning")):
        content = {"sets": 1000, "rules": {"late_start": {"sets": sets}}}
        monkeypatch.setattr(rates, "measured", lambda content=content: content)
        assert rates.severity_of(rule) == severity
    monkeypatch.setattr(rates, "measured", lambda: {"sets": 1000, "rules": {}})
    assert rates.severity_of(rule) == "warning"


def test_compare_and_score_carry_the_findings(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "logs", list(last(genuine(0)).values()))
    assert "same_run" in {finding.rule for finding in load_side(folder).findings}
    assert "same_run" in {finding["rule"] for finding in compare_path(folder).as_json()["findings"]}
    for command in ("compare", "score"):
        assert "same_run, result_4.txt: the same run as result_0.txt" in invoked(command, str(folder))


def invoked(*words: str, code: int = ExitCode.REACHED, width: int = 200) -> str:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": str(width)})
    assert done.exit_code == code, done.output
    return done.output


def test_command_line(tmp_path: Path) -> None:
    good = write_set(tmp_path / "tree" / "good", list(honest().values()))
    assert "1 set, 5 logs: 0 errors, 0 warnings, 0 notes" in invoked("audit", str(good))
    lone = write_set(tmp_path / "lone", [genuine(0)])
    assert "1 set, 1 log: 0 errors, 0 warnings, 1 note\n" in invoked("audit", str(lone))
    write_set(tmp_path / "tree" / "bad", list(each(later(600, "run_start")).values()))
    output = invoked("audit", str(tmp_path / "tree"), code=ExitCode.FAILED)
    assert "error: late_start" in output
    assert "and 2 more" in output
    assert "of the public sets have it" in output
    loaded = json.loads(invoked("audit", str(tmp_path / "tree"), "--json", code=ExitCode.FAILED))
    assert [(each["passed"], each["runs"]) for each in loaded] == [(False, 5), (True, 5)]
    first = loaded[0]["findings"][0]
    assert (first["rule"], first["severity"], first["file"]) == ("late_start", "error", "result_0.txt")
    assert 0 <= first["rate"] <= 0.005


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_wraps_lines_at_words(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_set(tmp_path, list(each(later(600, "run_start")).values()))
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = CliRunner().invoke(app, ["audit", str(folder)], env={"COLUMNS": str(width)}, color=True).output
    plain = [line for line in output.splitlines() if "    " in line]
    assert any("expected: run_start before the first" in line for line in plain)
    assert all(len(line.encode("ascii", "ignore")) <= width + 20 for line in plain)


def test_no_log_raises_an_exception(tmp_path: Path) -> None:
    """Mutated logs, and times and qualities at the ends of what a number can be."""
    rng = random.Random(5)
    ends = ("-1e300", "1e308", "-5", "0", "1e-300", "1e17", "null", '"x"')
    originals = list(honest().values())
    for number in range(30):
        texts = [mutate(text.encode(), rng) for text in originals]
        if number % 2:
            wild = changed(originals[4], lambda _, event: event.update(time_ms="T") if rng.random() < 0.2 else None)
            texts[4] = b"".join(
                line.replace(b'"T"', rng.choice(ends).encode(), 1) for line in wild.encode().splitlines(keepends=True)
            )
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in enumerate(texts):
            (folder / f"result_{name}.txt").write_bytes(text)
        for audit in audit_path(folder):
            json.dumps(audit.as_json(), allow_nan=False)
