"""Submission trees: check, archive, report and merge of them, and findings in the formats of other tools."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from encore import __version__, files, paths
from encore.errors import EncoreError
from encore.lab.submissions import archive, merge
from encore.lab.submissions.archive import check_package, check_trees, write_archive
from encore.lab.submissions.merge import merge_trees
from encore.results.published.systems import DESCRIPTION_FIELDS
from tests.command_line import error_of, run_encore
from tests.results.result_logs import START_MS, flux1_v61, resnet_v05, resnet_v07, write_files, write_set


def write_tree(root: Path, count: int = 5, submitter: str = "Lab", system: str = "box") -> Path:
    logs = [resnet_v07(40.0 + n, start_ms=START_MS + 10**7 * n, seed=n) for n in range(count)]
    write_set(root / submitter / "results" / system / "resnet", logs)
    (root / submitter / "benchmarks" / "resnet").mkdir(parents=True)
    description = {**dict.fromkeys(DESCRIPTION_FIELDS, ""), "division": "closed"}
    return write_files(root / submitter, {f"systems/{system}.json": description})


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- check ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_valid_tree_is_accepted_and_not_changed(tmp_path: Path) -> None:
    folder = write_tree(tmp_path)
    write_files(folder / "results/box", {"resnet/scaling.json": {"scaling_factor": 1.5}, "package_checker_params": "x"})
    before, reports = contents(folder), check_trees(tmp_path)
    assert [(report.path, report.ruleset, report.findings) for report in reports] == [(folder, "0.7.0", ())]
    assert (run_encore("check", tmp_path, "--package").exit_code, contents(folder)) == (0, before)


@pytest.mark.slow
def test_faults_of_the_layout_are_findings(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    folder, other = write_tree(tmp_path, 4), write_tree(tmp_path / "other")
    write_files(folder / "results", {
        "box/resnet/notes.md": "x", "box/resnet50/result_0.txt": resnet_v07(),
        "other/resnet/result_0.txt": resnet_v07(),
    })  # fmt: skip
    write_files(tmp_path, {"Lab/systems/other.json": "{,}", "other/Lab/systems/box.json": {"division": "Closed"}})
    logs = {path: path / "results/box/resnet" for path in (folder, other)}
    for tree, old, new in ((folder, 3, 7), (other, 4, 5)):
        (logs[tree] / f"result_{old}.txt").rename(logs[tree] / f"result_{new}.txt")
    findings = [report.findings for path in (folder, other) for report in check_trees(path)]
    # Numbered from 1 to 5
    (logs[other] / "result_0.txt").rename(logs[other] / "result_4.txt")
    assert not any("gaps" in finding.found for report in check_trees(other) for finding in report.findings)
    recorded(
        "package.json", sorted([item.severity, item.found, item.expected, item.hint] for item in sum(findings, ()))
    )
    done = run_encore("check", folder, "--package", "--json")
    assert (done.exit_code, len(json.loads(done.stdout)["findings"])) == (1, len(findings[0]))
    assert "no submission tree" in error_of("check", other / "systems", "--package").found


@pytest.mark.slow
def test_report_of_a_round(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    # A valid submitter, and one with a run that missed its target and no system description
    other, root = write_tree(tmp_path / "round", submitter="Other"), tmp_path / "round"
    write_tree(root)
    (other / "systems" / "box.json").unlink()
    logs = other / "results" / "box" / "resnet"
    missed = (logs / "result_4.txt").read_text("utf-8").replace("0.7605", "0.7").replace("success", "aborted")
    write_files(logs, {"result_4.txt": missed, "result_3.txt": resnet_v07(43.0, seed=2, start_ms=START_MS + 3 * 10**7)})
    command = ("report", root, "--package", "-o", tmp_path / "out")
    printed, plain = run_encore(*command).output, json.loads(run_encore(*command, "--json").stdout)
    sets = [[len(item["check"]), item["converged"], item["convergence"]] for item in plain["sets"]]
    recorded("round.json", [printed.splitlines(), sets, [package["passed"] for package in plain["packages"]]])
    html, markdown = ((tmp_path / "out" / f"report.{form}").read_text("utf-8") for form in ("html", "md"))
    missing = "systems/box.json: not there"
    texts = (missing, '<td class="n" data-name="check">4 of 5</td>', "Other: 0.7.0, 1 error</summary>")
    assert ([text for text in texts if text not in html], missing in markdown) == ([], True)


# --- archive ----------------------------------------------------------------------------------------------


def write_runs(folder: Path, count: int = 5, first: int = 0, **values: object) -> Path:
    texts = [resnet_v07(40.0 + n, start_ms=START_MS + 10**7 * (n + first), **values) for n in range(count)]
    return write_set(folder / "box" / "resnet", texts)


# The system descriptions of v6.1 have other values of submission_status than the log.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "texts", "status"),
    [
        ("resnet", [resnet_v07(40.0 + n, start_ms=START_MS + 10**7 * n) for n in range(5)], "onprem"),
        ("flux1", [flux1_v61(40.0 + n, seed=n) for n in range(10)], "Available on-premise"),
    ],
)
def test_archive_of_a_complete_set_is_accepted(benchmark: str, texts: list[str], status: str, tmp_path: Path) -> None:
    source = write_set(tmp_path / "box" / benchmark, texts)
    (package,) = write_archive([source], tmp_path / "out", "MyLab")
    assert contents(tmp_path / "out" / "MyLab" / "results" / "box" / benchmark) == contents(source)
    description = json.loads((package.folder / "systems" / "box.json").read_text())
    assert [description[key] for key in ("submitter", "division", "status")] == ["MyLab", "closed", status]
    assert check_package(package).accepted is True


@pytest.mark.slow
def test_archive_of_too_few_runs_is_rejected_with_the_reason(tmp_path: Path) -> None:
    verdict = check_package(*write_archive([write_runs(tmp_path, 4)], tmp_path / "out"))
    assert (verdict.accepted, "found 4, expected 5" in "\n".join(verdict.errors)) == (False, True)
    done = run_encore("archive", tmp_path / "box", "-o", tmp_path / "again")
    assert (done.exit_code, "does not accept" in done.output) == (1, True)


@pytest.mark.slow
def test_run_folders_of_one_system_are_one_set(tmp_path: Path) -> None:
    # Five runs of two run folders, with their passports and code; the name of the node is no path
    passport = {
        "round": "v0.7", "system": "cpu", "nodes": 1, "ranks_per_node": 2, "implementation": "mxnet",
        "node": {"hostname": "my node/../1"},
    }  # fmt: skip
    description = {"submitter": "", "accelerators_per_node": "0"}
    folders = [
        write_files(
            write_runs(tmp_path / str(n), n, 10 * n, submission_division="open"),
            {"run.json": passport, "config.json": {}, "system.json": description},
        )
        for n in (2, 3)
    ]
    (package,) = write_archive(folders, tmp_path / "out")
    (system,) = (path.name for path in (package.folder / "results").iterdir())
    files = {str(file) for file in contents(package.folder / "benchmarks" / "resnet" / "implementations" / system)}
    assert {"run_0/run.json", "run_1/config.json", "code/resnet/benchmark.toml"} <= files
    assert '"division": "open"' in (package.folder / "systems" / f"{system}.json").read_text("utf-8")
    assert (package.sets, package.logs, check_package(package).accepted) == (1, 5, True)


def test_gzip_is_unpacked_and_old_archives_are_not_changed(tmp_path: Path) -> None:
    plain = contents(source := write_runs(tmp_path))
    (source / "result_0.txt").rename(source / "result_0.txt.gz").write_bytes(gzip.compress(plain[Path("result_0.txt")]))
    (package,) = write_archive([source], tmp_path / "out")
    assert contents(package.folder / "results" / "box" / "resnet") == plain
    assert "already exists" in error_of("archive", source, "-o", tmp_path / "out").found


def test_archive_does_not_unpack_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_FREE_BYTES", 0)
    write_files(tmp_path, {"result_0.txt.gz": gzip.compress(b"\n" * 2**20)})
    with pytest.raises(EncoreError, match="its content has more than"):
        archive._copy_log(tmp_path / "result_0.txt.gz", tmp_path / "result_0.txt")


def test_rounds_without_a_package_checker_and_logs_of_no_benchmark(tmp_path: Path) -> None:
    source = write_set(tmp_path / "dgx1" / "resnet", [resnet_v05(134.0 + n) for n in range(5)])
    verdict = check_package(*write_archive([source], tmp_path / "out"))
    assert (verdict.accepted, "no package checker" in verdict.summary) == (None, True)
    unknown = write_set(tmp_path / "unknown", [':::MLLOG {"key": "run_start", "time_ms": 1, "value": null}\n'])
    assert "is not known" in error_of("archive", unknown, "-o", tmp_path / "other").found


# --- findings in other formats ----------------------------------------------------------------------------


@pytest.fixture
def faulty_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # In the working directory: the second log misses the target, the third breaks a rule
    monkeypatch.chdir(tmp_path)
    texts = [resnet_v07(40.0), resnet_v07(41.0, quality=(0.3, 0.7)), resnet_v07(42.0, opt_name="\x1badam <&>")]
    return write_set(tmp_path / "a set", texts).relative_to(tmp_path)


@pytest.mark.parametrize("form", ["sarif", "junit"])
@pytest.mark.parametrize("command", ["check", "audit"])
def test_findings_in_the_formats_of_other_tools(
    command: str, form: str, faulty_set: Path, recorded: Callable[[str, object], None]
) -> None:
    (faulty_set / "result_3.txt").write_bytes((faulty_set / "result_0.txt").read_bytes())
    done = run_encore(command, faulty_set, "--format", form)
    assert done.exit_code == 1
    text = done.stdout.replace(f'"{__version__}"', '"VERSION"')
    recorded(f"{command}.{form}", json.loads(text) if form == "sarif" else text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fail", "code", "failed"), [("a set", "true", 0, "1"), ("a set", "false", 0, ""), ("no", "true", 2, "")]
)
def test_github_action_writes_both_files_and_its_verdict(
    faulty_set: Path, tmp_path: Path, name: str, fail: str, code: int, failed: str
) -> None:
    action = yaml.safe_load((paths.ROOT / ".github/actions/check-results/action.yml").read_text("utf-8"))
    (script,) = [step["run"] for step in action["runs"]["steps"] if step.get("id") == "judge"]
    (write_files(tmp_path, {"setup.sh": "#!/bin/sh\n", "output": ""}) / "setup.sh").chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    variables = {"RESULTS": name, "CHECKOUT": ".", "FAIL": fail, "RUNNER_TEMP": ".", "GITHUB_OUTPUT": "output"}
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    outputs = dict(line.split("=", 1) for line in (tmp_path / "output").read_text().splitlines())
    versions = [json.loads((tmp_path / outputs.pop(name)).read_text())["version"] for name in {*outputs} - {"failed"}]
    assert (done.returncode, "no does not exist" in done.stderr) == (code, code == 2), done.stderr
    assert (outputs.get("failed", ""), versions) == (failed, ["2.1.0"] * 2 if code == 0 else [])


# --- merge ------------------------------------------------------------------------------------------------


def write_labs(root: Path) -> Path:
    # Two laboratories, one of them in two trees
    for name, system, submitter in (("a", "box", "Lab"), ("b", "rack", "Lab"), ("c", "box", "Theirs")):
        write_files(write_tree(root / name, 5, submitter, system), {"benchmarks/resnet/README.md": "how to run it"})
    return write_files(root, {"b/Lab/.git/config": "other"})


def write_other(path: Path) -> None:
    write_files(path.parent, {path.name: "other"})


def replace_by_folder(path: Path) -> None:
    path.unlink()
    write_other(path / "x")


# Additions to b/Lab, each of which is a collision
COLLIDING: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a set of that name": ("results/box/resnet/result_0.txt", write_other),
    "a description of that name": ("systems/box.json", write_other),
    "code of a system described elsewhere": ("benchmarks/resnet/implementations/box/run.sh", write_other),
    "other code": ("benchmarks/resnet/README.md", write_other),
    "a link": ("systems/x.json", lambda path: path.symlink_to("/etc/passwd")),
    "a link to a folder": ("benchmarks/all", lambda path: path.symlink_to("/etc")),
    "a linked tree": ("../Linked", lambda path: path.symlink_to(path.resolve().parents[1] / "a" / "Lab")),
    "an escape in a name": ("systems/\x1b[2J.json", write_other),
    "a name by its case": ("systems/BOX.json", write_other),
    "a file in a set by its case": ("results/rack/resnet/RESULT_0.txt", write_other),
    "a folder by its case": ("benchmarks/ResNet/x", write_other),
    "a letter in two forms": ("x", lambda path: [write_other(path / name) for name in ("caf\u00e9", "cafe\u0301")]),
    "a submitter by its case": ("../lab/results/box2/resnet/result_0.txt", write_other),
    "a folder of a file's name": ("benchmarks/resnet/README.md", replace_by_folder),
    "a pipe": ("benchmarks/pipe", os.mkfifo),
}


def test_trees_are_merged_completely_or_not_at_all(
    tmp_path: Path, recorded: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: dict[str, object] = {}
    for name, (place, put) in {**COLLIDING, "nothing": ("systems/y.json", write_other)}.items():
        root, output = write_labs(tmp_path / name), tmp_path / name / "round"
        put(root / "b" / "Lab" / place)
        trees = [root / tree for tree in "abc"]
        plain = json.loads(run_encore("archive", *trees, "-o", output, "--merge", "--json").stdout)
        collides = bool(plain["collisions"])
        assert (collides, plain["output"] is None, output.exists()) == (name != "nothing", collides, not collides)
        done = run_encore("archive", *trees, "-o", root / "again", "--merge", width=200)
        assert done.exit_code == collides
        printed[name] = done.output.splitlines()
    recorded("merged.json", printed)
    merged = {file: data for tree in trees for file, data in contents(tree).items() if ".git" not in file.parts}
    assert contents(output) == merged
    (root / "dangling").symlink_to(root / "none")
    (root / "loop").symlink_to(root / "loop")
    for new, message in (
        (output, "already exists"),
        (root / "a" / "new", "is in the input"),
        (root / "dangling", "is a link\n  expected: a new folder"),
        (root / "loop" / "x", "loop is not a directory"),
        (root / "a/Lab/systems/box.json/x/y", "box.json is not a directory\n  expected: a folder to write y to"),
        (root / ("x" * 300), "not merged: .*File name too long"),
    ):
        with pytest.raises(EncoreError, match=message):
            merge_trees([root / "a"], new)
    with pytest.raises(EncoreError, match=r"not merged: Symlink loop|cannot read .*loop"):
        merge_trees([root / "loop"], root / "new")
    # A folder whose names can be read, and nothing else in it
    monkeypatch.setattr(merge, "_no_file", lambda path: os.close(os.open(path / "x", os.O_RDONLY)))
    with pytest.raises(EncoreError, match=r"not merged: .*\n  hint: check the permissions"):
        merge_trees([root / "a"], root / "new")
