"""Scores: hand-made sets for each rule, and the published figures where the public logs are at hand."""

import csv
import json
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.results.logs.run_log import Reason, read_run
from encore.results.published.published import DATA
from encore.results.rules import canonical, rule_for
from encore.results.scores.score import score_folder
from tests.results.result_logs import START_MS, resnet_v07, write_set


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert read_run(tmp_path / "result_0.txt").reason is Reason.UNREADABLE


def test_bert_has_a_lower_target_at_large_batches() -> None:
    assert rule_for("v0.7", "bert", 8191).targets[0].value == 0.712
    assert rule_for("v0.7", "bert", 8192).targets[0].value == 0.706
    assert rule_for("v1.0", "bert", 8192).targets[0].value == 0.72


def test_a_tree_with_a_link_to_itself(tmp_path: Path) -> None:
    write_set(tmp_path / "resnet", [resnet_v07()] * 5)
    (tmp_path / "resnet" / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert len(score_folder(tmp_path)) == 1


@pytest.mark.parametrize("make", ["missing", "empty", "binary"])
def test_bad_input_is_reported(make: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    if make != "missing":
        folder.mkdir()
    if make == "binary":
        (folder / "model.bin").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(EncoreError) as raised:
        score_folder(folder)
    assert raised.value.hint


def test_command_table(tmp_path: Path) -> None:
    folder = write_set(tmp_path, [resnet_v07()] * 2)
    (folder / "result_2.txt").write_text(resnet_v07(status="\x1b[2Jaborted"))
    result = CliRunner().invoke(app, ["score", str(folder)])
    assert result.exit_code == 0
    assert "2 more needed" in result.stdout
    assert "\x1b[2J" not in result.stdout


def published_rows() -> dict[tuple[str, str, str, str | None], dict[str, str]]:
    with (DATA / "published.csv").open(encoding="utf-8", newline="") as file:
        return {
            (row["round"], row["submitter"].lower(), row["system"], canonical(row["benchmark"])): row
            for row in csv.DictReader(file)
        }


NOT_COMPLETE = {
    ("v0.6", "NVIDIA", "dgx1_ngc19.05_pytorch", "maskrcnn"),
    ("v0.6", "NVIDIA", "dgx1_ngc19.05_tensorflow", "minigo"),
    ("v0.7", "NVIDIA", "dgx1_ngc20.06_pytorch", "bert"),
    ("v0.7", "NVIDIA", "dgx1_ngc20.06_pytorch", "maskrcnn"),
    ("v0.7", "NVIDIA", "dgxa100_ngc20.06_pytorch", "bert"),
}
"""Sets of which the archive holds one log."""


def test_every_complete_public_set_has_its_published_score(public_logs: Path) -> None:
    rows = published_rows()
    not_complete, agreeing = set(), 0
    for score in score_folder(public_logs):
        round_, submitter, system, benchmark = score.folder.parts[-4:]
        row = rows[round_, submitter.lower(), system, benchmark]
        assert (score.round, score.benchmark) == (round_, benchmark)
        if len(score.runs) < int(row["runs"]):
            not_complete.add((round_, submitter, system, benchmark))
            assert score.score_minutes is None
            assert f"{int(row['runs']) - len(score.runs)} more needed" in score.missing
            continue
        assert score.score_minutes == pytest.approx(float(row["score_minutes"]), abs=0.001), score.folder
        agreeing += 1
    assert not_complete == NOT_COMPLETE
    assert agreeing == 47


@pytest.mark.parametrize("ending", ["tar.gz", "tar.xz", "zip"])
def test_an_archive_is_scored_as_the_folder_in_it(tmp_path: Path, ending: str) -> None:
    """No link and no path leads out of it, and nothing is left behind."""
    folder = write_set(
        tmp_path / "round" / "Lab" / "results" / "box" / "resnet",
        [resnet_v07(40.0 + n, seed=n, start_ms=START_MS + 10**7 * n) for n in range(5)],
    )
    packed = tmp_path / f"round.{ending}"
    outside = f"../{tmp_path.name}_escaped.txt"
    if ending == "zip":
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr(outside, resnet_v07())
            for file in folder.iterdir():
                archive.write(file, file.relative_to(tmp_path))
    else:
        with tarfile.open(packed, f"w:{ending[4:]}") as archive:
            archive.add(folder / "result_0.txt", outside)
            link = tarfile.TarInfo("round/Lab/results/box/resnet/result_5.txt")
            link.type, link.linkname = tarfile.SYMTYPE, str(folder / "result_0.txt")
            archive.addfile(link)
            archive.add(folder, folder.relative_to(tmp_path))
    before = set(Path(tempfile.gettempdir()).iterdir())
    shown = CliRunner().invoke(app, ["score", str(packed), "--json"])
    found = json.loads(shown.stdout)
    assert (found["score_minutes"], len(found["runs"]), found["missing"]) == (42.0, 5, "")
    assert found["folder"] == str(packed / "round" / "Lab" / "results" / "box" / "resnet")
    assert {**found, "folder": str(folder)} == json.loads(
        CliRunner().invoke(app, ["score", str(folder), "--json"]).stdout
    )
    assert not (tmp_path.parent / f"{tmp_path.name}_escaped.txt").exists()
    assert not [path for path in set(Path(tempfile.gettempdir()).iterdir()) - before if (path / "round").exists()]
    packed.write_bytes(packed.read_bytes()[:300])
    broken = CliRunner().invoke(app, ["score", str(packed)])
    assert isinstance(broken.exception, EncoreError)
    assert "cannot be read" in broken.exception.found
