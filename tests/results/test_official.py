"""Official scores: the factor of scaling.json, the reference convergence points, power and the result table."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.results.compare.compare import compare_path
from encore.results.compliance.convergence import Outcome, convergence_of, points_known, report_of
from encore.results.published.published import load_published, select
from encore.results.report.result_table import parts_of_width, result_table, sections
from encore.results.scores.normalization import read_scaling
from encore.results.scores.power import energy_of
from encore.results.scores.score import Score, score_folder
from tests.results.result_logs import START_MS, mllog, resnet_v07, uneven, write_set

DELL = "v4.0/Dell/XE9680x8H100-SXM-80GB"


def resnet_v40(
    minutes: float, epoch: float = 35, *, batch: int = 3200, division: str = "closed", number: int = 0
) -> str:
    """A ResNet log of v4.0, in short: what scores and reference convergence points need."""
    start = 1_714_000_000_123 + number * 10**7
    end = round(start + minutes * 60_000)
    return (
        mllog("submission_benchmark", "resnet", start)
        + mllog("submission_division", division, start)
        + mllog("global_batch_size", batch, start)
        + mllog("gradient_accumulation_steps", 1, start)
        + mllog("seed", 5 + number, start)
        + mllog("run_start", None, start)
        + mllog("eval_accuracy", 0.7, start + 5, epoch_num=epoch - 4)
        + mllog("eval_accuracy", 0.7595, end, epoch_num=epoch)
        + mllog("run_stop", None, end, status="success")
    )


def dell(folder: Path, epochs: tuple[float, ...] = (35,) * 5, batch: int = 3200, factor: object = None) -> Path:
    """The public set's times, as good as its scores."""
    minutes = (13.148, 13.159, 13.161, 13.168, 13.3)
    logs = [resnet_v40(each, epochs[number], batch=batch, number=number) for number, each in enumerate(minutes)]
    write_set(folder, [uneven(text, number) for number, text in enumerate(logs)])
    if factor is not None:
        (folder / "scaling.json").write_text(
            factor if isinstance(factor, str) else json.dumps({"scaling_factor": factor})
        )
    return folder


def only(folder: Path) -> Score:
    (score,) = score_folder(folder)
    return score


def run(*arguments: object) -> str:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "200"}).stdout


def test_a_score_is_raw_and_official(tmp_path: Path) -> None:
    folder = dell(tmp_path / "resnet", factor=1.004222999)
    score = only(folder)
    assert score.score_minutes == pytest.approx(13.16267, abs=1e-4)
    assert score.official_minutes == pytest.approx(13.1627 * 1.004223, abs=1e-3)
    found = json.loads(run("score", folder, "--json"))
    assert found["scaling_factor"] == pytest.approx(1.004223)
    assert found["official_minutes"] == pytest.approx(13.21825, abs=1e-4)
    assert "raw score 13.163 minutes, official score 13.218 minutes (x 1.0042, reference convergence)" in run(
        "score", folder
    )
    without = only(dell(tmp_path / "plain"))
    assert (without.scaling_factor, without.official_minutes) == (None, None)
    assert "official" not in run("score", tmp_path / "plain")


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", "[" * 30_000, '{"scaling_factor": "1.1"}', '{"scaling_factor": true}',
        '{"scaling_factor": NaN}', '{"scaling_factor": 1e999}', '{"scaling_factor": 0.5}', '{"scaling_factor": 11}',
        '{"scaling_factor": 1' + "0" * 400 + "}", " " * 70_000 + '{"scaling_factor": 1.1}',
    ],
)  # fmt: skip
def test_an_unusable_scaling_file_is_named(content: str, tmp_path: Path) -> None:
    score = only(dell(tmp_path, factor=content))
    assert (score.scaling_factor, score.official_minutes) == (None, None)
    assert score.score_minutes is not None
    assert any("scaling.json is not used" in flag.text for flag in score.flags)


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


def test_official_is_compared_with_official_and_raw_with_raw(tmp_path: Path) -> None:
    both = compare_path(dell(tmp_path / "a", factor=1.0042), DELL)
    assert both.score is not None
    assert both.score.theirs == pytest.approx(13.2184, abs=1e-3)
    assert both.score.ours == pytest.approx(13.1627 * 1.0042, abs=1e-3)
    assert any("official score against official score" in each for each in both.caveats)
    found = both.as_json()
    assert (found["score_kind"], found["score_minutes"]) == ("official", pytest.approx(13.1627, abs=1e-3))
    assert found["official_minutes"] == pytest.approx(13.2180, abs=1e-3)
    raw = compare_path(dell(tmp_path / "b"), DELL)
    assert raw.score is not None
    assert raw.score.theirs == pytest.approx(13.1628, abs=1e-3)
    assert raw.as_json()["official_minutes"] is None
    assert any("raw score against raw score" in each and "13.218" in each for each in raw.caveats)
    assert "raw score: 13.163 minutes" in run("compare", tmp_path / "b", "--with", DELL)


