"""MLPerf's submission tree, judged by mlperf-logging's own package checker."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.submissions.archive import check_package, write_archive
from encore.results.scores.score import score_folder
from tests.results.result_logs import START_MS, flux1_v61, resnet_v05, resnet_v07, write_set


def run_set(folder: Path, count: int = 5, first: int = 0, **changed: object) -> Path:
    texts = [resnet_v07(40.0 + n, start_ms=START_MS + 10**7 * (n + first), **changed) for n in range(count)]
    return write_set(folder / "box" / "resnet", texts)


def test_the_checker_accepts_a_whole_set(tmp_path: Path) -> None:
    source = run_set(tmp_path)
    (package,) = write_archive([source], tmp_path / "out", "MyLab")
    assert package.folder == tmp_path / "out" / "MyLab"
    packed = package.folder / "results" / "box" / "resnet"
    assert sorted(path.name for path in packed.iterdir()) == [f"result_{n}.txt" for n in range(5)]
    assert (packed / "result_3.txt").read_bytes() == (source / "result_3.txt").read_bytes()
    described = json.loads((package.folder / "systems" / "box.json").read_text())
    assert described["submitter"] == "MyLab"
    assert described["division"] == "closed"
    verdict = check_package(package)
    assert verdict.accepted is True, verdict.errors


def test_the_checker_of_v61_accepts_a_whole_set(tmp_path: Path) -> None:
    """Its system descriptions have other words for submission_status than the log."""
    texts = [flux1_v61(40.0 + number, seed=number) for number in range(10)]
    (package,) = write_archive([write_set(tmp_path / "box" / "flux1", texts)], tmp_path / "out", "MyLab")
    assert json.loads((package.folder / "systems" / "box.json").read_text())["status"] == "Available on-premise"
    verdict = check_package(package)
    assert verdict.accepted is True, verdict.errors


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


def test_run_folders_of_one_system_are_one_set(tmp_path: Path) -> None:
    """Five runs, made in two goes, with their passports and the code next to them."""
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


def test_public_sets_are_accepted_and_keep_their_scores(public_logs: Path, tmp_path: Path) -> None:
    source = public_logs / "v0.7" / "NVIDIA"
    names = ("dgx1_ngc20.06_mxnet", "dgxa100_ngc20.06_mxnet", "dgxa100_n8_ngc20.06_mxnet")
    (package,) = write_archive([source / name for name in names], tmp_path)
    assert check_package(package).accepted is True
    before = {score.score_minutes for name in names for score in score_folder(source / name)}
    after = {score.score_minutes for score in score_folder(package.folder / "results")}
    assert before == after
