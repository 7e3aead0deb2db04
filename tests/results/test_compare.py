"""Statistics against known answers and by simulation, and the verdicts of comparisons."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from encore import paths
from encore.cli.app import app
from encore.errors import EncoreError
from encore.results.compare import Comparison, Verdict, compare, compare_path
from encore.results.explain import explain
from encore.results.published import DATA, load_published
from encore.results.score import find_sets
from encore.results.sides import load_side, load_sides
from encore.results.statistics import Sample, further_runs, interval, is_significant, ratio_interval, z_score
from tests.results.result_logs import START_MS, resnet_v05, resnet_v07, write_set

A100 = "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"


def a100_run(
    folder: Path,
    minutes: float = 39.8,
    runs: int = 5,
    spread: float = 0.4,
    epochs: int = 40,
    **changed: object,
) -> Path:
    """Return a set of runs that says it is NVIDIA's DGX A100: evaluations every 4 epochs, target met at the last."""
    quality = (*(0.3 + 0.01 * n for n in range(epochs // 4 - 1)), 0.7605)
    settings: dict[str, object] = {
        "submission_org": "MyLab",
        "submission_platform": "1xNVIDIA DGX A100",
        "global_batch_size": 3264,
        **changed,
    }
    texts = [
        resnet_v07(
            minutes + spread * (n - (runs - 1) / 2),
            quality=quality,
            start_ms=START_MS + 10**7 * n,
            **settings,  # type: ignore[arg-type]
        )
        for n in range(runs)
    ]
    return write_set(folder, texts)


# --- statistics -------------------------------------------------------------------------------------------


def test_interval_of_a_mean_is_students() -> None:
    values = [39.4, 40.1, 39.9, 40.6, 39.3, 41.0, 40.2]
    found = interval(Sample.of(values))
    assert found is not None
    expected = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert found == pytest.approx(expected, abs=0.02)


def test_spread_and_trimmed_mean_are_scipys() -> None:
    values = [18.3, 18.4, 18.5, 18.5, 18.6, 18.7, 18.4, 18.5, 23.2, 18.6]
    sample = Sample.of(values, trimmed=1)
    assert sample.estimate == pytest.approx(stats.trim_mean(values, 0.1))
    assert sample.spread == pytest.approx(stats.tstd(values))
    assert sample.cv == pytest.approx(stats.tstd(values) / stats.trim_mean(values, 0.1))


def test_z_score_by_hand() -> None:
    """(103 - 100) / (2 * sqrt(1/4 + 1/12))."""
    ours = Sample(estimate=103.0, spread=9.0, count=4)
    theirs = Sample(estimate=100.0, spread=2.0, count=12)
    assert z_score(ours, theirs) == pytest.approx(3 / (2 * math.sqrt(1 / 3)))
    assert z_score(ours, Sample(estimate=100.0, spread=None, count=5)) is None
    assert is_significant(2.3, 12)
    assert not is_significant(2.1, 12)


def test_further_runs_by_the_textbook() -> None:
    """A cv of 10 %, to 5 %: t(17) * 0.1 / sqrt(18) = 0.0497, t(16) * 0.1 / sqrt(17) = 0.0514."""
    assert further_runs(Sample(estimate=50.0, spread=5.0, count=5), 0.05) == 13
    assert further_runs(Sample(estimate=50.0, spread=5.0, count=18), 0.05) == 0
    assert further_runs(Sample(estimate=50.0, spread=None, count=1), 0.05) is None
    assert further_runs(Sample(estimate=1.0, spread=2.0, count=5), 0.05) is None


@pytest.mark.parametrize(("count", "trimmed", "level"), [(5, 1, 0.95), (10, 1, 0.95), (5, 1, 0.8), (3, 0, 0.95)])
def test_interval_covers_the_truth_as_often_as_it_says(count: int, trimmed: int, level: float) -> None:
    generator = np.random.default_rng(20201)
    sets = generator.normal(40.0, 1.0, (1500, count))
    found = [interval(Sample.of(list(values), trimmed), level) for values in sets]
    share = np.mean([span is not None and span[0] <= 40.0 <= span[1] for span in found])
    # Three standard errors of 1500 trials.
    assert share == pytest.approx(level, abs=3 * math.sqrt(level * (1 - level) / 1500))


@pytest.mark.parametrize(("ours", "theirs", "spread"), [(5, 5, (1.0, 1.0)), (3, 10, (1.0, 2.0)), (5, 10, (3.0, 0.5))])
def test_ratio_interval_covers_the_truth_at_least_as_often_as_it_says(
    ours: int, theirs: int, spread: tuple[float, float]
) -> None:
    """Unequal spreads: such an interval errs on the wide side (Behrens-Fisher)."""
    generator = np.random.default_rng(7)
    hits = []
    for _ in range(800):
        pair = (
            Sample.of(list(generator.normal(42.0, spread[0], ours)), trimmed=0),
            Sample.of(list(generator.normal(40.0, spread[1], theirs)), trimmed=1),
        )
        span = ratio_interval(*pair)
        assert span is not None
        hits.append(span[0] <= 42.0 / 40.0 <= span[1])
    assert 0.93 <= np.mean(hits) <= 0.99


def test_one_run_takes_the_spread_of_the_submission() -> None:
    theirs = Sample.of([39.0, 40.0, 41.0, 40.5, 39.5])
    alone = Sample.of([42.0])
    assert interval(alone) is None
    low, high = interval(alone.with_spread_of(theirs)) or (0.0, 0.0)
    assert theirs.cv is not None
    half = 42.0 * theirs.cv * stats.t.ppf(0.975, 4)
    assert (low, high) == pytest.approx((42 - half, 42 + half), rel=0.01)


# --- verdicts ---------------------------------------------------------------------------------------------


def verdict(folder: Path, name: str | None = A100) -> Comparison:
    return compare(load_side(folder), name)


def test_reproduced_with_both_factors(tmp_path: Path) -> None:
    found = verdict(a100_run(tmp_path))
    assert found.verdict is Verdict.REPRODUCED
    assert found.score is not None
    assert found.per_length is not None
    assert found.lengths is not None
    assert found.score.ratio == pytest.approx(39.8 / 39.7798, abs=1e-4)
    assert found.lengths.ratio == pytest.approx(40 / 41)
    product = (found.per_length.ratio or 0) * (found.lengths.ratio or 0)
    assert product == pytest.approx(found.score.ratio, rel=0.005)
    assert found.further_runs == 0
    assert found.confidence is not None
    assert found.confidence > 0.9


@pytest.mark.parametrize(
    ("minutes", "epochs", "expected"),
    [
        (30.0, 40, Verdict.FASTER),
        (60.0, 40, Verdict.SLOWER),
        (40.5, 40, Verdict.REPRODUCED),
        (54.6, 56, Verdict.CONVERGES_DIFFERENTLY),
        (27.3, 28, Verdict.CONVERGES_DIFFERENTLY),
    ],
)
def test_each_verdict(tmp_path: Path, minutes: float, epochs: int, expected: Verdict) -> None:
    assert verdict(a100_run(tmp_path, minutes, epochs=epochs)).verdict is expected


def test_runs_that_missed_are_not_converged(tmp_path: Path) -> None:
    folder = write_set(tmp_path, [resnet_v07(40.0, quality=(0.3, 0.7), start_ms=START_MS + n) for n in range(5)])
    found = verdict(folder)
    assert found.verdict is Verdict.NOT_CONVERGED
    assert any("target" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"submission_platform": "1xNVIDIA DGX-1"}, "run on V100, submitted on A100"),
        ({"submission_platform": "2xNVIDIA DGX A100"}, "run on 16 accelerators, submitted on 8"),
        ({"train_samples": 1500}, "trained on 1,500 samples"),
    ],
)
def test_what_is_not_the_same_kind_of_run_is_not_comparable(
    tmp_path: Path, changed: dict[str, object], why: str
) -> None:
    found = verdict(a100_run(tmp_path, **changed))  # type: ignore[arg-type]
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert why in found.reasons[0]
    assert found.score is not None, "and still gets the figures"


