"""The reader: every dialect, everything else that is in logs, and nothing that could break it."""

from __future__ import annotations

import gzip
import json
import random
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encore.results.logs import reader
from encore.results.logs.reader import MAX_LINE, Event, parse_line, read_events
from encore.results.logs.run_log import read_run
from tests.results.mutants import check_mutant, mutate
from tests.results.result_logs import mll, mllog, resnet_v05, resnet_v07, v05


def events_of(text: str | bytes, tmp_path: Path) -> list[Event]:
    path = tmp_path / "result_0.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_events(path))


def test_v05_values_are_json_or_bare_or_missing(tmp_path: Path) -> None:
    lines = (
        v05("run_start")
        + v05("eval_accuracy", '{"epoch": 2, "value": 0.25282}')
        + v05("opt_learning_rate", '"DEFERRED: 63b1d3f4"')
        + v05("model_hp_final_shape", "(224, 224, 3) -> (112, 112, 64)")
        + ":::MLPv0.5.0 resnet 1541720383.838108063 (<string>:1) run_clear_caches\n"
    )
    found = events_of(lines, tmp_path)
    assert [event.key for event in found] == [
        "run_start", "eval_accuracy", "opt_learning_rate", "model_hp_final_shape", "run_clear_caches",
    ]  # fmt: skip
    assert found[0].value is None
    assert found[0].time_s == pytest.approx(1541720386.718659639, abs=1e-6)
    assert found[0].metadata["benchmark"] == "resnet"
    assert found[1].value == {"epoch": 2, "value": 0.25282}
    assert found[2].value == "DEFERRED: 63b1d3f4"
    assert found[3].value == "(224, 224, 3) -> (112, 112, 64)"
    assert {event.dialect for event in found} == {"v0.5"}


def test_events_written_twice_by_the_logger(tmp_path: Path) -> None:
    line = v05("run_start")
    found = events_of(f"INFO:mlperf_compliance:{line}{line}", tmp_path)
    assert [(event.key, event.line) for event in found] == [("run_start", 1), ("run_start", 2)]
    assert found[0].time_s == found[1].time_s


def test_v06(tmp_path: Path) -> None:
    found = events_of(mll("run_stop", seconds=1560888652.056, status="success"), tmp_path)[0]
    assert (found.key, found.time_s, found.dialect) == ("run_stop", 1560888652.056, "mll")
    assert found.metadata["status"] == "success"


def test_v06_metadata_printed_by_python(tmp_path: Path) -> None:
    metadata = "{'lineno': 615, 'file': 'a.py'}"
    line = f':::MLL 1560873710.141025 run_start: {{"value": null, "metadata": {metadata}}}\n'
    found = events_of(line, tmp_path)[0]
    assert (found.key, found.metadata) == ("run_start", {"lineno": 615, "file": "a.py"})


def test_one_submitter_of_v06_with_times_of_one_second(tmp_path: Path) -> None:
    text = (
        "MLPerf: resnet [06/13/19 00:30:56], run_start\n"
        "MLPerf: resnet [06/13/19 00:30:57], run_set_random_seed:2019\n"
        'MLPerf: resnet [06/13/19 00:55:21], eval_accuracy: {"value": 75.98000%, "epoch": 79}\n'
        "MLPerf: resnet [06/13/19 00:55:21], run_stop\n"
    )
    found = events_of(text, tmp_path)
    assert [event.dialect for event in found] == ["mlperf"] * 4
    assert found[3].time_s - found[0].time_s == 24 * 60 + 25
    assert found[1].value == 2019
    assert found[2].value == {"value": pytest.approx(0.7598), "epoch": 79}


def test_v07_and_srun_prefix(tmp_path: Path) -> None:
    found = events_of(f"0: {mllog('run_start')}some other text\n 12: {mllog('seed', 7)}", tmp_path)
    assert [(event.key, event.line) for event in found] == [("run_start", 1), ("seed", 3)]
    assert found[0].time_s == 1592669288.183


def test_time_in_seconds_and_no_time(tmp_path: Path) -> None:
    text = (
        ':::MLLOG {"key": "run_start", "value": null, "time_s": 1593354424.831, "metadata": {}}\n'
        ':::MLLOG {"key": "run_stop", "value": null, "time_s": 0.0, "metadata": {}}\n'
    )
    assert [event.time_s for event in events_of(text, tmp_path)] == [1593354424.831, None]


def test_several_events_on_one_line_and_text_between(tmp_path: Path) -> None:
    one, two = mllog("epoch_start", epoch_num=1).strip(), mllog("epoch_stop", epoch_num=1).strip()
    found = events_of(f"{one}{two} 50%|##### {one}\n", tmp_path)
    assert [event.key for event in found] == ["epoch_start", "epoch_stop", "epoch_start"]
    assert {event.line for event in found} == {1}


