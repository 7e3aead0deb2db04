"""Official scores: the factor of scaling.json, the reference convergence points, power and the result table."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.results.compliance.convergence import Outcome, convergence_of, points_known
from encore.results.published.published import load_published, select
from encore.results.scores.power import energy_of
from encore.results.scores.score import read_scaling, score_folder
from tests.results.result_logs import dell_texts, mllog, power_log, write_set


def run(*arguments: object) -> str:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "200"}).stdout


def test_published_rows_have_both_scores() -> None:
    results = load_published()
    scaled = [each for each in results if each.scaling_factor is not None]
    assert len(scaled) == 495
    assert sum((each.scaling_factor or 0) > 1.01 for each in scaled) == 281
    for each in results:
        if each.score_minutes is None:
            assert each.official_minutes is None
        else:
            wanted = each.score_minutes * (each.scaling_factor or 1)
            assert each.official_minutes == pytest.approx(wanted, abs=2e-4)
    (row,) = select(results, benchmark="resnet", round_="v4.0", submitter="Dell", system="XE9680")
    assert f"{row.score_minutes:.3f} {row.official_minutes:.3f}" == "13.163 13.218"
    assert {each.division for each in results} == {"closed", "open", ""}
    (listed,) = json.loads(run("published", "--benchmark", "resnet", "--system", "XE9680x8H100-SXM-80GB", "--round",
                               "v4.0", "--json"))  # fmt: skip
    assert listed["official_minutes"] == pytest.approx(13.2184)


@pytest.mark.parametrize("batch", [3264, 3200, 1632, 4000, 30_000])
def test_the_factor_is_that_of_the_official_checker(batch: int, tmp_path: Path) -> None:
    from mlperf_logging.rcp_checker import rcp_checker

    folder = write_set(tmp_path, dell_texts((35, 35.5, 34.5, 36, 35), batch))
    mine = convergence_of(score_folder(folder)[0])
    passed, _, factor = rcp_checker.check_directory(
        str(folder), "training", "4.0.0", False, False, rcp_pass="pruned_rcps", set_scaling=True
    )
    assert (mine.outcome is Outcome.PASSED) == passed
    assert mine.factor == pytest.approx(factor, rel=1e-12)
    assert read_scaling(folder).factor == (pytest.approx(factor, rel=1e-12) if passed and factor > 1 else None)


def test_benchmarks_that_the_installed_checker_no_longer_counts(tmp_path: Path) -> None:
    """DLRM has points, but no number of runs in rcp_checker's own table."""
    assert "dlrm" in points_known("1.0.0")
    logs = [each.replace("resnet", "dlrm").replace("0.7595", "0.8026") for each in dell_texts((0.95,) * 5, 65536)]
    (score,) = score_folder(write_set(tmp_path, logs), "v1.0")
    assert convergence_of(score).point.batch == 65536


def test_energy_is_that_of_the_official_summarizer(tmp_path: Path) -> None:
    from mlperf_logging.result_summarizer.result_summarizer import _compute_total_power

    folder = write_set(tmp_path, dell_texts())
    for number in range(5):
        part = folder / "power" / f"result_{number}"
        part.mkdir(parents=True)
        for node in range(2):
            (part / f"node_{node}.txt").write_text(power_log([1000.0, 2000.0, 3000.0 + node], stop=node == 0))
        (part / "sw_0.txt").write_text(mllog("conversion_eff", 0.5) + mllog("interconnect_power_est", 400))
    (score,) = score_folder(folder)
    theirs = [
        _compute_total_power(str(folder), str(each.path), (each.minutes or 0) * 60_000, "4.0.0")
        for each in score.counted
    ]
    found = energy_of(score)
    assert found.kilojoules == pytest.approx(sum(theirs) / len(theirs) / 1000)


def test_scores_as_csv(tmp_path: Path, recorded: Callable[[str, str], None]) -> None:
    write_set(tmp_path / "a" / "resnet", dell_texts())
    (tmp_path / "a" / "resnet" / "scaling.json").write_text('{"scaling_factor": 1.0042}')
    write_set(tmp_path / "b" / "resnet", dell_texts()[:1])
    recorded("scores.csv", run("score", tmp_path, "--csv"))


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_table_shows_every_score_at_any_width(width: int) -> None:
    options = ["published", "--table", "--round", "v0.7", "--submitter", "NVIDIA"]
    shown = CliRunner().invoke(app, options, env={"COLUMNS": str(width)}).stdout
    for each in select(load_published(), round_="v0.7", submitter="NVIDIA"):
        assert f"{each.official_minutes:.3f}" in shown, each.name
    assert all(len(line) <= width for line in shown.splitlines() if "official scores" not in line)
    assert ("continued" in shown) == (width == 80)