def test_another_target_is_not_comparable(tmp_path: Path) -> None:
    folder = write_set(tmp_path, [resnet_v05(134.0 + n) for n in range(5)])
    found = verdict(folder, "v0.6/NVIDIA/dgx1_ngc19.05_mxnet")
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert "different quality targets" in found.reasons[0]


def test_a_cpu_run_of_encore_is_not_comparable(tmp_path: Path) -> None:
    folder = a100_run(tmp_path, 0.3, runs=1, epochs=12, train_samples=1500, submission_platform="2 ranks")
    passport = {"round": "v0.7", "nodes": 1, "ranks_per_node": 2, "submission": "a CPU run: for trying"}
    (folder / "run.json").write_text(json.dumps(passport))
    (folder / "system.json").write_text(json.dumps({"accelerators_per_node": "0", "framework": "mxnet"}))
    found = compare(load_side(folder))
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert "CPU" in found.reasons[0]
    assert found.theirs is not None
    assert found.theirs.round == "v0.7"
    assert found.factors


def test_few_runs_are_compared_by_their_mean_and_it_is_said(tmp_path: Path) -> None:
    found = verdict(a100_run(tmp_path, runs=2))
    assert found.verdict is Verdict.REPRODUCED
    assert any("no official score" in caveat for caveat in found.caveats)