def test_a_mark_inside_an_event_is_text(tmp_path: Path) -> None:
    line = mllog("submission_entry", f"echo {mllog('run_start').strip()}")
    assert [event.key for event in events_of(line, tmp_path)] == ["submission_entry"]


def test_a_damaged_event_is_reported_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(':::MLLOG {"namespace": "", "time_m' + mllog("run_start"))
    damaged: list[tuple[int, str]] = []
    assert [event.key for event in read_events(path, lambda line, text: damaged.append((line, text)))] == ["run_start"]
    assert damaged[0][0] == 1


def test_gzip_by_its_first_bytes_and_not_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_bytes(gzip.compress(resnet_v07().encode()))
    assert read_run(path).minutes == pytest.approx(40.0)


def test_gzip_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    whole = gzip.compress(resnet_v07().encode())
    for length in (10, 30, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:length])
        assert read_run(path).minutes is None or length == len(whole) - 5


def test_broken_utf8_and_nul_bytes(tmp_path: Path) -> None:
    text = b"\x00\xff\xfe progress \x80\n" + mllog("run_start").encode() + b"\xc3\x28" * 20 + mllog("seed", 1).encode()
    assert [event.key for event in events_of(text, tmp_path)] == ["run_start", "seed"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        ":::MLLOG",
        ":::MLLOG \n:::MLL \n:::MLPv0.5.0 \nMLPerf: ",
        ":::MLLOG null\n:::MLLOG []\n:::MLLOG 7\n",
        ':::MLLOG {"key": 3}\n:::MLLOG {"key": null, "time_ms": 1}\n',
        ':::MLLOG {"key": "a", "time_ms": NaN}\n:::MLLOG {"key": "a", "time_ms": 1e999}\n',
        ':::MLLOG {"key": "a", "time_ms": ' + "9" * 5000 + "}\n",
        ':::MLLOG {"key": "a", "time_ms": true, "metadata": [1], "namespace": {}}\n',
        ":::MLLOG " + "[" * 100_000 + "\n",
        ':::MLLOG {"key": "a", "value": ' + "[" * 5000 + "]" * 5000 + "}\n",
        ":::MLL 1.2.3 run_start: {}\n:::MLL 1 run_start: nothing\n",
        ":::MLPv0.5.0 resnet 1.2.3 (a:1) run_start\n:::MLPv0.5.0 resnet 1 (a:" + "1" * 5000 + ") run_start\n",
        "MLPerf: resnet [99/99/99 99:99:99], run_start\n",
        "::::MLLOG:::MLLOG:::MLL:::ML\n" * 3,
    ],
)
def test_foreign_text_never_raises(text: str, tmp_path: Path) -> None:
    for event in events_of(text, tmp_path):
        assert event.time_s is None or abs(event.time_s) < float("inf")
    assert read_run(tmp_path / "result_0.txt").minutes is None


