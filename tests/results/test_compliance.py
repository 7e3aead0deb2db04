"""Compliance: the official checker in plain words, its crashes, the rules of v0.5, and small data."""

import gzip
import json
import logging
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.results import findings as rates
from encore.results.compliance.compliance import ComplianceReport, check
from tests.results.result_logs import START_MS, mllog, resnet_v07


def check_text(text: str, tmp_path: Path, ruleset: str | None = None) -> ComplianceReport:
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    return check(path, ruleset)


def test_no_rule_of_our_own_is_an_error_where_public_sets_have_it(tmp_path: Path) -> None:
    """The rates are measured by tools/check_rates.py on all public sets that mlperf-logging's checker passes."""
    found = rates.measured("check")
    assert found["sets"] > 2000
    assert {"data_before_clock", "cache_cleared_late", "no_seed"} <= set(found["rules"])
    early = mllog("epoch_start", None, START_MS - 50, epoch_num=1)
    (finding,) = check_text(resnet_v07().replace(mllog("run_start"), early + mllog("run_start")), tmp_path).findings
    rate = found["rules"]["data_before_clock"]["sets"] / found["sets"]
    assert (finding.rate, finding.severity) == (rate, "error" if rate <= rates.MOST_OF_AN_ERROR else "warning")


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
    before, handlers = mlp_compliance.enqueue_config, list(logging.getLogger().handlers)
    check_text(resnet_v07().replace("0.7605", '"high"'), tmp_path)
    assert check_text(resnet_v07(), tmp_path).passed
    assert mlp_compliance.enqueued_configs == []
    assert mlp_compliance.enqueue_config is before
    assert logging.getLogger().handlers == handlers


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt.gz"
    path.write_bytes(gzip.compress(resnet_v07().encode()))
    assert check(path).passed


@pytest.mark.parametrize(("text", "ruleset"), [("no log\n", None), (resnet_v07(), "0.8.0")])
def test_bad_input_is_reported(text: str, ruleset: str | None, tmp_path: Path) -> None:
    with pytest.raises(EncoreError) as raised:
        check_text(text, tmp_path, ruleset)
    assert raised.value.hint


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