def test_rounds_without_factors_say_nothing_of_them(tmp_path: Path) -> None:
    write_set(tmp_path, [resnet_v07(39.0 + each, start_ms=START_MS + 10**7 * each) for each in range(5)])
    found = compare_path(tmp_path, "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet")
    assert found.ours.score_name == "score"
    assert not any("raw score" in each for each in found.caveats)


@pytest.mark.parametrize(
    ("batch", "epochs", "outcome", "factor", "how"),
    [
        (3264, (35,) * 5, Outcome.PASSED, 35.1538 / 35, "the reference was run at"),
        (3200, (34, 35, 35, 35, 36), Outcome.PASSED, 1.004223, "between the reference's batches 1632 and 3264"),
        (3264, (40,) * 5, Outcome.PASSED, 1.0, "the reference was run at"),
        (3264, (30,) * 5, Outcome.TOO_FEW, 35.1538 / 30, "the reference was run at"),
        (208, (37,) * 5, Outcome.PASSED, 1.0, "the smallest batch of the reference is 1632"),
        (10**6, (50,) * 5, Outcome.NO_POINT, None, "the largest batch of the reference is"),
    ],
)
def test_epochs_are_held_against_the_points_of_the_round(
    batch: int, epochs: tuple[float, ...], outcome: Outcome, factor: float | None, how: str, tmp_path: Path
) -> None:
    found = convergence_of(only(dell(tmp_path, epochs, batch)))
    assert found is not None
    assert found.outcome is outcome
    assert how in found.explanation[0]
    assert found.factor == (None if factor is None else pytest.approx(factor, rel=1e-5))
    assert bool(found.between) == ("between" in how)


@pytest.mark.parametrize("batch", [3264, 3200, 1632, 4000, 30_000])
def test_the_factor_is_that_of_the_official_checker(batch: int, tmp_path: Path) -> None:
    from mlperf_logging.rcp_checker import rcp_checker

    folder = dell(tmp_path, (35, 35.5, 34.5, 36, 35), batch)
    mine = convergence_of(only(folder))
    passed, _, factor = rcp_checker.check_directory(
        str(folder), "training", "4.0.0", False, False, rcp_pass="pruned_rcps", set_scaling=True
    )
    assert mine is not None
    assert (mine.outcome is Outcome.PASSED) == passed
    assert mine.factor == pytest.approx(factor, rel=1e-12)
    assert read_scaling(folder).factor == (pytest.approx(factor, rel=1e-12) if passed and factor > 1 else None)


def test_sets_that_have_no_points_say_why(tmp_path: Path) -> None:
    write_set(tmp_path / "v07", [resnet_v07(40.0)] * 5)
    assert convergence_of(only(tmp_path / "v07")) is None
    write_set(tmp_path / "open", [resnet_v40(9.0, division="open", number=each) for each in range(5)])
    assert convergence_of(only(tmp_path / "open")) is None
    logs = [resnet_v40(9.0, number=each).replace("resnet", "minigo") for each in range(5)]
    (score,) = score_folder(write_set(tmp_path / "minigo", logs), "v1.0")
    found = convergence_of(score)
    assert found is not None
    assert found.outcome is Outcome.NOT_CHECKED
    assert "no points for minigo in v1.0" in found.explanation[0]
    odd = [resnet_v40(9.0, number=each).replace('"epoch_num": 35', '"epoch_num": [[]]') for each in range(5)]
    (score,) = score_folder(write_set(tmp_path / "odd", odd), "v4.0")
    assert convergence_of(score).outcome is Outcome.NOT_CHECKED  # type: ignore[union-attr]


def test_another_unit_than_the_reference_counts_is_named(tmp_path: Path) -> None:
    found = convergence_of(only(dell(tmp_path, (0.35,) * 5, 3264)))
    assert found is not None
    assert (found.outcome, found.factor) == (Outcome.NOT_CHECKED, None)
    assert "the logs count 0.35 to the target where the reference counts 35.154: another unit" in found.explanation