# --- finding the submission -------------------------------------------------------------------------------


def test_the_nearest_has_the_same_accelerator_and_count(tmp_path: Path) -> None:
    found = verdict(a100_run(tmp_path), None)
    assert found.theirs is not None
    assert found.theirs.label in (A100, "v0.7/Inspur/nf5488_mxnet")
    own = verdict(a100_run(tmp_path / "nvidia", submission_org="NVIDIA"), None)
    assert own.theirs is not None
    assert own.theirs.label == A100


def test_a_wrong_name_is_reported_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(EncoreError) as error:
        verdict(a100_run(tmp_path), "v0.7/NVIDIA/dgxa100_ngc20.06_mxnt")
    assert A100 in str(error.value)
    with pytest.raises(EncoreError, match="has no result of resnet"):
        verdict(tmp_path, "v0.7/NVIDIA/dgxa100_ngc20.06_pytorch")


def test_several_sets_are_reported(tmp_path: Path) -> None:
    a100_run(tmp_path / "a")
    a100_run(tmp_path / "b")
    with pytest.raises(EncoreError, match="2 sets of runs"):
        compare_path(tmp_path)


# --- the command ------------------------------------------------------------------------------------------


def test_command_prints_and_writes_json(tmp_path: Path) -> None:
    folder = str(a100_run(tmp_path))
    shown = CliRunner().invoke(app, ["compare", folder, "--with", A100])
    assert shown.exit_code == 0
    assert "reproduced" in shown.output
    assert "minutes per epoch" in shown.output
    found = json.loads(CliRunner().invoke(app, ["compare", folder, "--with", A100, "--json"]).output)
    assert found["verdict"] == "reproduced"
    assert found["submission"] == A100
    assert [factor["name"] for factor in found["factors"]] == [
        "time to the target", "minutes per epoch", "epochs to the target",
    ]  # fmt: skip
    strict = json.loads(
        CliRunner().invoke(app, ["compare", folder, "--with", A100, "--within", "0.1", "--json"]).output
    )
    assert strict["within"] == 0.001


# --- damaged input ----------------------------------------------------------------------------------------

