"""Scores: hand-made sets for each rule, and the published figures where the public logs are at hand."""

from __future__ import annotations

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
from encore.results.audit.judge import audit_score
from encore.results.logs.run_log import Reason, read_run
from encore.results.published.published import DATA
from encore.results.rules import canonical, rule_for
from encore.results.scores.score import Score, score_folder
from tests.results.result_logs import START_MS, mll, mllog, resnet_v05, resnet_v07, v05, write_set


def minutes_set(folder: Path, minutes: list[float], **kwargs: object) -> Path:
    return write_set(
        folder,
        [
            resnet_v07(each, start_ms=START_MS + 10**7 * number, **kwargs)  # type: ignore[arg-type]
            for number, each in enumerate(minutes)
        ],
    )


def only(folder: Path) -> Score:
    scores = score_folder(folder)
    assert len(scores) == 1
    return scores[0]


def test_mean_without_fastest_and_slowest(tmp_path: Path) -> None:
    score = only(minutes_set(tmp_path, [40.0, 41.0, 39.0, 45.0, 42.0]))
    assert (score.round, score.benchmark) == ("v0.7", "resnet")
    assert score.score_minutes == pytest.approx(41.0)
    assert [run.path.name for run in score.dropped] == ["result_2.txt", "result_3.txt"]
    assert len(score.counted) == 3


def test_one_run_that_missed_counts_as_the_slowest(tmp_path: Path) -> None:
    folder = minutes_set(tmp_path, [40.0, 41.0, 39.0, 42.0])
    (folder / "result_4.txt").write_text(resnet_v07(10.0, quality=(0.3,), status="aborted"))
    score = only(folder)
    assert score.score_minutes == pytest.approx(41.0)
    assert len(score.converged) == 4
    assert {run.path.name for run in score.dropped} == {"result_2.txt", "result_4.txt"}


def test_two_runs_that_missed_leave_no_score(tmp_path: Path) -> None:
    folder = minutes_set(tmp_path, [40.0, 41.0, 39.0])
    for number in (3, 4):
        (folder / f"result_{number}.txt").write_text(resnet_v07(10.0, quality=(0.3,), status="aborted"))
    score = only(folder)
    assert score.score_minutes is None
    assert "2 runs missed the target" in score.missing


def test_a_set_that_is_not_complete_says_what_is_missing(tmp_path: Path) -> None:
    score = only(minutes_set(tmp_path, [40.0, 41.0]))
    assert score.score_minutes is None
    assert score.missing == "2 of 5 runs: 3 more needed"


def test_a_damaged_log_spoils_the_set(tmp_path: Path) -> None:
    folder = minutes_set(tmp_path, [40.0, 41.0, 39.0, 42.0, 43.0])
    text = (folder / "result_2.txt").read_text()
    (folder / "result_2.txt").write_text(text[: text.index("run_stop") + 4])
    score = only(folder)
    assert score.score_minutes is None
    assert "result_2.txt" in score.missing
    assert score.runs[2].reason is Reason.DAMAGED


