"""Digests of submitted sets, and the curves that logs and digests have in common."""

import csv
import json
import lzma
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.results.compare import digest
from encore.results.compare.compare import compare_with
from encore.results.compare.digest import main
from encore.results.compare.explain import explain
from encore.results.compare.nearest import AS_GIVEN
from encore.results.compare.sides import Side, load_side, load_sides
from encore.results.logs.run_log import read_run
from encore.results.logs.timing import MOST_POINTS, curve_of
from encore.results.published import published
from encore.results.published.published import load_published, select
from encore.results.published.systems import cells_at
from encore.results.rules import ROUNDS
from tests.results.result_logs import resnet_v07, write_set


def test_long_curve_is_thinned_to_what_a_plot_can_show(tmp_path: Path) -> None:
    rising = (*(0.7595 * number / 500 for number in range(500)), 0.7605)
    curve = curve_of(read_run(write_set(tmp_path, [resnet_v07(100.0, quality=rising)]) / "result_0.txt"))
    assert len(curve.minutes) == len(curve.values["value"]) == MOST_POINTS
    assert (curve.values["value"][0], curve.values["value"][-1]) == (0.0, 0.7605)
    assert list(curve.minutes) == sorted(set(curve.minutes))


def _checkout(folder: Path) -> Path:
    """A result repository with two systems, and a log that is nobody's submission."""
    submitter = folder / "training_results_v0.7" / "Ours"
    texts = [resnet_v07(40.0 + number, seed=number % 4) for number in range(5)]
    write_set(submitter / "results" / "box" / "resnet", texts)
    missed = resnet_v07(44.0, quality=(0.3, 0.75), status="aborted")
    write_set(submitter / "results" / "other_box" / "resnet", [*texts[:4], missed])
    write_set(submitter / "benchmarks" / "resnet" / "results" / "box", texts[:1])
    return submitter.parent


NAMES = ("round", "benchmark", "length_unit", "runs", "converged", "required", "missing", "division", "targets")


def _assert_same(kept: Side, read: Side) -> None:
    """The two have the same figures, to what a digest keeps of them."""
    assert [getattr(kept, name) for name in NAMES] == [getattr(read, name) for name in NAMES]
    for ours, theirs in ((kept.score, read.score), (kept.lengths, read.lengths), (kept.per_length, read.per_length)):
        assert (ours and (ours.count, ours.trimmed)) == (theirs and (theirs.count, theirs.trimmed))
        if ours and theirs:
            assert ours.estimate == pytest.approx(theirs.estimate, rel=1e-6)
            assert (ours.spread or 0.0) == pytest.approx(theirs.spread or 0.0, rel=1e-4, abs=1e-5 * ours.estimate)
    assert kept.phases == pytest.approx(read.phases, rel=1e-5)
    mine, others = ([(curve.minutes, *curve.values.values()) for curve in side.curves] for side in (kept, read))
    assert [list(curve.values) for curve in kept.curves] == [list(curve.values) for curve in read.curves]
    assert [pytest.approx(each, rel=1e-5) for curve in mine for each in curve] == [e for curve in others for e in curve]
    assert kept.hyperparameters == json.loads(json.dumps(read.hyperparameters))


