"""Findings for other tools: SARIF for code scanning, JUnit's XML for CI servers, through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from typer.testing import CliRunner

from encore import paths
from encore.cli.app import app
from encore.errors import EncoreError
from tests.results.result_logs import resnet_v07, write_set


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a set, in the working directory, whose second log misses the target and whose third breaks a rule."""
    monkeypatch.chdir(tmp_path)
    texts = [resnet_v07(40.0), resnet_v07(41.0, quality=(0.3, 0.7)), resnet_v07(42.0, opt_name="\x1badam <&>")]
    return write_set(tmp_path / "a set", texts).relative_to(tmp_path)


def test_a_check_as_sarif_has_a_result_per_finding_at_its_line(folder: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(folder), "--format", "sarif"])
    assert result.exit_code == 1
    (run,) = json.loads(result.stdout)["runs"]
    reports = json.loads(CliRunner().invoke(app, ["check", str(folder), "--json"]).stdout)
    expected = [(Path(report["path"]).name, each) for report in reports for each in report["findings"]]
    assert len(run["results"]) == len(expected) > 2
    for found, (name, finding) in zip(run["results"], expected, strict=True):
        place = found["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == f"a%20set/{name}"
        assert place.get("region", {}).get("startLine") == finding["line"]
        assert found["level"] == finding["severity"]
        assert finding["found"] in found["message"]["text"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(set(rules)) == len(rules)
    assert {found["ruleId"] for found in run["results"]} == set(rules)
    assert {"opt_name", "target_not_met"} <= set(rules)


def test_a_check_as_junit_fails_the_logs_with_errors(folder: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(folder), "--format", "junit"])
    suite = ElementTree.fromstring(result.stdout)[0]
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    failures = {case.get("name"): case.find("failure") for case in suite}
    assert failures["result_0.txt"] is None
    assert "0.759" in (failures["result_1.txt"].text or "")
    assert "adam <&>" in (failures["result_2.txt"].text or "")


def test_an_audit_is_of_the_set_and_names_the_file(folder: Path) -> None:
    (folder / "result_3.txt").write_bytes((folder / "result_0.txt").read_bytes())
    run = json.loads(CliRunner().invoke(app, ["audit", str(folder), "--format", "sarif"]).stdout)["runs"][0]
    copies = [found for found in run["results"] if found["ruleId"] == "same_run"]
    places = {found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for found in copies}
    assert places <= {"a%20set", "a%20set/result_0.txt", "a%20set/result_3.txt"}
    assert copies
    suite = ElementTree.fromstring(CliRunner().invoke(app, ["audit", str(folder), "--format", "junit"]).stdout)[0]
    assert (suite.get("tests"), suite.get("failures"), suite[0].get("name")) == ("1", "1", "a set")


def test_two_forms_at_once_are_refused(folder: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(folder), "--json", "--format", "sarif"])
    assert isinstance(result.exception, EncoreError)
    assert "--json and --format sarif at once" in str(result.exception)


@pytest.mark.parametrize(
    ("name", "fail", "failed"), [("a set", "true", "1"), ("a set", "false", ""), ("no", "true", None)]
)
def test_the_github_action_writes_both_files_and_says_whether_to_fail(
    folder: Path, tmp_path: Path, name: str, fail: str, failed: str | None
) -> None:
    action = yaml.safe_load((paths.ROOT / ".github/actions/check-results/action.yml").read_text("utf-8"))
    (script,) = [step["run"] for step in action["runs"]["steps"] if step.get("id") == "judge"]
    checkout, output = tmp_path / "checkout", tmp_path / "output"
    checkout.mkdir()
    (checkout / "setup.sh").write_text("#!/bin/sh\n")
    (checkout / "setup.sh").chmod(0o755)
    (checkout / ".venv").symlink_to(Path(sys.prefix))
    variables = {"RESULTS": name, "CHECKOUT": str(checkout), "FAIL": fail, "RUNNER_TEMP": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **variables, "GITHUB_OUTPUT": str(output)},
        capture_output=True,
        text=True,
        check=False,
    )
    if failed is None:
        assert (done.returncode, output.exists()) == (2, False)
        assert "there is no no" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    written = dict(line.split("=", 1) for line in output.read_text().splitlines())
    assert written.get("failed", "") == failed
    for command in ("check", "audit"):
        assert json.loads(Path(written[command]).read_text())["version"] == "2.1.0"
