"""What public logs and altered ones showed of reading: clocks, units, rounds, sizes of data sets, many evaluations."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.results.audit.judge import audit_path
from encore.results.compare.compare import compare_path
from encore.results.compare.sides import load_side
from encore.results.compliance.compliance import check, score_and_check
from encore.results.compliance.extra_rules import small_data_findings
from encore.results.logs.run_log import Reason, RunLog, read_run
from encore.results.logs.timing import Length, length_of
from encore.results.rules import canonical, rule_for, targets_of
from encore.results.scores.score import score_folder
from tests.results.result_logs import START_MS, mllog, resnet_v07, write_set

LATER_MS = 1_640_000_000_000
"""In the months of v2.0."""


def run_of(folder: Path, text: str, round_: str | None = None) -> RunLog:
    path = folder / "result_0.txt"
    path.write_text(text, encoding="utf-8")
    return read_run(path, round_)


def log_of(benchmark: str, *middle: str, start_ms: int = LATER_MS, minutes: float = 40.0) -> str:
    return "".join(
        (
            mllog("submission_benchmark", benchmark, start_ms - 1000),
            mllog("run_start", None, start_ms),
            *middle,
            mllog("run_stop", None, round(start_ms + minutes * 60_000), status="success"),
        )
    )


@pytest.mark.parametrize(
    "time", ["-1e300", "0", "-5", str(START_MS // 1000), '"١٥٩٢٦٦٩٢٨٨١٨٣"', "NaN", "null", "1e300"]
)
@pytest.mark.parametrize("key", ["run_start", "run_stop"])
def test_a_time_at_which_no_run_was_is_the_clocks(key: str, time: str, tmp_path: Path) -> None:
    text = resnet_v07(40.0)
    line = next(each for each in text.splitlines() if f'"{key}"' in each)
    record = json.loads(line.partition(" ")[2])
    folder = write_set(tmp_path, [text.replace(line, line.replace(str(record["time_ms"]), time))] * 5)
    run = read_run(folder / "result_0.txt")
    assert (run.reason, run.minutes, run.elapsed_minutes) == (Reason.CLOCK, None, None)
    number = text.splitlines().index(line) + 1
    assert run.explanation.startswith(f"{key} in line {number} ")
    side = load_side(folder)
    assert side.score is None
    assert {each.line for each in side.findings if each.rule == "implausible_time"} == {number}


@pytest.mark.parametrize(
    ("time_ms", "told"),
    [
        ("-1e+303", "has the time -1e+303, which is none"),
        ("NaN", "has the time nan, which is none"),
        ("null", "has no time"),
        ("1308853388183", "is on 2011-06-23, which is not in the years 2017 to 2100: is the clock right?"),
        ("-5", "is at -0.005 s, which is not in the years 2017 to 2100: in another unit?"),
    ],
)
def test_a_time_that_is_refused_is_told(time_ms: str, told: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, mllog("run_start").replace(str(START_MS), time_ms))
    assert run.explanation == f"run_start in line 1 {told}"


def test_evaluations_without_a_number_are_not_called_absent(tmp_path: Path) -> None:
    text = resnet_v07(quality=(float("nan"), float("nan")))
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "eval_accuracy" in each)
    run = run_of(tmp_path, text)
    assert (run.reason, run.explanation) == (Reason.NO_QUALITY, f"eval_accuracy in line {line} has no number")


def test_a_run_in_seconds_and_one_of_months_have_no_time(tmp_path: Path) -> None:
    seconds = run_of(tmp_path, resnet_v07(40.0 / 1000, start_ms=START_MS // 1000))
    assert seconds.reason is Reason.CLOCK
    assert "in another unit?" in seconds.explanation
    months = run_of(tmp_path, resnet_v07(61 * 1440.0))
    assert months.reason is Reason.CLOCK
    assert "61 days after run_start" in months.explanation
    assert months.elapsed_minutes is None
    assert run_of(tmp_path, resnet_v07(59 * 1440.0)).converged


def test_the_times_of_hugectrs_converter_are_taken_by_their_difference(tmp_path: Path) -> None:
    """v0.7 NVIDIA DLRM: seconds since 1970 with milliseconds added to them, in two accepted submissions."""
    file = "/workspace/dlrm/mlperf_logger/format_ctr_output.py"
    text = (
        mllog("submission_benchmark", "dlrm", START_MS)
        + mllog("run_start", None, 1_592_985_147, file=file)
        + mllog("eval_accuracy", 0.8026, 1_593_184_000, file=file, epoch_num=0.9)
        + mllog("run_stop", None, 1_593_184_341, file=file, status="success")
    )
    assert run_of(tmp_path, text, "v0.7").minutes == pytest.approx(199.194 / 60)


@pytest.mark.parametrize(
    ("benchmark", "round_", "value", "word"),
    [
        ("resnet", "v0.7", 55.0, "top-1 accuracy"),
        ("resnet", "v0.6", 76.1, "top-1 accuracy"),
        ("rnnt", "v1.0", -1.0, "word error rate"),
        ("unet3d", "v2.0", 91.0, "mean DICE"),
        ("gpt3", "v3.0", 1.5, "log perplexity"),
    ],
)
def test_a_value_of_another_unit_is_named_and_does_not_converge(
    benchmark: str, round_: str, value: float, word: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path, log_of(benchmark, mllog("eval_accuracy", value, LATER_MS + 1000, epoch_num=1)), round_)
    assert run.reason is Reason.TARGET_MISSED
    assert f"is no {word}" in run.explanation


@pytest.mark.parametrize(("fid", "clip", "converged"), [(89.9, 0.151, True), (999.0, 0.2, False), (80.0, 0.149, False)])
@pytest.mark.parametrize("position", [{"samples_count": 2_048_000}, {"step_num": 1750}])
def test_stable_diffusion_has_two_targets_at_one_checkpoint(
    position: dict[str, int], fid: float, clip: float, converged: bool, tmp_path: Path
) -> None:
    """Both metrics are logged one by one, in v3.1 by steps, and all FIDs before the CLIP scores."""
    (name,) = position
    earlier = {name: position[name] // 2}
    text = log_of(
        "stable_diffusion",
        mllog("global_batch_size", 1024, LATER_MS),
        mllog("eval_accuracy", 130.0, LATER_MS + 1, metric="FID", **earlier),
        mllog("eval_accuracy", fid, LATER_MS + 2, metric="FID", **position),
        mllog("eval_accuracy", 0.99, LATER_MS + 3, metric="CLIP", **earlier),
        mllog("eval_accuracy", clip, LATER_MS + 4, metric="CLIP", **position),
    )
    run = run_of(tmp_path, text, "v3.1")
    assert run.converged is converged
    assert [dict(point.values) for point in run.quality] == [{"FID": 130.0, "CLIP": 0.99}, {"FID": fid, "CLIP": clip}]
    assert run.quality[1].samples in (2_048_000, 1750 * 1024)


def test_the_evaluation_that_counts_is_kept_however_many_there_are(tmp_path: Path) -> None:
    many = [mllog("eval_accuracy", 0.1 + number / 1e6, LATER_MS + number, epoch_num=number) for number in range(9000)]
    many[6000] = mllog("eval_accuracy", 0.77, LATER_MS + 6000, epoch_num=6000)
    many[7000] = mllog("eval_accuracy", 55.0, LATER_MS + 7000, epoch_num=7000)
    run = run_of(tmp_path, log_of("resnet", *many), "v2.0")
    assert run.converged
    assert run.best_quality == {"value": 0.77}
    assert (run.quality[0].epoch, run.epochs) == (0, 8999)
    assert len(run.quality) < 4300
    assert [point.line for point in run.quality] == sorted(point.line for point in run.quality)


@pytest.mark.parametrize(("round_", "met"), [("v0.5", True), ("v0.6", True), ("v0.7", False), ("v4.0", False)])
def test_float32_is_allowed_for_where_no_official_rule_compares_exactly(round_: str, met: bool) -> None:
    target = targets_of(round_, "resnet")[0]
    assert target.met_by({"value": target.value - 5e-8}) is met
    assert target.met_by({"value": target.value})


@pytest.mark.parametrize(
    ("benchmark", "round_", "counts", "small"),
    [
        ("ssd", "v2.0", (4572, 97, 256), False),
        ("ssd", "v3.0", (4571, 97, 256), False),
        ("ssd", "v2.0", (1_170_301, 24_781, 256), False),
        ("ssd", "v2.0", (500, 97, 256), True),
        ("ssd", "v0.7", (4572, 97, 256), True),
        ("retinanet", "v5.0", (1143, 2, 1024), False),
        ("resnet", "v3.0", (1_281_167, 49_999, 3264), False),
        ("resnet", "v1.0", (1_281_167, 390, 8192), False),
        ("resnet", "v0.7", (1_277_952, 51_200, 4096), False),
        ("resnet", "v0.7", (1_000_000, 50_000, 4096), True),
        ("resnet", "v0.7", (1_281_167, 5_000, 4096), True),
        ("dlrm", "v2.0", (3_495_680_000, 89_137_319, 51_200), False),
        ("dlrm", "v2.0", (349_568_000, 89_137_319, 51_200), True),
    ],
)
def test_official_counts_are_not_small(
    benchmark: str, round_: str, counts: tuple[int, int, int], small: bool, tmp_path: Path
) -> None:
    train, evaluate, batch = counts
    run = RunLog(
        path=tmp_path,
        benchmark=benchmark,
        round=round_,
        train_samples=train,
        eval_samples=evaluate,
        global_batch=batch,
    )
    assert bool(small_data_findings(run)) is small


def test_one_folder_is_one_round_and_a_guess_is_called_one(tmp_path: Path) -> None:
    """Five logs, written on both sides of a deadline."""
    between = 1_623_560_000_000
    v10 = log_of("bert", mllog("eval_accuracy", 0.73, between), start_ms=between - 10**8)
    v11 = log_of("bert", mllog("eval_accuracy", 0.73, between), start_ms=between + 10**8)
    crashed = mllog("submission_benchmark", "bert", between)
    folder = write_set(tmp_path / "any", [v11, *[v10] * 8, crashed])
    assert [read_run(folder / f"result_{number}.txt").round for number in (0, 1, 9)] == ["v1.1", "v1.0", None]
    (score,) = score_folder(folder)
    assert (score.round, score.round_is_guess) == ("v1.0", True)
    assert score.score_minutes == pytest.approx(40.0)
    assert all(run.round == "v1.0" and "guess" in run.round_found for run in score.runs)
    assert score.as_json()["round_is_guess"] is True
    assert "8 of 10 logs look like v1.0, 1 like v1.1: scored as one set of v1.0" in {flag.text for flag in score.flags}
    assert {report.ruleset for report in score_and_check(folder)[1] if report.ruleset} == {"1.0.0"}
    table = CliRunner().invoke(app, ["score", str(folder)]).stdout
    assert "v1.0?" in table
    assert "v1.0 is a guess from the" in table
    assert any("v1.0 is a guess" in caveat for caveat in compare_path(folder).caveats)
    named = write_set(tmp_path / "training_results_v1.1" / "bert", [v11, v10])
    (score,) = score_folder(named)
    assert (score.round, score.round_is_guess, score.flags) == ("v1.1", False, ())


def test_a_crash_before_the_benchmark_is_named_belongs_to_the_folders_set(tmp_path: Path) -> None:
    whole = log_of("bert", mllog("eval_accuracy", 0.73, LATER_MS))
    (score,) = score_folder(write_set(tmp_path, [*[whole] * 9, mllog("cache_clear", True, LATER_MS)]), "v2.0")
    assert score.score_minutes == pytest.approx(40.0)


LATER = "rnnt unet3d gpt3 stable_diffusion llama2_70b_lora llama31_8b llama31_405b flux1 gnn rgat dlrm_dcnv2 retinanet"


@pytest.mark.parametrize("name", LATER.split())
def test_every_benchmark_of_every_round_has_its_rule(name: str) -> None:
    assert canonical(name) == name
    rules = [rule for round_ in ("v1.0", "v3.1", "v4.0", "v5.0", "v5.1") if (rule := rule_for(round_, name))]
    assert rules
    assert all(rule.targets for rule in rules)


def test_benchmarks_of_hpc_are_known_by_name_and_not_scored(tmp_path: Path) -> None:
    (score,) = score_folder(write_set(tmp_path, [log_of("cosmoflow")]))
    assert score.benchmark == "cosmoflow"
    assert "MLPerf HPC" in score.missing


_ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (gzip.compress(resnet_v07().encode(), mtime=0)[:30], "the compressed file is damaged"),
        (resnet_v07().translate(_ARABIC).encode(), "holds a damaged event"),
    ],
    ids=["cut off", "other digits"],
)
def test_a_file_without_a_whole_event_is_damaged_and_no_crash(content: bytes, why: str, tmp_path: Path) -> None:
    folder = write_set(tmp_path, [resnet_v07(40.0 + number) for number in range(4)])
    path = folder / "result_4.txt"
    path.write_bytes(content)
    run = read_run(path)
    assert (run.reason, run.events) == (Reason.DAMAGED, 0)
    assert why in run.explanation
    (audit,) = audit_path(folder)
    assert audit.score.score_minutes is None
    assert f"not to be judged: result_4.txt ({run.explanation})" in audit.score.missing
    assert not any("do not touch the time" in finding.found for finding in audit.findings)
    with pytest.raises(EncoreError, match=why):
        check(path)


def test_a_target_missed_by_little_is_shown_with_the_digits_that_tell(tmp_path: Path) -> None:
    run = run_of(tmp_path, resnet_v07(quality=(0.3, 0.75899995)))
    assert run.explanation == "target value 0.759 (top-1 accuracy); the last evaluation has value 0.7589999"
    (finding,) = (each for each in check(run.path).findings if "eval_accuracy" in each.rule)
    assert finding.found == "the best of 2 evaluations has value 0.7589999"


@pytest.mark.parametrize(
    ("benchmark", "unit"), [("unet3d", "epochs"), ("resnet", "steps or samples"), ("gpt3", "steps or samples")]
)
def test_3d_unet_alone_trains_for_thousands_of_epochs(benchmark: str, unit: str, tmp_path: Path) -> None:
    """v1.1 Dell XE8545."""
    log = log_of(benchmark, mllog("eval_accuracy", 0.91, LATER_MS + 1000, epoch_num=2495))
    assert length_of(run_of(tmp_path, log)) == Length(2495.0, unit)


@pytest.mark.parametrize(
    ("first", "number", "done"),
    [
        pytest.param(1, 1.899193, 0.899193, id="the share of the open epoch on top of its number"),
        pytest.param(1, 2.0, 1.0, id="the whole of it"),
        pytest.param(1, 1, 1.0, id="the number of the epoch which ends"),
        pytest.param(0, 0.75, 0.75, id="epochs from 0"),
        pytest.param(1, 0.75, 0.75, id="the share alone"),
    ],
)
def test_an_evaluation_inside_an_epoch(first: int, number: float, done: float, tmp_path: Path) -> None:
    """v0.7 NVIDIA DLRM, merlin_hugectr and pytorch, has the first; others count differently.

    In v1.0 Supermicro as-4142gs-tnr the epoch stops 5 ms before the quality, by times that were rounded.
    """
    middle = (
        mllog("epoch_start", None, LATER_MS + 1, epoch_num=first),
        mllog("eval_start", None, LATER_MS + 500, epoch_num=number),
        mllog("epoch_stop", None, LATER_MS + 995, epoch_num=first + 1),
        mllog("eval_accuracy", 0.91, LATER_MS + 1000, epoch_num=number),
    )
    assert length_of(run_of(tmp_path, log_of("dlrm", *middle))) == Length(pytest.approx(done), "epochs")


@pytest.mark.parametrize(("division", "done"), [("closed", 2.0), ("open", 3.0)])
def test_models_evaluated_after_the_clock_count_up_to_the_one_that_ended_it(
    division: str, done: float, tmp_path: Path
) -> None:
    """The target of the open division is unknown: there the last model that was evaluated ended the run."""
    text = resnet_v07(40.0, quality=(), submission_division=division)
    late = [
        mllog("eval_accuracy", value, START_MS + (50 + number) * 60_000, epoch_num=number)
        for number, value in ((1, 0.5), (2, 0.7605), (3, 0.77))
    ]
    assert length_of(run_of(tmp_path, text + "".join(late))) == Length(done, "epochs")


def test_an_evaluation_behind_its_epoch_keeps_its_number(tmp_path: Path) -> None:
    middle = (
        mllog("epoch_start", None, LATER_MS + 1, epoch_num=1),
        mllog("epoch_stop", None, LATER_MS + 2, epoch_num=1),
        mllog("eval_accuracy", 0.91, LATER_MS + 1000, epoch_num=1.5),
    )
    assert length_of(run_of(tmp_path, log_of("dlrm", *middle))) == Length(1.5, "epochs")