def test_a_line_without_end_takes_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    with path.open("wb") as file:
        file.write(mllog("run_start").encode())
        file.write(b":::MLLOG {")
        for _ in range(64):
            file.write(b"x" * MAX_LINE)
        file.write(b"\n" + mllog("seed", 3).encode())
    tracemalloc.start()
    found = [(event.key, event.line) for event in read_events(path)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [("run_start", 1), ("seed", 3)]
    assert peak < 12 * MAX_LINE


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    peaks = []
    for copies in (200, 2000):
        path = tmp_path / f"{copies}.txt"
        noise = "loss 0.1 images/s 2300\n" * 500
        path.write_text(resnet_v07() + (mllog("throughput", 1.0, START + 1) * 20 + noise) * copies)
        tracemalloc.start()
        read_run(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.2


START = 1_592_669_288_183


@pytest.mark.parametrize("piece", [':::MLLOG {"a', ":::MLL 1 a: {'", ":::MLPv0.5.0 a 1 (", ":::MLLOG {'", ":::ML"])
def test_a_line_full_of_damaged_events_is_read_in_linear_time(piece: str) -> None:
    text = piece * (MAX_LINE // len(piece))
    start = time.perf_counter()
    list(parse_line(text))
    assert time.perf_counter() - start < 20


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("utf-8", "replace")))
def test_random_text_after_each_mark(text: str) -> None:
    for mark in (":::MLLOG ", ":::MLL ", ":::MLPv0.5.0 ", "MLPerf: ", ":::MLLOG {"):
        for event in parse_line(mark + text):
            assert isinstance(event.key, str)


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), dialect=st.sampled_from(["v0.5", "v0.7"]))
def test_mutated_logs_are_refused_or_right(seed: int, dialect: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = resnet_v07(40.0) if dialect == "v0.7" else resnet_v05(134.0)
    original = text.encode()
    mutant = mutate(original, random.Random(seed))
    path = tmp_path_factory.mktemp("mutant") / "result_0.txt"
    check_mutant(original, mutant, 40.0 if dialect == "v0.7" else 134.0, path)


def test_events_are_plain_data(tmp_path: Path) -> None:
    event = events_of(mllog("seed", 1), tmp_path)[0]
    assert json.dumps([event.time_s, event.key, event.value, dict(event.metadata)])
    with pytest.raises(AttributeError):
        event.key = "other"  # type: ignore[misc]


def test_line_numbers_are_right_wherever_a_block_of_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_CHUNK", 1000)
    rng = random.Random(3)
    lines = []
    for part in range(40):
        share = rng.choice([0.0, 0.05, 0.9, 1.0])
        lines += [mllog("seed", part) if rng.random() < share else "x" * rng.randint(0, 90) + "\n" for _ in range(30)]
    expected = [(number, line) for number, line in enumerate(lines, 1) if ":::ML" in line]
    path = tmp_path / "result_0.txt"
    path.write_text("".join(lines))
    found = [(event.line, event.value) for event in read_events(path)]
    assert found == [(number, json.loads(line[9:])["value"]) for number, line in expected]


HEAD = ':::MLLOG {"namespace": "", "time_ms": '
REST = ', "event_type": "POINT_IN_TIME", "key": "init_start", "value": null, "metadata": {"lineno": 1}}'


@pytest.mark.parametrize(
    "again",
    [
        HEAD + "1652461536214" + REST,
        "0: " + HEAD + "1652461536214" + REST,
        HEAD + "0652461536214" + REST,
        HEAD + "-652461536214" + REST,
        HEAD + "165246153621.5" + REST,
        HEAD + "16524615362x4" + REST,
        HEAD + "1652461536.21" + REST,
        HEAD.replace('""', '"a"') + "1652461536214" + REST,
        HEAD + "1652461536214" + REST + HEAD + "1652461536215" + REST,
        "MLPerf: resnet [06/13/19 00:30:56], run_start " + HEAD + "1652461536214" + REST,
        HEAD + "1652461536214" + REST + " MLPerf: resnet [06/13/19 00:30:56], run_start",
        ':::MLLOG {"key": "a", "value": {"namespace": "", "time_ms": 1652461536214' + REST + "}",
    ],
)
@pytest.mark.parametrize(
    "before",
    [
        HEAD + "1652461536213" + REST,
        HEAD + "1652461536213" + REST[:-1] + ', "time_ms": 1000}',
        HEAD + "1652461536213" + REST[:-1] + ', "time\\u005fms": 1000}',
        HEAD + "1652461536213" + REST[:-1] + ', "namespace": "b"}',
    ],
)
def test_a_line_is_read_the_same_whatever_was_read_before(before: str, again: str, tmp_path: Path) -> None:
    rest = before[len(HEAD) + 13 :]
    again = again.replace(REST, rest)
    alone = list(parse_line(again, 2))
    read = events_of(f"{before}\n{again}\n", tmp_path)
    assert read[0] == next(parse_line(before, 1))
    assert read[1:] == alone


@settings(max_examples=300, deadline=None)
@given(
    prefix=st.sampled_from(["", "0: ", "[1]:::M", "MLPerf: ", "é \ufffd"]),
    suffix=st.sampled_from(["", "\r", " x", ":::ML", HEAD + "1", "MLPerf: a [", "\udc80"]),
    metadata=st.dictionaries(st.sampled_from(["lineno", "a"]), st.none() | st.integers() | st.text(max_size=5)),
)
def test_the_short_way_through_a_line_is_the_long_way(
    prefix: str, suffix: str, metadata: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    line = prefix + mllog("seed", None, **metadata).rstrip("\n") + suffix
    data = line.encode("utf-8", "surrogateescape")
    path = tmp_path_factory.getbasetemp() / "short.txt"
    path.write_bytes(data + b"\n" + data + b"\n")
    damaged: list[int] = []
    long = [list(parse_line(data.decode("utf-8", "replace"), number)) for number in (1, 2)]
    assert list(read_events(path, lambda number, _: damaged.append(number))) == [*long[0], *long[1]]
    assert damaged.count(1) == damaged.count(2)


def test_many_seeds_are_read_in_linear_time(tmp_path: Path) -> None:
    taken = {}
    for name, seeds in (("one", [1] * 30_000), ("distinct", range(30_000))):
        path = tmp_path / f"{name}.txt"
        path.write_text("".join(mllog("seed", seed) for seed in seeds))
        start = time.process_time()
        run = read_run(path)
        taken[name] = time.process_time() - start
        assert len(run.seeds) == min(len(set(seeds)), 4096)
    assert taken["distinct"] < 4 * taken["one"]