def test_benchmarks_that_the_installed_checker_no_longer_counts(tmp_path: Path) -> None:
    """DLRM has points, but no number of runs in rcp_checker's own table."""
    assert "dlrm" in points_known("1.0.0")
    logs = [
        resnet_v40(9.0, 0.95, batch=65536, number=each).replace("resnet", "dlrm").replace("0.7595", "0.8026")
        for each in range(5)
    ]
    (score,) = score_folder(write_set(tmp_path, logs), "v1.0")
    found = convergence_of(score)
    assert found is not None
    assert found.point is not None


def test_check_of_a_set_has_its_convergence(tmp_path: Path) -> None:
    folder = dell(tmp_path / "resnet", factor=1.1)
    shown = run("check", folder, "--ruleset", "4.0.0")
    assert "reference convergence: passed" in shown
    assert "35 epochs to the target, the reference 35.148; a mean of fewer than" in shown
    assert "the score is multiplied by 35.148 / 35 = 1.0042" in shown
    assert "a factor of 1.100000" in shown
    found = json.loads(run("check", folder, "--ruleset", "4.0.0", "--json"))
    assert len(found) == 6
    assert found[-1]["path"] == str(folder)
    assert found[-1]["convergence"]["factor"] == pytest.approx(1.004223, rel=1e-5)
    assert [each["expected"] for each in found[-1]["findings"]] == ["scaling.json with a factor of 1.004223"]
    assert len(json.loads(run("check", folder / "result_0.txt", "--ruleset", "4.0.0", "--json"))) < 10


def test_too_few_epochs_are_a_warning(tmp_path: Path) -> None:
    found = convergence_of(only(dell(tmp_path, (30,) * 5, 3264)))
    assert found is not None
    report = report_of(found)
    assert report.passed
    (finding,) = report.findings
    assert "fewer epochs than chance explains" in finding.found
    assert "a review that does multiplies the score by 35.154 / 30 = 1.1718" in finding.found


def power_log(watts: list[float], *, start_ms: int, efficiency: float = 0.9, stop: bool = True) -> str:
    """A node's log with a reading each second."""
    text = mllog("power_measurement_start", None, start_ms) + mllog("conversion_eff", efficiency, start_ms)
    for number, each in enumerate(watts, 1):
        text += mllog("power_reading", each, start_ms + 1000 * number)
    end = start_ms + 1000 * len(watts)
    return text + mllog("power_measurement_stop", None, end) if stop else text


def with_power(folder: Path, runs: int = 5) -> Path:
    for number in range(runs):
        part = folder / "power" / f"result_{number}"
        part.mkdir(parents=True)
        for node in range(2):
            text = power_log([1000.0, 2000.0, 3000.0 + node], start_ms=START_MS, stop=node == 0)
            (part / f"node_{node}.txt").write_text(text)
        (part / "sw_0.txt").write_text(mllog("conversion_eff", 0.5) + mllog("interconnect_power_est", 400))
    return folder


def test_energy_of_the_counted_runs(tmp_path: Path) -> None:
    """Two nodes of 2,000 W and 2,000.33 W on average times 0.9, and a switch of 400 W times 0.5."""
    folder = with_power(dell(tmp_path / "resnet", factor=1.01))
    score = only(folder)
    found = energy_of(score)
    assert found is not None
    watts = 0.9 * (2000 + 6001 / 3) + 200
    assert found.watts == pytest.approx(watts)
    assert found.nodes == 2
    assert found.kilojoules == pytest.approx(watts * (score.score_minutes or 0) * 60 / 1000)
    assert found.official_kilojoules == pytest.approx((found.kilojoules or 0) * 1.01)
    from mlperf_logging.result_summarizer.result_summarizer import _compute_total_power

    theirs = [
        _compute_total_power(str(folder), str(each.path), (each.minutes or 0) * 60_000, "4.0.0")
        for each in score.counted
    ]
    assert found.kilojoules == pytest.approx(sum(theirs) / len(theirs) / 1000)
    assert f"energy {found.kilojoules:,.0f} kJ" in run("score", folder)
    assert json.loads(run("score", folder, "--json"))["energy"]["kilojoules"] == pytest.approx(found.kilojoules)


