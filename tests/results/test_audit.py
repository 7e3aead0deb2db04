"""The audit: each rule fires on a log that was made for it, and not on its nearest honest neighbour."""

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
from encore.results import findings as rates
from encore.results.audit.judge import RULES, Audit, audit_path
from encore.results.audit.logs import clock_backwards, faster_than_stated, implausible_time
from encore.results.compare.sides import digests
from encore.results.logs.run_log import Phase, RunLog, Stated, read_run
from tests.results.mutants import mutate
from tests.results.result_logs import START_MS, log_of, mll, mllog, resnet_v07, write_set

HOUR = 3_600_000
# Of test_declarations.py
DECLARATIONS = {rule.name for rule in RULES if rule.name.startswith("declared_")} | {
    "missing_config",
    "unreadable_profile",
}
Files = dict[str, str]
Event = dict[str, object]


# Log with each event, numbered from 0, as ``change`` leaves it.
def changed(text: str, change: Callable[[int, Event], None]) -> str:
    lines = []
    for number, line in enumerate(text.splitlines()):
        event = json.loads(line.removeprefix(":::MLLOG "))
        change(number, event)
        lines.append(f":::MLLOG {json.dumps(event)}\n")
    return "".join(lines)


# Log with each time as ``at`` makes it of the old one and the event's key.
def retimed(text: str, at: Callable[[float, str], float]) -> str:
    return changed(text, lambda _, event: event.update(time_ms=round(at(event["time_ms"], str(event["key"])))))


# Log as a training writes it: with a seed, a curve and times of its own.
def genuine(
    number: int, minutes: float = 40.0, curve: int | None = None, start: int | None = None, **own: object
) -> str:
    noise = random.Random(number if curve is None else curve)
    quality = (*(round(0.1 + 0.09 * step + noise.uniform(-0.01, 0.01), 5) for step in range(7)), 0.7605)
    start = START_MS + number * 3 * HOUR + 137 * number if start is None else start
    text = resnet_v07(minutes + 0.3 * number, quality=quality, start_ms=start, seed=1000 + number, **own)
    return retimed(text, lambda t, _: t + 2000 * (math.sin((t - start) / 50_000 + number) - math.sin(number)))


def files(*texts: str) -> Files:
    return {f"result_{number}.txt": text for number, text in enumerate(texts)}


def honest() -> Files:
    return files(*(genuine(number) for number in range(5)))


# Honest set with this log as its last one.
def last(text: str) -> Files:
    return {**honest(), "result_4.txt": text}


def each(change: Callable[[str], str]) -> Files:
    return {name: change(text) for name, text in honest().items()}


# Change that moves the events with these keys, and no other.
def later(seconds: float, *keys: str) -> Callable[[str], str]:
    return lambda text: retimed(text, lambda t, key: t + seconds * 1000 if key in keys else t)


# Log whose run_stop is that many seconds before its last evaluation.
def late_stop(text: str, seconds: float) -> str:
    end = max(json.loads(line[9:])["time_ms"] for line in text.splitlines() if '"eval_accuracy"' in line)
    return retimed(text, lambda t, key: end - seconds * 1000 if key == "run_stop" else t)


