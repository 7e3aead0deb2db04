"""Compliance: the official checker in plain words, its crashes, the rules of v0.5, and small data."""

from __future__ import annotations

import gzip
import json
import logging
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.results.compliance import rates
from encore.results.compliance.compliance import ComplianceReport, check
from encore.results.findings import Finding
from tests.results.result_logs import START_MS, mll, mllog, resnet_v05, resnet_v07, v05


def check_text(text: str, tmp_path: Path, ruleset: str | None = None) -> ComplianceReport:
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    return check(path, ruleset)


def errors(report: ComplianceReport) -> list[str]:
    return [f"{each.kind}: {each.expected}" for each in report.findings if each.severity == "error"]


def test_a_good_log_passes_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check_text(resnet_v07(), tmp_path)
    assert report.ruleset == "0.7.0"
    assert report.passed
    assert report.findings == ()
    assert capsys.readouterr() == ("", "")


def test_a_small_data_run_has_nothing_wrong_but_its_data(tmp_path: Path) -> None:
    report = check_text(resnet_v07(quality=(0.9, 0.95), train_samples=1437, eval_samples=360), tmp_path)
    assert not report.passed
    assert report.passed_but_for_data
    assert {each.kind for each in report.findings} == {"small_data"}
    assert [each.found for each in report.findings] == ["1437", "360"]


@pytest.mark.parametrize("division", ["closed", "open"])
@pytest.mark.parametrize("status", ["success", "aborted"])
def test_only_a_run_that_reached_its_own_target_is_excused_by_small_data(
    status: str, division: str, tmp_path: Path
) -> None:
    log = resnet_v07(quality=(0.3, 0.5), status=status, train_samples=1437, eval_samples=360)
    report = check_text(log.replace('"closed"', f'"{division}"'), tmp_path)
    assert report.passed_but_for_data == (status == "success")
    (target,) = (each for each in report.findings if each.code == "target_not_met")
    assert target.found == "the best of 2 evaluations has value 0.5"
    assert target.kind == ("small_data" if status == "success" else "rule")


def test_a_killed_run_on_small_data_is_not_excused(tmp_path: Path) -> None:
    log = resnet_v07(quality=(0.3, 0.5), train_samples=1437, eval_samples=360)
    report = check_text(re.sub(r'^.*"key": "run_stop".*\n', "", log, flags=re.MULTILINE), tmp_path)
    assert not report.passed_but_for_data
    assert {each.kind for each in report.findings if "eval_accuracy" in each.rule} == {"rule"}


def test_on_real_data_a_missed_target_is_an_error(tmp_path: Path) -> None:
    report = check_text(resnet_v07(quality=(0.3, 0.7589)), tmp_path)
    assert not report.passed_but_for_data
    (finding,) = (each for each in report.findings if "eval_accuracy" in each.rule)
    assert finding.expected == "an evaluation that reaches value 0.759 (top-1 accuracy)"
    assert "0.7589" in finding.found


def test_times_of_warm_up_and_start_are_no_data(tmp_path: Path) -> None:
    early = mllog("tracked_stats", {"warmup_time": 12.5}, time_ms=START_MS - 50)
    assert check_text(resnet_v07().replace(mllog("run_start"), early + mllog("run_start")), tmp_path).passed


def test_no_rule_of_our_own_is_an_error_where_public_sets_have_it() -> None:
    """The rates are measured by tools/check_rates.py on all public sets that mlperf-logging's checker passes."""
    found = rates.measured()
    assert found["sets"] > 2000
    assert {"data_before_clock", "cache_cleared_late", "no_seed"} <= set(found["rules"])
    frequent = {code for code, entry in found["rules"].items() if entry["sets"] / found["sets"] > 0.005}
    for code in found["rules"]:
        finding = rates.rated(Finding(line=None, code=code, rule="", expected="", found="", remedy=""))
        assert finding.severity == ("warning" if code in frequent else "error"), code
        assert finding.rate == found["rules"][code]["sets"] / found["sets"]


@pytest.mark.parametrize("key", ["epoch_start", "eval_start"])
def test_reading_the_data_set_before_the_clock_is_found(key: str, tmp_path: Path) -> None:
    early = mllog(key, time_ms=START_MS - 50, epoch_num=1)
    text = resnet_v07().replace(mllog("run_start"), early + mllog("run_start"))
    (finding,) = (each for each in check_text(text, tmp_path).findings if "touches the data set" in each.rule)
    assert finding.severity == "error"
    assert key in text.splitlines()[(finding.line or 0) - 1]
    # The times count, and not the lines: several processes write into one log.
    late = mllog(key, time_ms=START_MS + 50, epoch_num=1)
    report = check_text(text.replace(early, late), tmp_path)
    assert not [each for each in report.findings if "touches the data set" in each.rule]