@pytest.mark.parametrize(
    "text",
    ["killed\n", mllog("cache_clear", True), "".join(resnet_v07(44.0).splitlines(keepends=True)[:-1])],
    ids=["no event", "no run_start", "no run_stop"],
)
def test_a_crashed_run_counts_as_the_one_that_missed(text: str, tmp_path: Path) -> None:
    """MLCommons' scores do so in 14 public sets."""
    folder = minutes_set(tmp_path, [40.0, 41.0, 39.0, 42.0])
    (folder / "result_4.txt").write_text(text)
    score = only(folder)
    assert score.score_minutes == pytest.approx(41.0)
    assert {run.path.name for run in score.dropped} == {"result_2.txt", "result_4.txt"}
    assert any("result_4.txt counts as a run that missed the target" in flag.text for flag in score.flags)
    (folder / "result_3.txt").write_text(text)
    assert "2 runs missed the target or crashed" in only(folder).missing


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nothing here\n", Reason.NO_EVENTS),
        (mllog("submission_benchmark", "resnet"), Reason.NO_START),
        (mllog("run_start") + mllog("eval_accuracy", 0.8, epoch_num=1), Reason.NO_STOP),
        (resnet_v07(status="aborted"), Reason.ABORTED),
        (resnet_v07(quality=(0.3, 0.7589)), Reason.TARGET_MISSED),
        (resnet_v07(quality=()), Reason.NO_QUALITY),
        (resnet_v07(-3.0), Reason.CLOCK),
        (resnet_v07() + resnet_v07(start_ms=START_MS + 10**7), Reason.SEVERAL_RUNS),
        (resnet_v07() + mllog("submission_benchmark", "bert"), Reason.SEVERAL_BENCHMARKS),
        (':::MLLOG {"namespace": ' + resnet_v07(), Reason.DAMAGED),
        (resnet_v05(quality=0.7), Reason.TARGET_MISSED),
        (resnet_v05(stop='{"success": false}'), Reason.ABORTED),
    ],
)
def test_every_reason(text: str, reason: Reason, tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    run = read_run(path)
    assert run.reason is reason
    assert run.minutes is None
    assert run.explanation


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert read_run(tmp_path / "result_0.txt").reason is Reason.UNREADABLE


def test_v05_success_is_inferred_from_the_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(resnet_v05(134.5))
    run = read_run(path)
    assert (run.round, run.benchmark, run.seeds, run.epochs) == ("v0.5", "resnet", (14209,), 61)
    assert run.minutes == pytest.approx(134.5)
    assert (run.status, run.converged) == (None, True)


def test_ncf_takes_the_first_fifty_that_converge(tmp_path: Path) -> None:
    texts = []
    for number in range(100):
        start = 1_541_731_858.0 + 1000 * number
        success, quality = ("false", 0.6) if number % 5 == 0 else ("true", 0.6352)
        texts.append(
            v05("run_start", seconds=start, benchmark="ncf")
            + v05("eval_accuracy", f'{{"epoch": 12, "value": {quality}}}', start + 20, "ncf")
            + v05("run_stop", f'{{"success": {success}}}', start + 60 + number, "ncf")
        )
    score = only(write_set(tmp_path, texts))
    converging = [60 + number for number in range(100) if number % 5][:50]
    assert score.required == 100
    assert score.score_minutes == pytest.approx(sum(converging[1:-1]) / 48 / 60)


def test_minigo_of_v06_without_run_stop(tmp_path: Path) -> None:
    start = 1_560_822_993.653
    path = tmp_path / "result_0.txt"
    path.write_text(
        mll("submission_benchmark", "minigo", start - 5)
        + mll("run_start", None, start)
        + mll("eval_accuracy", 0.51, start + 5000, epoch_num=19)
        + mll("eval_result", None, start + 5001, iteration=19, timestamp=1725.869)
    )
    run = read_run(path)
    assert run.round == "v0.6"
    assert run.minutes == pytest.approx(1725.869 / 60)


def test_bleu_has_one_unit(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    start = 1_560_822_683.0
    path.write_text(
        mll("submission_benchmark", "transformer", start)
        + mll("run_start", None, start)
        + mll("eval_accuracy", "25.329875946044922", start + 60, epoch_num=3)
        + mll("run_stop", None, start + 60, status="success")
    )
    assert read_run(path).best_quality["value"] == pytest.approx(25.33, abs=0.01)
    path.write_text(
        mllog("submission_benchmark", "transformer")
        + mllog("run_start")
        + mllog("eval_accuracy", 0.2527, epoch_num=3)
        + mllog("run_stop", None, START_MS + 60_000, status="success")
    )
    run = read_run(path, "v0.7")
    assert run.best_quality["value"] == pytest.approx(25.27)
    assert run.converged
    # Encore logs a system of v0.6 in the lines of v0.7, whatever it reaches.
    path.write_text(path.read_text().replace("0.2527", "0.0527"))
    assert read_run(path, "v0.6").best_quality["value"] == pytest.approx(5.27)
    path.write_text(
        mll("submission_benchmark", "transformer", start)
        + mll("run_start", None, start)
        + mll("eval_accuracy", 0.05, start + 60, epoch_num=1)
    )
    assert read_run(path).best_quality["value"] == pytest.approx(0.05)


def test_a_value_that_went_through_float32_still_meets_its_target() -> None:
    target = rule_for("v0.5", "gnmt").targets[0]  # type: ignore[union-attr]
    assert target.met_by({"value": 21.799999237060547})
    assert not target.met_by({"value": 21.79})


def test_mask_rcnn_has_two_targets_and_three_ways_to_log_them(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    start = 1_558_576_743.0
    for value in (
        [0.381, 0.3435],
        {"accuracy": {"BBOX": 0.381, "SEGM": 0.3435}},
        {"BBOX": 0.381, "SEGM": 0.3435},
    ):
        path.write_text(
            mll("submission_benchmark", "mask", start)
            + mll("run_start", None, start)
            + mll("eval_accuracy", value, start + 60, epoch_num=14)
            + mll("run_stop", None, start + 60, status="success")
        )
        run = read_run(path)
        assert (run.benchmark, run.best_quality) == ("maskrcnn", {"BBOX": 0.381, "SEGM": 0.3435})
        assert run.converged
    path.write_text(path.read_text().replace("0.3435", "0.3385"))
    assert read_run(path).reason is Reason.TARGET_MISSED


def test_bert_has_a_lower_target_at_large_batches() -> None:
    assert rule_for("v0.7", "bert", 8191).targets[0].value == 0.712  # type: ignore[union-attr]
    assert rule_for("v0.7", "bert", 8192).targets[0].value == 0.706  # type: ignore[union-attr]
    assert rule_for("v1.0", "bert", 8192).targets[0].value == 0.72  # type: ignore[union-attr]


def test_suspicious_runs_are_flagged_and_still_counted_by_the_rule(tmp_path: Path) -> None:
    folder = minutes_set(tmp_path, [0.46, 0.46, 0.47, 0.46])
    (folder / "result_4.txt").write_text(resnet_v07(922.5, start_ms=1_592_800_000_000))
    score = only(folder)
    assert score.score_minutes == pytest.approx((0.46 + 0.46 + 0.47) / 3)
    last = score.as_json(audit_score(score))["runs"][4]  # type: ignore[index]
    assert any("times as long" in flag for flag in last["flags"])
    assert any("round number" in flag for flag in last["flags"])


def test_the_same_log_twice_is_reported(tmp_path: Path) -> None:
    score = only(write_set(tmp_path, [resnet_v07()] * 5))
    assert sum("the same run as result_0.txt" in finding.found for finding in audit_score(score)) == 4


def test_several_starts_count_from_the_first(tmp_path: Path) -> None:
    """Each rank may log run_start; the official summarizer takes the last one and so shortens the run."""
    path = tmp_path / "result_0.txt"
    path.write_text(resnet_v07(40.0).replace(*two_lines("run_start", START_MS + 5000), 1))
    run = read_run(path)
    assert run.minutes == pytest.approx(40.0)
    assert len(run.starts) == 2


def two_lines(key: str, later: int) -> tuple[str, str]:
    line = mllog(key)
    return line, line + mllog(key, time_ms=later)


def test_processes_that_disagree_on_the_outcome(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(resnet_v07(40.0) + mllog("run_stop", time_ms=START_MS + 2_400_001, status="aborted"))
    assert read_run(path).reason is Reason.ABORTED


def test_result_10_comes_after_result_2(tmp_path: Path) -> None:
    score = only(minutes_set(tmp_path, [40.0 + number for number in range(12)]))
    assert [run.path.name for run in score.runs] == [f"result_{number}.txt" for number in range(12)]


def test_a_tree_has_one_score_per_set(tmp_path: Path) -> None:
    minutes_set(tmp_path / "results" / "dgxa100" / "resnet", [40.0] * 5)
    write_set(tmp_path / "results" / "old" / "resnet", [resnet_v05(134.0 + number) for number in range(5)])
    (tmp_path / "results" / "notes.md").write_text("not a log")
    assert [(score.round, score.score_minutes) for score in score_folder(tmp_path)] == [
        ("v0.7", pytest.approx(40.0)),
        ("v0.5", pytest.approx(136.0)),
    ]


def test_a_tree_with_a_link_to_itself(tmp_path: Path) -> None:
    minutes_set(tmp_path / "resnet", [40.0] * 5)
    (tmp_path / "resnet" / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert len(score_folder(tmp_path)) == 1


def test_the_round_is_found_from_the_log(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    later = mllog("gradient_accumulation_steps", 1)
    v10 = 1_620_000_000_000
    for text, round_ in (
        (resnet_v07(), "v0.7"),
        (resnet_v07(start_ms=1_893_456_000_001), "v0.7"),
        (resnet_v07(start_ms=v10) + later, "v1.0"),
        (resnet_v07(start_ms=1_893_456_000_001) + later, None),
        (resnet_v05(), "v0.5"),
        (mll("run_start"), "v0.6"),
    ):
        path.write_text(text)
        run = read_run(path)
        assert run.round == round_, text[:80]
        assert run.round_found


def test_the_parts_of_a_run_folder_are_no_further_runs(tmp_path: Path) -> None:
    minutes_set(tmp_path, [40.0] * 2)
    minutes_set(tmp_path / "experiment_0", [40.0])
    (tmp_path / "run.json").write_text('{"round": "v0.7"}')
    assert len(score_folder(tmp_path)) == 1


def test_a_run_folder_says_its_round(tmp_path: Path) -> None:
    later = resnet_v07(start_ms=1_893_456_000_001) + mllog("gradient_accumulation_steps", 1)
    path = tmp_path / "result_0.txt"
    path.write_text(later)
    (tmp_path / "run.json").write_text('{"round": "v1.0"}')
    assert read_run(path).round == "v1.0"
    (tmp_path / "run.json").write_text("[" * 100_000)
    assert read_run(path).round is None


@pytest.mark.parametrize("make", ["missing", "empty", "binary"])
def test_bad_input_is_reported(make: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    if make != "missing":
        folder.mkdir()
    if make == "binary":
        (folder / "model.bin").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(EncoreError) as raised:
        score_folder(folder)
    assert raised.value.remedy


def test_command_json_of_one_set_and_of_a_tree(tmp_path: Path) -> None:
    folder = minutes_set(tmp_path / "a", [40.0, 41.0, 39.0, 45.0, 42.0])
    found = json.loads(CliRunner().invoke(app, ["score", str(folder), "--json"]).stdout)
    assert found["round"] == "v0.7"
    assert found["benchmark"] == "resnet"
    assert found["score_minutes"] == pytest.approx(41.0)
    assert found["converged"] == 5
    assert found["counted"] == ["result_0.txt", "result_1.txt", "result_4.txt"]
    assert found["dropped"] == ["result_2.txt", "result_3.txt"]
    assert (found["runs"][0]["minutes"], found["runs"][0]["reason"]) == (pytest.approx(40.0), None)
    minutes_set(tmp_path / "b", [50.0])
    assert len(json.loads(CliRunner().invoke(app, ["score", str(tmp_path), "--json"]).stdout)) == 2


def test_command_table(tmp_path: Path) -> None:
    folder = minutes_set(tmp_path, [40.0, 41.0])
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