# Change that numbers epochs and blocks from ``first`` on.
def epochs_from(first: int) -> Callable[[str], str]:
    named = {"epoch_num": lambda number: number // 4 + first - 1, "first_epoch_num": lambda number: number + first - 1}
    return lambda text: changed(
        text,
        lambda _, event: event["metadata"].update({
            name: named[name](number) for name, number in event["metadata"].items() if name in named
        }),
    )  # fmt: skip


# Change that takes that many seconds from the time up to the first evaluation.
def short_first(seconds: float) -> Callable[[str], str]:

    return lambda text: changed(
        text,
        lambda n, event: event.update(
            time_ms=event["time_ms"] + 1000 * seconds * ('"eval_start"' not in "".join(text.splitlines()[: n + 1]))
        ),
    )


# Log in which one epoch_stop is ``seconds`` earlier.
def one_back(text: str, seconds: float) -> str:
    times = [json.loads(line[9:])["time_ms"] for line in text.splitlines() if '"epoch_stop"' in line]
    return retimed(text, lambda t, key: t - 1000 * seconds if (key, t) == ("epoch_stop", times[3]) else t)


def ending(text: str, taken_ms: int) -> str:
    start = next(json.loads(line[9:])["time_ms"] for line in text.splitlines() if '"run_start"' in line)
    return retimed(text, lambda t, key: start + taken_ms if key == "run_stop" else t)


def stretched(text: str, factor: float) -> str:
    return retimed(text, lambda t, _: START_MS + (t - START_MS) * factor)


# Honest log with a second event of this key.
def again(key: str, seconds: float, **metadata: object) -> str:
    found = next(line for line in genuine(4).splitlines(keepends=True) if f'"{key}"' in line)
    event = json.loads(found[9:])
    return genuine(4).replace(found, found + mllog(key, None, event["time_ms"] + seconds * 1000, **metadata))


def percent(text: str, factor: float) -> str:
    return changed(
        text, lambda _, event: event.update(value=event["value"] * factor) if event["key"] == "eval_accuracy" else None
    )


def moved_code(text: str) -> str:
    return changed(text, lambda _, event: event["metadata"].update(lineno=7) if event["key"] == "run_start" else None)


def without_status(text: str) -> str:
    return changed(text, lambda _, event: event["metadata"].pop("status", None))


def renamed(old: str, new: str) -> Files:
    return {new if name == old else name: text for name, text in honest().items()}


ROUND = START_MS - START_MS % 100_000


# Logs with the times and qualities of a public set's runs, the times changed.
def public(
    change: Callable[[float], float] = lambda minutes: minutes, evenly: bool = False, platform: str = "1xNF5488"
) -> Files:
    side = next(each for each in digests("v0.7") if each.label == "v0.7/Inspur/nf5488_mxnet")
    texts: list[str] = []
    for minutes, curve in zip(side.minutes, side.curves, strict=True):
        qualities = curve.values["value"]
        own = {"seed": len(texts), "submission_platform": platform}
        text = resnet_v07(change(minutes), quality=qualities, start_ms=START_MS + len(texts) * HOUR, **own)
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


# Log without the third of its evaluations in the middle, and without their time.
def without_middle(text: str) -> str:
    lines = text.splitlines(keepends=True)
    marks = [number for number, line in enumerate(lines) if "block_start" in line]
    one, two = (json.loads(lines[marks[part]].removeprefix(":::MLLOG "))["time_ms"] for part in (3, 6))
    rest = "".join(lines[: marks[3]] + lines[marks[6] :])
    return retimed(rest, lambda t, _: t - (two - one) if t >= two else t)


IMAGES = 1_281_167


# Images per second of each four epochs of a log, by its clock.
def speeds(text: str) -> list[float]:
    at: dict[str, list[int]] = {"epoch_start": [], "epoch_stop": []}
    for line in text.splitlines():
        event = json.loads(line[9:])
        at.get(event["key"], []).append(event["time_ms"])
    return [4000 * IMAGES / (end - begin) for begin, end in zip(at["epoch_start"], at["epoch_stop"], strict=True)]


# Log that states its speed at the end of each epoch, ``factor`` times as fast; ``of``: another log's.
def stating(number: int, factor: float = 1.0, of: int | None = None, step_time: bool = False) -> str:
    figures = iter(speeds(genuine(number if of is None else of)))
    lines = []
    for line in genuine(number).splitlines(keepends=True):
        if '"epoch_stop"' in line:
            speed = next(figures) * factor
            value = {"train_step_time": 1664 / speed} if step_time else {"throughput": speed}
            lines.append(mllog("tracked_stats", value, json.loads(line[9:])["time_ms"]))
        lines.append(line)
    return "".join(lines)


# Log with its first evaluation after ``first`` blocks, one of a minute after each later one, unmarked.
def seldom_evaluated(number: int, first: int) -> str:
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
    "clock_backwards": (lambda: last(one_back(genuine(4), 600)), lambda: last(one_back(genuine(4), 0.5))),
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
    # Figures in another unit.
    "faster_than_stated by steps": (lambda: files(*(stating(n, 0.9, step_time=True) for n in range(5))), honest),
    # Google's 3D U-Net of v1.0: the first evaluation after 875 epochs, then one every 18, none with an eval_start.
    "fast_beginning without lengths": (
        lambda: files(*(seldom_evaluated(number, 3) for number in range(5))),
        lambda: files(*(seldom_evaluated(number, 10) for number in range(5))),
    ),
    # A busy machine adds more to a part of some seconds than 1.2 times.
    "fast_beginning on small data": (
        lambda: each(short_first(200)),
        lambda: {name: small(text) for name, text in each(short_first(200)).items()},
    ),
    "altered_published_run on another platform": (lambda: public(platform="1xMINE"), honest),
    "shifted_copy five times": (
        lambda: files(*(retimed(genuine(0), lambda t, _, n=n: t + n * HOUR) for n in range(5))),
        honest,
    ),
    "equal_times of all": (lambda: files(*(ending(genuine(n), 2_500_123) for n in range(5))), honest),
}


def small(text: str) -> str:
    return changed(text, lambda _, event: event.update(value=1500) if event["key"] == "train_samples" else None)


def audited(folder: Path, content: Files) -> Audit:
    (audit,) = audit_path(write_set(folder, list(content.values()), list(content)))
    return audit


def findings_of(audit: Audit) -> list[list[str]]:
    return [[each.severity, each.rule, each.place, each.found] for each in audit.findings]


@pytest.mark.parametrize("case", CASES)
def test_a_rule_fires_where_it_should_and_nowhere_else(
    case: str, tmp_path: Path, recorded: Callable[[str, object], None]
) -> None:
    fires, silent = (
        findings_of(audited(tmp_path / name, make())) for name, make in zip("ab", CASES[case], strict=True)
    )
    rule = case.partition(" ")[0]
    assert (rule in {each[1] for each in fires}, rule in {each[1] for each in silent}) == (True, False)
    recorded(f"audits/{case.replace(' ', '-')}.json", {"fires": fires, "silent": silent})


