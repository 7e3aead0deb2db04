"""DLRM: preparing Criteo's logs, the step against a plain model, exact AUC, ranks, resume and bad input."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.dlrm import blocks, criteo, events, writer
from benchmarks.dlrm.placement import place
from benchmarks.dlrm.pytorch.config import Config
from encore import catalogue, configuration, data, paths
from tests import preparing
from tests.conftest import Encore, evaluations, losses, only_run, quality, records
from tests.trainings import BareRuns, assert_resumed, bare_runs, exported, steps_so_far, write_small_config

CRITEO = paths.ROOT.parent / "shared" / "data" / "criteo.tar.xz"
CONSTANT_RATE_LOSS = 0.5269  # log loss on the sample's test rows of always giving the training rows' rate of clicks


@pytest.fixture(scope="module")
def clicks(pytorch_python: Path, toy: Callable[[str], Path]) -> Path:
    return toy("dlrm")


prepare = partial(preparing.here, "dlrm")


def row(number: int) -> str:
    # A row of Criteo's format that depends on its number.
    numbers = [str(number % (column + 2) - 1) if number % 5 else "" for column in range(13)]
    hashes = [f"{(number * 7919 + column) % (40 + column):08x}" for column in range(26)]
    return "\t".join([str(number % 3 // 2), *numbers, *hashes]) + "\n"


def write_days(folder: Path, days: int, rows: int) -> None:
    folder.mkdir()
    for day in range(days):
        text = "".join(row(day * rows + number) for number in range(rows))
        (folder / f"day_{day}").write_text(text, encoding="ascii")


# -- parsing, placement ----------------------------------------------------------------------


LIMIT = 40_000_000


def test_text_is_parsed_as_field_by_field() -> None:
    generator = np.random.default_rng(0)
    lines = []
    for _ in range(500):
        numbers = [str(n) if n % 7 else "" for n in generator.integers(-3, 10 ** generator.integers(1, 9), 13)]
        hashes = [format(int(h), "x") if h % 5 else "" for h in generator.integers(0, 2**32, 26)]
        lines.append("\t".join([str(int(generator.integers(2))), *numbers, *hashes]))
    text = ("\n".join(lines[:250]) + "\n" + "\r\n".join(lines[250:]) + "\r\n").encode()
    expected = [
        [int(f[0]), *(int(x or 0) for x in f[1:14]), *(int(x or "0", 16) % LIMIT for x in f[14:])]
        for f in (line.split("\t") for line in lines)
    ]
    found = criteo.parse(text, LIMIT)
    assert (found.lines, found.malformed, found.first_malformed) == (500, 0, -1)
    assert found.columns.T.tolist() == expected


GOOD = "1" + "\t5" * 13 + "\tab" * 26
LINES = {
    "label 2": "2" + GOOD[1:],
    "no label": GOOD[1:],
    "a field short": GOOD[:-3],
    "a field long": GOOD + "\tab",
    "negative id": GOOD[:-2] + "-5",
    "nine digits": GOOD[:-2] + "123456789",
    "no hexadecimal": GOOD[:-2] + "xy",
    "no integer": GOOD.replace("5", "a", 1),
    "larger than 32 bits": GOOD.replace("5", "4294967296", 1),
    "sign alone": GOOD.replace("5", "-", 1),
    "empty": "",
}


def test_malformed_lines_are_counted_and_skipped() -> None:
    for name, line in LINES.items():
        found = criteo.parse(f"{GOOD}\n{line}\n{GOOD.replace('5', '-2', 1)}\n".encode(), LIMIT)
        assert (found.lines, found.malformed, found.first_malformed) == (3, 1, 1), name
        assert found.columns[1].tolist() == [5, -2]


# Rows of the tables, as NVIDIA's v0.7 submission has them in dlrm/config/mlperf_40m.limit.json.
SUBMITTED_SIZES = (
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
    *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16, 40])
def test_placement_is_balanced(ranks: int) -> None:
    placed = place(SUBMITTED_SIZES, ranks)
    assert sorted(table for tables in placed for table in tables) == list(range(26))
    # What a rank looks up, sends and updates is in proportion to its tables.
    assert all(abs(len(tables) - 26 / ranks) < 1 for tables in placed)
    rows = [sum(SUBMITTED_SIZES[table] for table in tables) for tables in placed]
    alone = ranks >= 8
    assert max(rows) < max(SUBMITTED_SIZES) + 100_000 if alone else max(rows) < 1.4 * sum(SUBMITTED_SIZES) / ranks


def test_placement_keeps_within_memory() -> None:
    assert [len(tables) for tables in place([10, 3, 3, 3], 2)] == [2, 2]
    # Two tables each would need 13 rows on the first rank.
    assert place([10, 3, 3, 3], 2, row_bytes=4, memory=40) == ((0,), (1, 2, 3))
    with pytest.raises(Problem, match=r"512\.0 GB on the fullest of 8 ranks") as found:
        place((10**9, *[5] * 25), 8, 512, 36e9)
    assert "lower --index-limit" in str(found.value)
    with pytest.raises(Problem, match="use more ranks"):
        place([10**7] * 26, 1, 512, 36e9)


def test_learning_rate_is_the_submitted_one() -> None:
    choice = catalogue.choose("dlrm")
    system = catalogue.find_system(choice, "dgxa100", "v0.7")
    config = Config(**configuration.resolve(choice, system, 1, 8, []).plain())
    found = [events.learning_rate(config, step) for step in (0, 1374, 2749, 49314, 49315, 63200, 77086, 90000)]
    # Its LearningRateScheduler counts the first step as 1.
    assert found == pytest.approx([24 / 2750, 12, 24, 24, 24 * (27771 / 27772) ** 2, 6, 0, 0])


# -- preparing -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_days_are_split_shuffled_and_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_days(tmp_path / "raw", 3, 1501)
    prepare(tmp_path / "raw", "-o", tmp_path / "one")
    facts = preparing.passport(tmp_path / "one")
    assert {split: each["count"] for split, each in facts["splits"].items()} == {"train": 3002, "val": 751}
    assert facts["name"] == "criteo-3-days"
    # Every value occurs, and each table has a row for each.
    assert facts["facts"]["table_sizes"] == [40 + column for column in range(26)]
    assert preparing.called("dlrm", tmp_path / "raw", "-o", tmp_path / "two", "--workers", 2)[0] == 0
    assert preparing.passport(tmp_path / "two")["id"] == facts["id"], "workers do not change the data"
    prepare(tmp_path / "raw", "-o", tmp_path / "three", "--seed", 1)
    assert preparing.passport(tmp_path / "three")["id"] != facts["id"]
    prepare("--verify", tmp_path / "one")
    # Each row is there once, as field by field: the label, log(1 + x), the rank of its values among the table's.
    stored = []
    for split, rows in (("train", 3002), ("val", 751)):
        content = blocks.open_blocks(tmp_path / "one" / f"{split}.bin", rows)
        stored.append(content.transpose(1, 0, 2).reshape(blocks.COLUMNS, -1)[:, :rows])
    fields = [row(number)[:-1].split("\t") for number in range(3753)]
    expected = np.array([[int(each[0]), *(int(x, 16) for x in each[14:])] for each in fields])
    numbers = np.log1p(np.array([[max(0, int(x or 0)) for x in each[1:14]] for each in fields], np.float32))
    for part, found in zip((slice(0, 3002), slice(3002, None)), stored, strict=True):
        table = np.column_stack((found[0], found[14:].T, found[1:14].view(np.float32).T))
        wanted = np.column_stack((expected[part], numbers[part]))
        assert sorted(map(tuple, np.float32(table))) == sorted(map(tuple, np.float32(wanted)))
        assert not np.array_equal(np.float32(table), np.float32(wanted)), "in random order"


def test_the_disk_has_room_for_all_rows_before_one_is_written(tmp_path: Path) -> None:
    blocks.create(tmp_path / "train.bin", 5000)
    found = (tmp_path / "train.bin").stat()
    # Without it a full disk kills the worker that writes through its memory map.
    assert found.st_blocks * 512 >= found.st_size == blocks.file_bytes(5000)


def test_rare_values_share_a_row(tmp_path: Path) -> None:
    write_days(tmp_path / "raw", 2, 300)
    prepare(tmp_path / "raw", "-o", tmp_path / "to", "--frequency-threshold", 8)
    # 300 training rows: values of a table of 40 come 7 or 8 times, those of one of 65 4 or 5 times.
    assert preparing.passport(tmp_path / "to")["facts"]["table_sizes"] == [21, 14, 7] + [1] * 23
    kept = np.array([3, 5, 9])
    for values in (np.array([9, 4, 3]), np.tile([9, 4, 3], 10)):  # few values for the limit, and many
        plan = writer.Plan(tmp_path, 100, 8, 0)
        assert writer.indices_of(values, kept, plan).tolist() == [3, 0, 1] * (len(values) // 3)
        assert writer.indices_of(values, kept[:0], plan).tolist() == [0] * len(values)
        assert writer.indices_of(kept, kept, plan._replace(threshold=0)).tolist() == [0, 1, 2]


@pytest.mark.slow
def test_preparation_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    write_days(tmp_path / "raw", 6, 1000)
    prepare(tmp_path / "raw", "-o", tmp_path / "whole")
    command = [sys.executable, "-m", "benchmarks.dlrm.prepare", "--workers", "1"]
    command += [str(tmp_path / "raw"), "-o", str(tmp_path / "to")]
    with subprocess.Popen(command, cwd=paths.ROOT, stderr=subprocess.DEVNULL) as child:
        while not list((tmp_path / "to").glob("parts/train-*.json")):
            assert child.poll() is None, "it ended before it could be stopped"
            time.sleep(0.01)
        child.kill()
    assert not (tmp_path / "to" / "dataset.json").exists()
    prepare(tmp_path / "raw", "-o", tmp_path / "to")
    assert preparing.passport(tmp_path / "to")["id"] == preparing.passport(tmp_path / "whole")["id"]
    assert "nothing to do" in prepare(tmp_path / "raw", "-o", tmp_path / "to")


@pytest.mark.slow
def test_bad_sources_are_refused(tmp_path: Path) -> None:
    raw, to = tmp_path / "raw", ("-o", tmp_path / "to")
    write_days(raw, 3, 200)
    cut = raw / "day_1"
    whole = cut.read_text(encoding="ascii")
    cut.write_text(whole[:-50], encoding="ascii")
    assert "day_1 ends within a row" in prepare(raw, *to, code=2)
    cut.unlink()
    assert "day_1 missing below day_2" in prepare(raw, *to, code=2)
    # Negative ids, as a wrong export of signed hashes has them.
    cut.write_text(whole.replace("\t000000", "\t-00000"), encoding="ascii")
    assert "are malformed; the first is line 1 of" in prepare(raw, *to, code=2)
    prepare(raw, *to, "--skip-corrupt")
    assert preparing.passport(tmp_path / "to")["facts"]["malformed"] == 200
    assert "holds the data set criteo-3-days, made from another source" in prepare(raw, *to, "--seed", 5, code=2)
    (tmp_path / "empty").mkdir()
    assert "no day_0 and no train.txt" in prepare(tmp_path / "empty", *to, code=2)
    named = prepare(raw, *to, "--name", "criteo-1tb", "--overwrite", "--skip-corrupt", code=2)
    assert "4,195,197,692 + 89,137,319" in named


def list_source(folder: Path) -> criteo.Source:
    return criteo.list_source(folder, None, lambda size: None, lambda text: None)


def test_how_a_text_ends_does_not_matter(tmp_path: Path) -> None:
    text = "".join(row(number) for number in range(70))
    for content in (text, text[:-1], text + "\n" * 70_000, text + "\r\n\r\n", text[:-1] + "\r"):
        (tmp_path / "train.txt").write_bytes(content.encode())
        source = list_source(tmp_path)
        splits = [
            b"".join(line for part in criteo.ranges(split, 1000) for line in criteo.read_lines(part))
            for split in (source.train, source.val)
        ]
        assert [split.count(b"\n") for split in splits] == [60, 10]
        assert b"".join(splits).replace(b"\r", b"") == text.encode()


def test_a_malformed_row_has_the_number_of_its_line_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_BYTES", 2000)
    rows = [row(number) for number in range(70)]
    for number in (41, 65):  # in a later part of training, and in the rows that are held out
        (tmp_path / "train.txt").write_text("".join([*rows[:number], "x\n", *rows[number + 1 :]]))
        parts = writer.cut(list_source(tmp_path), writer.Plan(tmp_path, 100, 0, 0))
        for part in (*parts["train"], *parts["val"]):
            writer.parse_part(part, lambda done, size: None)
        with pytest.raises(Problem, match=f"the first is line {number + 1} of {tmp_path / 'train.txt'}"):
            writer.check_malformed(parts, False, Progress(as_json=True))


def test_what_cannot_be_evaluated_or_read_is_refused_and_what_is_not_used_reported(tmp_path: Path) -> None:
    rows, to = [row(number) for number in range(70)], ("-o", f"{tmp_path}-to")
    text = tmp_path / "train.txt"
    text.write_text("".join([*rows[:60], *("0" + each[1:] for each in rows[60:])]))
    (tmp_path / "test.txt").write_text("".join(each[2:] for each in rows))
    said = prepare(tmp_path, *to, code=2)
    assert f"all rows to evaluate on, in {text}, have label 0" in said
    assert f"{tmp_path / 'test.txt'} is not used: its first row has 39 fields" in said
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_bytes(gzip.compress(text.read_bytes()))
        with pytest.raises(Problem, match=f"{tmp_path / name} is compressed by gzip.*") as found:
            list_source(tmp_path)
        assert f"gunzip {tmp_path / name}.gz" in str(found.value)
        text.write_text("".join(rows))
    (tmp_path / "train.txt").rename(tmp_path / "day_0.gz")
    (tmp_path / "day_0.gz").write_bytes(gzip.compress(b"rows"))
    with pytest.raises(Problem, match=r"day_0\.gz is compressed"):
        list_source(tmp_path)


# -- training ------------------------------------------------------------------------------------------


def write_config(path: Path, ranks: int, *settings: str) -> Path:
    # config.json of the small system with a fixed seed.
    return write_small_config(path, "dlrm", ranks, ("log_interval=1", *settings))


runs = bare_runs("benchmarks.dlrm.pytorch.train", "clicks", write_config)
SHORT = ("epochs=2", "quality_target=1.0")


def test_two_ranks_train_like_one(runs: BareRuns) -> None:
    metrics = [runs.uninterrupted(ranks, *SHORT) / "metrics.jsonl" for ranks in (1, 2)]
    one, two = map(losses, metrics)
    assert len(one) == 256
    # The same rows and weights: sums in another order are the only difference, and training lets it grow.
    assert two[:128] == pytest.approx(one[:128], abs=1e-4)
    assert two == pytest.approx(one, abs=5e-3)
    found = [quality(evaluations(each)[-1]) for each in metrics]
    assert found[1] == pytest.approx(found[0], abs=1e-3)


@pytest.mark.parametrize(
    ("ranks", "settings", "stops"),
    [
        (2, (), (150,)),
        # So slow an evaluation that the second signal comes within it.
        (1, ("eval_batch_size=4", "cache_eval_data=false"), (64, 128)),
    ],
)
def test_stopped_and_resumed_run_is_an_uninterrupted_one(
    runs: BareRuns, tmp_path: Path, ranks: int, settings: tuple[str, ...], stops: tuple[int, ...]
) -> None:
    output, settings = tmp_path / "stopped", (*SHORT, *settings)
    metrics = output / "metrics.jsonl"
    for steps in stops:
        runs.stop(output, ranks, *settings, once=lambda steps=steps: steps_so_far(metrics) >= steps)  # type: ignore[misc]
        assert {path.name[:5] for path in (output / "checkpoint").iterdir()} == {"step_"}
    assert_resumed(runs.end(output, ranks, *settings), runs.uninterrupted(ranks, *settings))
    assert len(evaluations(metrics)) == 2


def test_bad_data_is_refused(runs: BareRuns, tmp_path: Path) -> None:
    def refusal(folder: Path, ranks: int = 1, code: int = 2) -> str:
        output = tmp_path / f"{folder.name}-{ranks}"
        words = replace(runs, folder=folder).refused(output, ranks, code=code)
        # Only the rows themselves are looked at after the clock has started.
        assert (output / "result.txt").exists() == (code == 1)
        return words

    def changed(name: str) -> Path:
        return Path(shutil.copytree(runs.folder, tmp_path / name))

    folder = changed("negative")
    with (folder / "train.bin").open("r+b") as file:
        file.seek((1 + 13 + 4) * 1024 * 4)  # the first index of the fifth table
        file.write((-7).to_bytes(4, "little", signed=True))
    assert "train.bin has indices from -7 to" in refusal(folder, code=1)
    folder = changed("truncated")
    os.truncate(folder / "train.bin", (folder / "train.bin").stat().st_size - 4096)
    assert "train.bin has" in refusal(folder, 2)
    folder = changed("huge")
    facts = preparing.passport(folder)
    facts["facts"]["table_sizes"][0] = 10**13
    (folder / "dataset.json").write_text(json.dumps(facts), encoding="utf-8")
    told = refusal(folder)
    assert "the embedding tables need 640,000.0 GB on the fullest of 1 ranks" in told
    assert "lower --index-limit" in told


def test_small_run_reaches_the_target_and_passes_the_checker(encore: Encore, clicks: Path, tmp_path: Path) -> None:
    done = encore("run", "dlrm", "2", "--data", str(clicks), "--results", str(tmp_path), "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = only_run(tmp_path)
    checked = encore("check", str(folder))
    assert "0 errors" in checked.stdout, checked.stdout
    keys = [json.loads(line[9:]) for line in (folder / "result_0.txt").read_text().splitlines()]
    values = {each["key"]: each["value"] for each in keys}
    assert values["eval_samples"] == 16384
    assert values["eval_accuracy"] >= 0.8025
    # The tables of two ranks become one.
    assert exported(encore, folder, tmp_path / "exported")["reached"]


def test_bench_shows_every_kind(encore: Encore, clicks: Path) -> None:
    done = encore("bench", "dlrm", "--data", str(clicks), "--steps", "5", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not CRITEO.exists(), reason="the Criteo sample is not on this machine")
def test_real_clicks_beat_the_constant_rate(pytorch_python: Path, encore: Encore, tmp_path: Path) -> None:
    with tarfile.open(CRITEO) as archive:
        archive.extractall(tmp_path, filter="data")
    raw = tmp_path / "criteo" / "wide_resdnn" / "criteo"
    folder = tmp_path / "prepared"
    data.prepare("dlrm", folder, data.Preparation(source=raw), pytorch_python)
    command = ("run", "dlrm", "1", "--system", "criteo-sample", "--seed", "1")
    done = encore(*command, "--data", str(folder), "--results", str(tmp_path / "results"))
    assert done.returncode == 0, done.stdout + done.stderr
    (evaluation,) = records(only_run(tmp_path / "results") / "experiment_0" / "metrics.jsonl", "eval")
    assert evaluation["log_loss"] < CONSTANT_RATE_LOSS - 0.03
