"""A submission tree that somebody else made."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.submissions.archive import check_trees
from encore.results.published.systems import DESCRIPTION_FIELDS
from tests.results.result_logs import START_MS, resnet_v07, write_set


def tree(root: Path, ruleset_logs: int = 5) -> Path:
    folder = root / "Lab"
    logs = [resnet_v07(40.0 + each, start_ms=START_MS + 10**7 * each, seed=each) for each in range(ruleset_logs)]
    write_set(folder / "results" / "box" / "resnet", logs)
    (folder / "systems").mkdir()
    description = {**dict.fromkeys(DESCRIPTION_FIELDS, ""), "division": "closed"}
    (folder / "systems" / "box.json").write_text(json.dumps(description))
    (folder / "benchmarks" / "resnet").mkdir(parents=True)
    return folder


def test_a_sound_tree_is_accepted_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tree(tmp_path)
    (folder / "results" / "box" / "resnet" / "scaling.json").write_text('{"scaling_factor": 1.5}')
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (report,) = check_trees(tmp_path)
    assert report.path == folder
    assert report.ruleset == "0.7.0"
    assert report.findings == ()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert CliRunner().invoke(app, ["check", str(tmp_path), "--package"]).exit_code == 0


def test_every_fault_of_the_layout_is_a_finding(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    folder, other = tree(tmp_path, 4), tree(tmp_path / "other")
    results = folder / "results"
    (results / "box" / "resnet" / "result_3.txt").rename(results / "box" / "resnet" / "result_7.txt")
    (results / "box" / "resnet" / "notes.md").write_text("x")
    write_set(results / "box" / "resnet50", [resnet_v07()])
    write_set(results / "other" / "resnet", [resnet_v07()])
    (folder / "systems" / "other.json").write_text("{,}")
    (other / "systems" / "box.json").write_text('{"division": "Closed"}')
    (other / "results" / "box" / "resnet" / "result_4.txt").rename(
        other / "results" / "box" / "resnet" / "result_5.txt"
    )
    reports = [report for path in (folder, other) for report in check_trees(path)]
    found = [[each.severity, each.found, each.expected, each.hint] for report in reports for each in report.findings]
    recorded("package.json", sorted(found))
    result = CliRunner().invoke(app, ["check", str(folder), "--package", "--json"])
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["findings"]) == len(reports[0].findings)


def test_one_command_scores_checks_audits_and_packs_a_round(tmp_path: Path) -> None:
    """A table, a page and JSON: a sound submitter, and one with a run that missed and no system description."""
    other = tree(tmp_path / "round").rename(tmp_path / "round" / "Other")
    (other / "systems" / "box.json").unlink()
    missed = other / "results" / "box" / "resnet" / "result_4.txt"
    missed.write_text(missed.read_text("utf-8").replace("0.7605", "0.7").replace("success", "aborted"))
    (other / "results" / "box" / "resnet" / "result_3.txt").write_text(
        resnet_v07(43.0, seed=2, start_ms=START_MS + 3 * 10**7)
    )
    tree(tmp_path / "round")
    command = ["report", str(tmp_path / "round"), "--package", "-o", str(tmp_path / "out")]
    shown = " ".join(CliRunner().invoke(app, command, env={"COLUMNS": "160"}).output.split())
    for part in ("verdict", "5 of 5 5 of 5 passed", "4 of 5 4 of 5 1 warning", "Lab: accepted as a package of 0.7.0"):
        assert part in shown
    assert re.search(r"Other: \d errors? as a package of 0.7.0", shown)
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [(len(each["check"]), each["converged"], each["convergence"]) for each in found["sets"]] == [
        (5, 5, None),
        (5, 4, None),
    ]
    assert [each["passed"] for each in found["packages"]] == [True, False]
    page, text = ((tmp_path / "out" / f"report.{kind}").read_text("utf-8") for kind in ("html", "md"))
    assert '<td class="n" data-name="check">4 of 5</td>' in page
    assert "systems/box.json: not there" in page
    assert re.search(r"Other: 0.7.0, 1 error</summary>", page)
    assert "systems/box.json: not there" in text


def test_a_folder_that_is_no_tree(tmp_path: Path) -> None:
    with pytest.raises(EncoreError, match="no submission tree"):
        check_trees(tmp_path)
