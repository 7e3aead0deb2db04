"""Submission trees: one that somebody else made, and those of encore archive."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from encore import __version__, paths
from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.submissions import merge
from encore.lab.submissions.archive import check_package, check_trees, write_archive
from encore.lab.submissions.merge import merge_trees
from encore.results.published.systems import DESCRIPTION_FIELDS
from encore.results.scores.score import score_folder
from tests.results.result_logs import START_MS, flux1_v61, resnet_v05, resnet_v07, write_set


def tree(root: Path, ruleset_logs: int = 5) -> Path:
    folder = root / "Lab"
    logs = [resnet_v07(40.0 + each, start_ms=START_MS + 10**7 * each, seed=each) for each in range(ruleset_logs)]
    write_set(folder / "results" / "box" / "resnet", logs)
    (folder / "systems").mkdir()
    description = {**dict.fromkeys(DESCRIPTION_FIELDS, ""), "division": "closed"}
    (folder / "systems" / "box.json").write_text(json.dumps(description))
    (folder / "benchmarks" / "resnet").mkdir(parents=True)
    return folder


@pytest.mark.slow
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


@pytest.mark.slow
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


# A table, a page and JSON: a sound submitter, and one with a run that missed and no system description.
@pytest.mark.slow
def test_one_command_scores_checks_audits_and_packs_a_round(
    tmp_path: Path, recorded: Callable[[str, object], None]
) -> None:
    other = tree(tmp_path / "round").rename(tmp_path / "round" / "Other")
    (other / "systems" / "box.json").unlink()
    missed = other / "results" / "box" / "resnet" / "result_4.txt"
    missed.write_text(missed.read_text("utf-8").replace("0.7605", "0.7").replace("success", "aborted"))
    (other / "results" / "box" / "resnet" / "result_3.txt").write_text(
        resnet_v07(43.0, seed=2, start_ms=START_MS + 3 * 10**7)
    )
    tree(tmp_path / "round")
    command = ["report", str(tmp_path / "round"), "--package", "-o", str(tmp_path / "out")]
    shown, plain = (CliRunner().invoke(app, [*command, *more], env={"COLUMNS": "160"}) for more in ([], ["--json"]))
    found = json.loads(plain.stdout)
    sets = [[len(each["check"]), each["converged"], each["convergence"]] for each in found["sets"]]
    recorded("round.json", [shown.output.splitlines(), sets, [each["passed"] for each in found["packages"]]])
    page, text = ((tmp_path / "out" / f"report.{kind}").read_text("utf-8") for kind in ("html", "md"))
    assert '<td class="n" data-name="check">4 of 5</td>' in page
    assert "systems/box.json: not there" in page and "systems/box.json: not there" in text
    assert re.search(r"Other: 0.7.0, 1 error</summary>", page)


def test_a_folder_that_is_no_tree(tmp_path: Path) -> None:
    with pytest.raises(EncoreError, match="no submission tree"):
        check_trees(tmp_path)


def run_set(folder: Path, count: int = 5, first: int = 0, **changed: object) -> Path:
    texts = [resnet_v07(40.0 + n, start_ms=START_MS + 10**7 * (n + first), **changed) for n in range(count)]
    return write_set(folder / "box" / "resnet", texts)


# The system descriptions of v6.1 have other words for submission_status than the log.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "texts", "status"),
    [
        ("resnet", [resnet_v07(40.0 + n, start_ms=START_MS + 10**7 * n) for n in range(5)], "onprem"),
        ("flux1", [flux1_v61(40.0 + n, seed=n) for n in range(10)], "Available on-premise"),
    ],
)
def test_the_checker_accepts_a_whole_set(benchmark: str, texts: list[str], status: str, tmp_path: Path) -> None:
    source = write_set(tmp_path / "box" / benchmark, texts)
    (package,) = write_archive([source], tmp_path / "out", "MyLab")
    packed = tmp_path / "out" / "MyLab" / "results" / "box" / benchmark
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    described = json.loads((package.folder / "systems" / "box.json").read_text())
    assert (described["submitter"], described["division"], described["status"]) == ("MyLab", "closed", status)
    verdict = check_package(package)
    assert verdict.accepted is True, verdict.errors


@pytest.mark.slow
def test_the_checker_refuses_a_set_with_a_run_missing_and_says_why(tmp_path: Path) -> None:
    (package,) = write_archive([run_set(tmp_path, 4)], tmp_path / "out")
    verdict = check_package(package)
    assert verdict.accepted is False
    assert any("found 4, expected 5" in line for line in verdict.errors)
    shown = CliRunner().invoke(app, ["archive", str(tmp_path / "box"), "-o", str(tmp_path / "again")])
    assert shown.exit_code == 1
    assert "does not accept" in shown.output


def encore_run(folder: Path, count: int, first: int) -> Path:
    source = run_set(folder, count, first, submission_division="open")
    passport = {
        "round": "v0.7", "system": "cpu", "nodes": 1, "ranks_per_node": 2, "implementation": "mxnet",
        "node": {"hostname": "my node/../1"},
    }  # fmt: skip
    (source / "run.json").write_text(json.dumps(passport))
    (source / "config.json").write_text("{}")
    (source / "system.json").write_text(json.dumps({"submitter": "", "accelerators_per_node": "0"}))
    return source


# Five runs, made in two goes, with their passports and the code next to them.
@pytest.mark.slow
def test_run_folders_of_one_system_are_one_set(tmp_path: Path) -> None:
    folders = [encore_run(tmp_path / "a", 2, 0), encore_run(tmp_path / "b", 3, 10)]
    (package,) = write_archive(folders, tmp_path / "out")
    assert (package.sets, package.logs) == (1, 5)
    (system,) = (path.name for path in (package.folder / "results").iterdir())
    assert "/" not in system
    assert ".." not in Path(system).parts
    kept = package.folder / "benchmarks" / "resnet" / "implementations" / system
    assert (kept / "run_0" / "run.json").is_file()
    assert (kept / "run_1" / "config.json").is_file()
    assert (kept / "code" / "resnet" / "benchmark.toml").is_file()
    described = json.loads((package.folder / "systems" / f"{system}.json").read_text())
    assert described["division"] == "open"
    assert check_package(package).accepted is True


def test_gzip_is_unpacked_and_old_archives_are_left_alone(tmp_path: Path) -> None:
    source = run_set(tmp_path)
    plain = (source / "result_0.txt").read_bytes()
    (source / "result_0.txt").unlink()
    (source / "result_0.txt.gz").write_bytes(gzip.compress(plain))
    (package,) = write_archive([source], tmp_path / "out")
    assert (package.folder / "results" / "box" / "resnet" / "result_0.txt").read_bytes() == plain
    with pytest.raises(EncoreError, match="is there already"):
        write_archive([source], tmp_path / "out")


def test_rounds_without_a_checker_are_packed_and_not_judged(tmp_path: Path) -> None:
    source = write_set(tmp_path / "dgx1" / "resnet", [resnet_v05(134.0 + n) for n in range(5)])
    (package,) = write_archive([source], tmp_path / "out")
    verdict = check_package(package)
    assert verdict.accepted is None
    assert "no package checker" in verdict.summary


def test_logs_of_nothing_known_are_refused(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_text(':::MLLOG {"key": "run_start", "time_ms": 1, "value": null}\n')
    with pytest.raises(EncoreError, match="is not known"):
        write_archive([tmp_path], tmp_path / "out")


@pytest.mark.slow
def test_public_sets_are_accepted_and_keep_their_scores(public_logs: Path, tmp_path: Path) -> None:
    source = public_logs / "v0.7" / "NVIDIA"
    names = ("dgx1_ngc20.06_mxnet", "dgxa100_ngc20.06_mxnet", "dgxa100_n8_ngc20.06_mxnet")
    (package,) = write_archive([source / name for name in names], tmp_path)
    assert check_package(package).accepted is True
    before = {score.score_minutes for name in names for score in score_folder(source / name)}
    after = {score.score_minutes for score in score_folder(package.folder / "results")}
    assert before == after


# Set, in the working directory, whose second log misses the target and whose third breaks a rule.
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = [resnet_v07(40.0), resnet_v07(41.0, quality=(0.3, 0.7)), resnet_v07(42.0, opt_name="\x1badam <&>")]
    return write_set(tmp_path / "a set", texts).relative_to(tmp_path)


# Of a set with a copy in it: lines and files of the findings, texts without control characters.
@pytest.mark.parametrize("form", ["sarif", "junit"])
@pytest.mark.parametrize("command", ["check", "audit"])
def test_findings_in_the_forms_of_other_tools(
    command: str, form: str, folder: Path, recorded: Callable[[str, object], None]
) -> None:
    (folder / "result_3.txt").write_bytes((folder / "result_0.txt").read_bytes())
    result = CliRunner().invoke(app, [command, str(folder), "--format", form])
    assert result.exit_code == 1
    written = result.stdout.replace(f'"{__version__}"', '"VERSION"')
    recorded(f"{command}.{form}", json.loads(written) if form == "sarif" else written)


@pytest.mark.slow
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


# Two laboratories, one of them in two trees.
def labs(root: Path) -> Path:
    for name, system, submitter in (("a", "box", "Lab"), ("b", "rack", "Lab"), ("c", "box", "Theirs")):
        folder = tree(root / name).rename(root / name / submitter)
        (folder / "results" / "box").rename(folder / "results" / system)
        (folder / "systems" / "box.json").rename(folder / "systems" / f"{system}.json")
        (folder / "benchmarks" / "resnet" / "README.md").write_text("how to run it")
    (root / "b" / "Lab" / ".git").mkdir()
    (root / "b" / "Lab" / ".git" / "config").write_text("")
    return root


def other_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("other")


def other_folder(path: Path) -> None:
    path.unlink()
    other_file(path / "x")


# What somebody puts into b/Lab.
COLLIDING: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a set of that name": ("results/box/resnet/result_0.txt", other_file),
    "a description of that name": ("systems/box.json", other_file),
    "code of a system described elsewhere": ("benchmarks/resnet/implementations/box/run.sh", other_file),
    "other code": ("benchmarks/resnet/README.md", other_file),
    "a link": ("systems/x.json", lambda path: path.symlink_to("/etc/passwd")),
    "a link to a folder": ("benchmarks/all", lambda path: path.symlink_to("/etc")),
    "a linked tree": ("../Linked", lambda path: path.symlink_to(path.resolve().parents[1] / "a" / "Lab")),
    "an escape in a name": ("systems/\x1b[2J.json", other_file),
    "a name by its case": ("systems/BOX.json", other_file),
    "a file in a set by its case": ("results/rack/resnet/RESULT_0.txt", other_file),
    "a folder by its case": ("benchmarks/ResNet/x", other_file),
    "a letter in two forms": ("x", lambda path: [other_file(path / each) for each in ("caf\u00e9", "cafe\u0301")]),
    "a submitter by its case": ("../lab/results/box2/resnet/result_0.txt", other_file),
    "a folder of a file's name": ("benchmarks/resnet/README.md", other_folder),
    "a pipe": ("benchmarks/pipe", os.mkfifo),
}


# Each by itself is a collision, and nothing is written.
def test_trees_are_merged_whole_or_not_at_all(
    tmp_path: Path, recorded: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, object] = {}
    for name, (place, put) in {**COLLIDING, "nothing": ("systems/y.json", other_file)}.items():
        root, output = labs(tmp_path / name), tmp_path / name / "round"
        put(root / "b" / "Lab" / place)
        command = ["archive", *(str(root / each) for each in "abc"), "-o", str(output), "--merge"]
        plain = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
        assert (plain["output"] is None, output.exists()) == (bool(plain["collisions"]), not plain["collisions"])
        shown = CliRunner().invoke(app, [*command[:-2], str(root / "again"), "--merge"], env={"COLUMNS": "200"})
        assert shown.exit_code == bool(plain["collisions"])
        found[name] = shown.output.splitlines()
    recorded("merged.json", found)
    files = {path.relative_to(root / of): path for of in "abc" for path in (root / of).rglob("*") if path.is_file()}
    wanted = {place: path.read_bytes() for place, path in files.items() if ".git" not in place.parts}
    assert {path.relative_to(output): path.read_bytes() for path in output.rglob("*") if path.is_file()} == wanted
    (root / "dangling").symlink_to(root / "none")
    (root / "loop").symlink_to(root / "loop")
    for new, why in (
        (output, "is there already"),
        (root / "a" / "new", "which is merged"),
        (root / "dangling", "is a link\n  expected: a new folder"),
        (root / "loop" / "x", "loop is no folder"),
        (root / "a/Lab/systems/box.json/x/y", "box.json is no folder\n  expected: a folder to write y to"),
        (root / ("x" * 300), "not merged: .*File name too long"),
    ):
        with pytest.raises(EncoreError, match=why):
            merge_trees([root / "a"], new)
    with pytest.raises(EncoreError, match=r"not merged: Symlink loop|cannot read .*loop"):
        merge_trees([root / "loop"], root / "new")
    # A folder whose names may be read, and nothing else of it.
    monkeypatch.setattr(merge, "_no_file", lambda path: os.close(os.open(path / "x", os.O_RDONLY)))
    with pytest.raises(EncoreError, match=r"not merged: .*\n  hint: check the permissions"):
        merge_trees([root / "a"], root / "new")