def test_findings_name_the_line_of_the_file_and_the_rule(tmp_path: Path) -> None:
    text = "some text\n" * 7 + resnet_v07(sgd_opt_end_learning_rate=0.001)
    report = check_text(text, tmp_path)
    (finding,) = report.findings
    line = text.splitlines()[(finding.line or 0) - 1]
    assert "sgd_opt_end_learning_rate" in line
    assert finding.expected == "sgd_opt_end_learning_rate: value equal to 0.0001"
    assert "0.001" in finding.found
    assert finding.rule.startswith("mlperf-logging training_0.7.0")
    assert finding.remedy


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("global_batch_size", "exactly one global_batch_size event"),
        ("submission_org", "exactly one submission_org event"),
        ("cache_clear", "at least one cache_clear event"),
        ("eval_samples", "exactly one eval_samples event"),
        ("sgd_opt_momentum", "exactly one sgd_opt_momentum event"),
    ],
)
def test_a_missing_event_is_reported(missing: str, expected: str, tmp_path: Path) -> None:
    text = re.sub(rf'^.*"key": "{missing}".*\n', "", resnet_v07(), flags=re.MULTILINE)
    (finding,) = check_text(text, tmp_path).findings
    assert (finding.expected, finding.found) == (expected, f"no {missing} event")
    assert "before run_start" not in finding.remedy


def test_every_line_that_breaks_a_rule_is_reported(tmp_path: Path) -> None:
    text = resnet_v07().replace('"epoch_num": 4', '"epoch": 4')
    report = check_text(text, tmp_path)
    lines = {each.line for each in report.findings if "epoch_num" in each.expected}
    assert len(lines) == 5
    assert all('"epoch": 4' in text.splitlines()[(line or 0) - 1] for line in lines)


def test_initialisation_of_more_than_twenty_minutes(tmp_path: Path) -> None:
    text = resnet_v07().replace(
        f'{START_MS - 2000}, "event_type": "POINT_IN_TIME", "key": "init_start"', '0, "key": "init_start"'
    )
    (finding,) = check_text(text, tmp_path).findings
    assert finding.expected == "init_stop: less than 20 minutes after the first init_start"


def test_events_that_two_processes_wrote_into_one_line_are_both_checked(tmp_path: Path) -> None:
    lines = resnet_v07().splitlines(keepends=True)
    joined = "".join(lines[:3]) + lines[3].strip() + lines[4] + "".join(lines[5:])
    assert check_text(joined, tmp_path).passed


def test_a_damaged_event_is_a_finding(tmp_path: Path) -> None:
    text = resnet_v07() + ':::MLLOG {"namespace": "", "time_ms": 15926\n'
    (finding,) = check_text(text, tmp_path).findings
    assert finding.kind == "reading"
    assert finding.line == text.count("\n")


def test_a_crash_of_the_checker_is_a_finding(tmp_path: Path) -> None:
    report = check_text(resnet_v07().replace("0.7605", '"high"'), tmp_path)
    assert not report.passed
    assert any(each.kind == "crash" for each in report.findings)


@pytest.mark.parametrize("key", ["submission_benchmark", "submission_division", "opt_name"])
def test_a_log_cannot_name_rules_of_its_own(key: str, tmp_path: Path) -> None:
    """The checker executes the rule file that a value in the log leads to."""
    proof = tmp_path / "executed"
    evil = f"- BEGIN:\n    CODE: \" open({str(proof)!r}, 'w').close() \"\n"
    for name in ("evil.yaml", "evil_common.yaml"):
        (tmp_path / name).write_text(evil)
    report = check_text(resnet_v07(**{key: f"{'../' * 30}{str(tmp_path).lstrip('/')}/evil"}), tmp_path, "0.7.0")
    assert not proof.exists()
    assert not report.passed


def test_the_checkers_state_does_not_leak_into_the_next_log(tmp_path: Path) -> None:
    from mlperf_logging.compliance_checker import mlp_compliance

    mlp_compliance.enqueued_configs.append("training_0.7.0/closed_bert.yaml")
    before = mlp_compliance.enqueue_config
    check_text(resnet_v07().replace("0.7605", '"high"'), tmp_path)
    assert check_text(resnet_v07(), tmp_path).passed
    assert mlp_compliance.enqueued_configs == []
    assert mlp_compliance.enqueue_config is before
    assert logging.getLogger().handlers == logging.getLogger().handlers


def test_rules_that_the_official_checker_does_not_know(tmp_path: Path) -> None:
    report = check_text(resnet_v07(cache_clear=False), tmp_path)
    assert report.passed
    assert [each.expected for each in report.findings] == ["cache_clear true"]
    text = re.sub(r'^.*"key": "seed".*\n', "", resnet_v07(), flags=re.MULTILINE)
    assert [each.expected for each in check_text(text, tmp_path).findings] == ["a seed event"]
    early = resnet_v07().replace(
        f'{START_MS}, "event_type": "POINT_IN_TIME", "key": "run_start"',
        f'{START_MS - 9000}, "key": "run_start"',
    )
    (finding,) = check_text(early, tmp_path).findings
    assert "init_stop comes before run_start" in finding.rule