BROKEN_NUMBERS = st.sampled_from(["0", "-1", "1e400", "NaN", "null", '"text"', "[]", "9" * 40, "1592669288183"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_logs_and_passports_raise_nothing(tmp_path: Path, data: st.DataObject) -> None:
    """Only EncoreError, whatever numbers stand in a log, a run.json or a system.json."""
    lines = resnet_v07(40.0, quality=(0.3, 0.5, 0.7605)).splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(["drop", "double", "number", "move"]))
        if change == "drop":
            lines[at] = ""
        elif change == "double":
            lines[at] *= 2
        elif change == "move":
            lines.append(lines[at])
        else:
            lines[at] = re.sub(r"(?<=: )[\d.]+", data.draw(BROKEN_NUMBERS), lines[at])
    (tmp_path / "result_0.txt").write_text("".join(lines))
    value = data.draw(BROKEN_NUMBERS)
    names = ("nodes", "ranks_per_node", "node", "environment", "configuration", "deviations", "data")
    passport = ", ".join(f'"{name}": {value}' for name in names)
    (tmp_path / "run.json").write_text(f'{{"round": "v0.7", {passport}}}')
    (tmp_path / "system.json").write_text(f'{{"accelerators_per_node": {value}, "number_of_nodes": {value}}}')
    try:
        side = load_side(tmp_path)
        found = compare(side)
        json.dumps(found.as_json())
        if found.theirs is not None:
            json.dumps(explain(side, found.theirs).as_json())
    except EncoreError:
        pass


# --- the public logs --------------------------------------------------------------------------------------

# The archive holds one log of five or ten of these: what one run comes to is no score.
INCOMPLETE = {
    ("v0.6/NVIDIA/dgx1_ngc19.05_pytorch", "maskrcnn"): Verdict.REPRODUCED,
    ("v0.6/NVIDIA/dgx1_ngc19.05_tensorflow", "minigo"): Verdict.REPRODUCED,
    ("v0.7/NVIDIA/dgx1_ngc20.06_pytorch", "maskrcnn"): Verdict.REPRODUCED,
    ("v0.7/NVIDIA/dgx1_ngc20.06_pytorch", "bert"): Verdict.NOT_CONVERGED,
    ("v0.7/NVIDIA/dgxa100_ngc20.06_pytorch", "bert"): Verdict.REPRODUCED,
}


def test_every_published_cell_is_reproduced_by_its_own_logs(public_logs: Path) -> None:
    complete = 0
    for side in load_sides(public_logs):
        found = compare(side)
        assert found.theirs is not None
        cell = (found.theirs.label, side.benchmark)
        assert found.theirs.label == "/".join((side.folder or Path()).parts[-4:-1])
        if cell in INCOMPLETE:
            assert found.verdict is INCOMPLETE[cell], cell
            continue
        complete += 1
        assert found.verdict is Verdict.REPRODUCED, cell
        for factor in found.factors:
            assert factor.ratio == pytest.approx(1.0, abs=5e-4), (cell, factor.name)
    assert complete == 47


def test_the_logs_are_found_without_their_folder_s_name(public_logs: Path, tmp_path: Path) -> None:
    """Submitter, platform, framework, batch and time are enough for every cell of the archive."""
    wrong = []
    for number, (folder, files) in enumerate(find_sets(public_logs)):
        bare = tmp_path / str(number)
        bare.mkdir()
        for file in files:
            shutil.copyfile(file, bare / file.name)
        found = compare_path(bare)
        name = "/".join(folder.parts[-4:-1])
        if found.theirs is None or found.theirs.label != name:
            wrong.append(name)
    assert wrong == []


def test_submitted_logs_replace_what_is_kept_of_them(public_logs: Path, tmp_path: Path) -> None:
    folder = a100_run(tmp_path)
    kept = compare(load_side(folder), A100)
    read = compare(load_side(folder), A100, public_logs)
    assert read.theirs is not None
    assert read.theirs.logs
    assert [f.ratio for f in kept.factors] == pytest.approx([f.ratio for f in read.factors], rel=1e-6)


def test_every_published_name_is_found_as_named(tmp_path: Path) -> None:
    side = load_side(a100_run(tmp_path))
    cells = [cell for cell in load_published() if cell.benchmark == "resnet" and cell.score_minutes]
    for cell in cells[::7]:
        found = compare(side, cell.name)
        assert found.theirs is not None
        assert found.theirs.label == cell.name


def test_what_is_kept_of_the_logs_is_what_they_say(public_logs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "encore.results.digest", str(public_logs)],
        capture_output=True, text=True, check=True, cwd=paths.ROOT,
    )  # fmt: skip
    assert done.stdout == (DATA / "digests.json").read_text("utf-8")