def test_an_honest_set_has_no_finding_and_every_rule_has_a_case(tmp_path: Path) -> None:
    assert audited(tmp_path / "logs", honest()).findings == ()
    others = {rule.name for rule in RULES} - {*CASES} - DECLARATIONS
    assert others == {"copy_of_another_set", "altered_copy_of_another_set"}


# What the command prints of three sets: an honest one, one with a log of it, and all of it with other times.
def test_copies_in_a_tree_and_in_another_one(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    write_set(tmp_path / "tree" / "a", list(honest().values()))
    write_set(tmp_path / "tree" / "b", [*(genuine(number) for number in range(5, 9)), genuine(0)])
    write_set(tmp_path / "mine", [stretched(text, 1.18) for text in honest().values()])
    write_set(tmp_path / "one", [genuine(0)])
    assert [audit.passed for audit in audit_path(tmp_path / "tree", [tmp_path / "tree"])] == [True, True]
    for name, words in {
        "tree": ["tree"], "mine": ["mine", "--against", str(tmp_path / "tree")], "one": ["one"],
    }.items():  # fmt: skip
        command = ["audit", str(tmp_path / words[0]), *words[1:]]
        done, plain = (CliRunner().invoke(app, [*command, *more], env={"COLUMNS": "1000"}) for more in ([], ["--json"]))
        assert done.exit_code == plain.exit_code == (ExitCode.FAILED if name == "mine" else ExitCode.REACHED)
        found = json.loads(plain.stdout)
        listed = found if isinstance(found, list) else [found]
        recorded(
            f"audits/of-{name}.txt",
            done.output + "\n".join(json.dumps({**e, "findings": e["findings"][:2]}) for e in listed),
        )


def test_stated_times_of_validations() -> None:
    run = RunLog(path=Path("result_0.txt"), phases=(Phase("eval_start", 100.0),))
    for stated, texts in ((103.0, []), (110.0, ["110 s of validation by the log itself, 100 s by its clock"])):
        noted = replace(
            run, stated=(Stated("validation_time", stated, 200.0, 7), Stated("validation_time", 9.0, 99.0, 8))
        )
        assert [oddity.found for oddity in faster_than_stated(noted)] == texts
    (back,) = clock_backwards(noted)
    assert (back.found, back.line) == ("validation_time 101 s before validation_time in line 7", 8)


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


def test_errors_are_rules_that_hardly_ever_fire_on_public_sets() -> None:
    entry = rates.measured("audit")
    assert entry["sets"] > 2000
    assert set(entry["rules"]) == {rule.name for rule in RULES}
    for rule in RULES:
        severity = rates.severity_at(rates.rate_of("audit", rule.name), rule.severity)
        assert severity == rule.severity, f"{rule.name} fires too often for an error"


@pytest.mark.parametrize(("rate", "severity"), [(0.005, "error"), (0.0051, "warning"), (None, "warning")])
def test_a_rule_that_fires_often_or_was_never_measured_is_no_error(rate: float | None, severity: str) -> None:
    assert rates.severity_at(rate, "error") == severity
    assert rates.severity_at(rate, "note") == "note"
    assert rates.rate_of("audit", "no such rule") is None


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_wraps_lines_at_words(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_set(tmp_path, list(each(later(600, "run_start")).values()))
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = CliRunner().invoke(app, ["audit", str(folder)], env={"COLUMNS": str(width)}, color=True).output
    plain = [line for line in output.splitlines() if "    " in line]
    assert any("expected: run_start before the first" in line for line in plain)
    assert all(len(line.encode("ascii", "ignore")) <= width + 20 for line in plain)


# Mutated logs, and times and qualities at the ends of what a number can be.
def test_no_log_raises_an_exception(tmp_path: Path) -> None:
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


# AMD's gpt-oss-20b: each figure is since the last one, with the evaluation between them. The second log is 10 % short.
@pytest.mark.parametrize(("of_the_time", "found"), [(1.0, 0), (0.9, 1)])
def test_throughput_with_the_evaluation(of_the_time: float, found: int, tmp_path: Path) -> None:
    start, text = 1_776_000_000_123, ""
    for block in range(6):
        begin, trained, end = (round(start + of_the_time * 1000 * (1300 * block + at)) for at in (0, 1200, 1300))
        samples = 12_288 * (block + 1)
        text += mllog("block_start", None, begin) + mllog("block_stop", None, trained)
        text += mllog("tracked_stats", {"throughput": 12_288 / 1300}, trained)
        text += mllog("eval_start", None, trained) + mllog("eval_accuracy", 3.4, end, samples_count=samples)
        text += mllog("eval_stop", None, end)
    path = tmp_path / "result_0.txt"
    path.write_text(log_of("gpt_oss_20b", text, start_ms=start, minutes=of_the_time * 131))
    assert len(list(faster_than_stated(read_run(path)))) == found