def test_v06_has_a_target_though_its_rule_files_have_none(tmp_path: Path) -> None:
    text = (
        mll("submission_benchmark", "resnet")
        + mll("run_start")
        + mll("eval_accuracy", 0.7, 1_560_881_800.0, epoch_num=60)
        + mll("run_stop", None, 1_560_881_800.0, status="success")
    )
    report = check_text(text, tmp_path)
    assert report.ruleset == "0.6.0"
    assert any("quality target of v0.6" in each.rule for each in report.findings)


def test_v05(tmp_path: Path) -> None:
    report = check_text(resnet_v05(), tmp_path)
    assert (report.ruleset, report.checker) == ("0.5.0", "Encore's own rules of v0.5")
    assert report.findings == ()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text.replace("run_clear_caches", "run_nothing"), "a run_clear_caches event"),
        (lambda text: text.replace("train_loop", "loop"), "at least one train_loop event"),
        (lambda text: text.replace("eval_target: 0.749", "eval_target: 0.7"), "eval_target 0.749"),
        (lambda text: text.replace('"value": 0.7497', '"value": 0.7'), "value 0.749 (top-1 accuracy)"),
        (lambda text: text + v05("run_stop", seconds=1_541_740_000.0), "exactly one run_stop event"),
        (lambda text: text.replace('{"epoch": 61, "value": 0.7497}', "0.7497"), "eval_accuracy: {"),
    ],
)  # fmt: skip
def test_v05_rules(change, expected: str, tmp_path: Path) -> None:
    assert any(expected in each for each in errors(check_text(change(resnet_v05()), tmp_path)))


def test_v05_clock_starts_before_the_model_is_built(tmp_path: Path) -> None:
    lines = resnet_v05().splitlines(keepends=True)
    report = check_text("".join([lines[0], lines[3], *lines[1:3], *lines[4:]]), tmp_path)
    (finding,) = report.findings
    assert (finding.severity, finding.line) == ("warning", 2)
    assert "model construction" in finding.rule


def test_v05_events_written_twice_count_once(tmp_path: Path) -> None:
    doubled = "".join(f"INFO:mlperf_compliance:{line}{line}" for line in resnet_v05().splitlines(keepends=True))
    assert check_text(doubled, tmp_path).findings == ()


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt.gz"
    path.write_bytes(gzip.compress(resnet_v07().encode()))
    assert check(path).passed


def test_a_log_without_a_round_asks_for_one(tmp_path: Path) -> None:
    later = resnet_v07(start_ms=1_893_456_000_001) + mllog("gradient_accumulation_steps", 1)
    report = check_text(later, tmp_path)
    assert report.ruleset is None
    assert "--ruleset" in report.findings[0].remedy


@pytest.mark.parametrize("ruleset", ["0.7.0", "0.7", "v0.7"])
def test_ruleset_as_people_write_it(ruleset: str, tmp_path: Path) -> None:
    assert check_text(resnet_v07(), tmp_path, ruleset).ruleset == "0.7.0"


@pytest.mark.parametrize(("text", "ruleset"), [("no log\n", None), (resnet_v07(), "0.8.0")])
def test_bad_input_is_reported(text: str, ruleset: str | None, tmp_path: Path) -> None:
    with pytest.raises(EncoreError) as raised:
        check_text(text, tmp_path, ruleset)
    assert raised.value.remedy


def test_the_checker_is_not_imported_before_it_is_needed() -> None:
    import subprocess

    heavy = ("mlperf_logging", "pandas", "scipy", "numpy")
    code = f"import sys, encore.cli.run, encore.cli.results; print([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_command(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_text(resnet_v07())
    (tmp_path / "result_1.txt").write_text(resnet_v07(train_samples=10, eval_samples=10))
    runner = CliRunner()
    result = runner.invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 0
    assert "passed but for the data set" in result.stdout.replace("\n", " ")
    assert "(0 errors, " in result.stdout
    (tmp_path / "result_2.txt").write_text("killed\n")
    result = runner.invoke(app, ["check", str(tmp_path), "--json"])
    assert result.exit_code == 1
    reports = json.loads(result.stdout)
    assert [report["passed_but_for_data"] for report in reports] == [True, True, False]
    (tmp_path / "result_0.txt").write_text(resnet_v07(cache_clear=None))
    shown = runner.invoke(app, ["check", str(tmp_path / "result_0.txt")]).stdout
    assert "(0 errors, 0 from small data, 1 warning; " in shown