def test_missing_power_logs_are_named(tmp_path: Path) -> None:
    plain = only(dell(tmp_path / "plain"))
    assert energy_of(plain) is None
    folder = with_power(dell(tmp_path / "part"), runs=2)
    found = energy_of(only(folder))
    assert found is not None
    assert found.kilojoules is None
    assert "result_2.txt: no folder power/result_2" in found.missing
    (folder / "power" / "result_1" / "node_0.txt").write_text(mllog("power_reading", 5.0))
    assert "no power_measurement_start" in energy_of(only(folder)).missing  # type: ignore[union-attr]
    assert "no energy" in run("score", folder)
    for number in range(5):
        (folder / "power" / f"result_{number}").mkdir(exist_ok=True)
        text = mllog("power_measurement_stop") + power_log([900.0], start_ms=START_MS, stop=False)
        (folder / "power" / f"result_{number}" / "node_0.txt").write_text(text)
        (folder / "power" / f"result_{number}" / "node_1.txt").unlink(missing_ok=True)
    assert "stops measuring at the time of its start" in energy_of(only(folder)).missing  # type: ignore[union-attr]


def test_scores_as_csv(tmp_path: Path) -> None:
    dell(tmp_path / "a" / "resnet", factor=1.0042)
    write_set(tmp_path / "b" / "resnet", [resnet_v40(9.0)])
    rows = list(csv.DictReader(io.StringIO(run("score", tmp_path, "--csv"))))
    assert [row["benchmark"] for row in rows] == ["resnet", "resnet"]
    assert float(rows[0]["official_minutes"]) == pytest.approx(13.1627 * 1.0042, abs=1e-3)
    assert (rows[1]["score_minutes"], rows[1]["missing"]) == ("", "1 of 5 runs: 4 more needed")
    (found,) = json.loads(run("score", tmp_path, "--json"))[1:]
    flags = [*found["flags"], *(f"result_0.txt: {flag}" for flag in found["runs"][0]["flags"])]
    assert "missing_files: 1 result file" in flags
    assert rows[1]["flags"] == "; ".join(flags)
    assert {(row["round"], row["round_is_guess"]) for row in rows} == {("v4.0", "True")}
    assert "(v4.0? resnet)" in run("audit", tmp_path / "b")
    assert json.loads(run("audit", tmp_path / "b", "--json"))["round_is_guess"] is True
    assert "a/resnet (v4.0?) against v4.0/Dell/XE9680x8H100-SXM-80GB (v4.0)" in run(
        "explain", tmp_path / "a" / "resnet", "--with", DELL
    )


def test_the_table_of_a_round_is_laid_out_as_the_official_one() -> None:
    found = select(load_published(), round_="v4.0")
    table = result_table(found)
    assert table.columns[:8] == (
        "round", "division", "availability", "submitter", "system", "accelerator", "count", "software",
    )  # fmt: skip
    assert table.columns[8:] == tuple(sorted({each.benchmark for each in found if each.benchmark}))
    row = dict(zip(table.columns, next(each for each in table.rows if each[4] == "XE9680x8H100-SXM-80GB"), strict=True))
    assert (row["division"], row["availability"]) == ("closed", "Available on-premise")
    assert row["resnet"] == pytest.approx(13.2184)
    cells = sum(cell is not None for each in table.rows for cell in each[8:])
    assert cells == sum(each.official_minutes is not None for each in found)
    assert sum(len(part.rows) for part in sections(table)) == len(table.rows)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_table_shows_every_score_at_any_width(width: int) -> None:
    options = ["published", "--table", "--round", "v0.7", "--submitter", "NVIDIA"]
    shown = CliRunner().invoke(app, options, env={"COLUMNS": str(width)}).stdout
    for each in select(load_published(), round_="v0.7", submitter="NVIDIA"):
        assert f"{each.official_minutes:.3f}" in shown, each.name
    assert all(len(line) <= width for line in shown.splitlines() if "official scores" not in line)
    assert ("continued" in shown) == (width == 80)


def test_the_table_as_markdown_and_csv() -> None:
    options = ["published", "--table", "--round", "v0.6"]
    markdown = run(*options, "--markdown")
    assert "### v0.6, closed, " in markdown
    assert "| submitter | system | accelerator | count | software |" in markdown
    rows = list(csv.DictReader(io.StringIO(run(*options, "--csv"))))
    assert {row["round"] for row in rows} == {"v0.6"}
    parts = json.loads(run(*options, "--json"))
    assert sum(len(part["rows"]) for part in parts) == len(rows)
    assert CliRunner().invoke(app, ["published", "--markdown"]).exit_code != 0


def test_a_section_is_split_by_benchmarks() -> None:
    (section,) = sections(result_table(select(load_published(), round_="v4.0", submitter="Dell")))
    parts = parts_of_width(section, 60, 40)
    assert len(parts) > 1
    assert [part.title.endswith("continued") for part in parts] == [False] + [True] * (len(parts) - 1)
    assert {column for part in parts for column in part.columns} == set(section.columns)