def test_digest_is_the_side_of_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = _checkout(tmp_path)
    assert main([str(root), "-o", str(tmp_path / "a")]) == 0
    assert "left out: Ours/benchmarks/resnet/results/box: not the logs of a submission" in capfd.readouterr().err
    monkeypatch.setattr(published, "DIGESTS", tmp_path / "a" / "digests")
    published.lines_of.cache_clear()
    sides = {side.label: side for side in digest.digests("v0.7")}
    published.lines_of.cache_clear()
    assert list(sides) == ["v0.7/Ours/box", "v0.7/Ours/other_box"]
    with (tmp_path / "a" / "published.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["submitter"] == "Ours"]
    assert [(row["system"], row["runs"], row["converged"], row["score_minutes"]) for row in rows] == [
        ("box", "5", "5", "42.0000"),
        ("other_box", "5", "4", "42.0000"),
    ]
    for name, side in sides.items():
        _assert_same(side, load_side(root / "Ours" / "results" / name.rpartition("/")[2] / "resnet"))


def test_same_logs_give_the_same_bytes(tmp_path: Path) -> None:
    root = _checkout(tmp_path)
    for name in ("a", "b"):
        main([str(root), "-o", str(tmp_path / name)])
    first, second = (tmp_path / name / "digests" / "v0.7.jsonl.xz" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    entry = json.loads(lzma.decompress(first.read_bytes()).splitlines()[1])
    assert entry["seeds"] == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("round_", sorted(file.name.partition(".jsonl")[0] for file in published.DIGESTS.iterdir()))
def test_every_published_set_has_a_digest_with_its_score(round_: str) -> None:
    published.lines_of.cache_clear()
    started = time.process_time()
    lines = published.lines_of(round_)
    assert time.process_time() - started < 0.2
    sides = {(side.label, side.benchmark): side for side in digest.digests(round_)}
    assert len(sides) == len(lines) - 1 == json.loads(lines[0])["sets"]
    for cell in load_published():
        if cell.round == round_ and cell.benchmark is not None and cell.score_minutes is not None:
            side = sides[cell.name, cell.benchmark]
            assert side.score is not None, cell.name
            # A set with a log that cannot be judged has the mean of the others; one row counts a temporary file.
            exact = side.score_is_official and side.runs == cell.runs
            limit = 0.001 if exact else 0.05 * cell.score_minutes
            assert side.score.estimate == pytest.approx(cell.score_minutes, abs=limit), cell.name
    for side in sides.values():
        if side.score is None or not side.score_is_official:
            continue
        on_the_clock = sum(side.phases.get(name, 0.0) for name in ("start_s", "train_s", "evaluate_s"))
        assert on_the_clock == pytest.approx(side.score.estimate * 60, rel=2e-5), side.label
        # The length of some of those runs is not in their logs.
        if side.lengths is not None and side.per_length is not None and side.label != "v0.7/Google/tpu-v4-128-TF":
            product = side.lengths.estimate * side.per_length.estimate
            assert product == pytest.approx(side.score.estimate, rel=1e-6), side.label


def test_digests_are_small() -> None:
    assert sum(path.stat().st_size for path in published.DIGESTS.iterdir()) < 6 << 20


def test_digests_are_what_the_logs_say(public_logs: Path) -> None:
    sides = {(side.label, side.benchmark): side for round_ in ROUNDS[:3] for side in digest.digests(round_)}
    same = 0
    for read in load_sides(public_logs):
        cell = cells_at(read.folder or public_logs, read.round, read.benchmark)[0]
        kept = sides[cell.name, read.benchmark]
        if kept.runs == read.runs:
            _assert_same(kept, read)
            same += 1
    assert same == 47


# --- every round and benchmark --------------------------------------------------------------------------------

MAY_2023 = 1_683_000_012_345


def _gpt3(folder: Path, longer: float = 1.0) -> Path:
    """A set of v3.0 of a benchmark that Encore cannot train."""
    return write_set(
        folder,
        [
            resnet_v07(
                minutes * longer,
                quality=(2.8, 2.68),
                start_ms=MAY_2023 + number,
                submission_benchmark="gpt3",
                gradient_accumulation_steps=1,
            )
            for number, minutes in enumerate((64.1, 64.3, 64.2))
        ],
    )


def test_two_sets_of_any_benchmark_are_compared(tmp_path: Path) -> None:
    ours, theirs = _gpt3(tmp_path / "ours", 1.3), _gpt3(tmp_path / "theirs")
    result = CliRunner().invoke(app, ["compare", str(ours), str(theirs), "--json"])
    found = json.loads(result.stdout)
    assert found["benchmark"] == "gpt3"
    assert found["verdict"] != "not comparable", found["reasons"]
    assert [factor["ratio"] for factor in found["factors"]] == pytest.approx([1.3, 1.3, 1.0], rel=1e-3)
    assert found["factors"][0]["interval"] is not None


def test_other_is_one_set_of_logs_or_a_submission(tmp_path: Path) -> None:
    ours = _gpt3(tmp_path / "ours")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "result_0.txt").write_bytes(b"\x00\xff:::MLLOG {" * 1000)
    result = CliRunner().invoke(app, ["compare", str(ours), str(tmp_path / "none")])
    assert "unknown submission" in str(result.exception)
    result = CliRunner().invoke(app, ["compare", str(ours), str(tmp_path / "junk")])
    assert result.exit_code == 0
    assert "not comparable" in result.stdout


def test_a_submission_of_a_late_round_has_spread_phases_system_and_curves() -> None:
    """v1.0 and later had a score alone: no interval, no confidence, nothing to explain."""
    cells = {cell.name: cell for cell in select(load_published(), benchmark="bert", round_="v4.1")}
    ours, theirs = (
        digest.submission(cells[f"v4.1/NVIDIA/{name}"]) for name in ("eos_ngc23.04_pytorch", "eos_n8_ngc23.04_pytorch")
    )
    assert len(ours.curves) == ours.runs == 10
    assert compare_with(ours, theirs, AS_GIVEN).score.interval
    assert {"phases", "hyperparameters"} <= {each.area for each in explain(ours, theirs).differences}
