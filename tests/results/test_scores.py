"""Scores and compliance: targets of mlperf-logging's rule files, archives, scaling factors, and the checker."""

import importlib.util
import json
import logging
import math
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlperf_logging.benchmark_meta import get_allowed_benchmarks, get_result_file_counts
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.rcp_checker import rcp_checker
from typer.testing import CliRunner

from encore import files
from encore.cli.app import app
from encore.errors import EncoreError
from encore.results import findings as rates
from encore.results.audit.judge import audit_score
from encore.results.compliance import official
from encore.results.compliance.compliance import check
from encore.results.compliance.convergence import Outcome, convergence_of
from encore.results.compliance.own_rules import small_data_findings
from encore.results.logs.run_log import Reason, RunLog, read_run, submitter_of
from encore.results.published.published import load_published, select
from encore.results.rules import BLEU_BENCHMARKS, ROUNDS, Target, rounds_of, rule_for, targets_of
from encore.results.scores.score import find_sets, read_scaling, score_folder
from tests import bombs
from tests.results.result_logs import START_MS, dell_texts, mllog, resnet_v07, write_set

RULES = Path(str(importlib.util.find_spec("mlperf_logging").origin)).parent / "compliance_checker"


def official_targets(round_: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    # Each benchmark with the checker's test of the quality and the state that the test refers to
    for name in get_allowed_benchmarks("training", f"{round_[1:]}.0"):
        state: dict[str, Any] = {"global_batch_size": 1}
        for block in yaml.safe_load((RULES / f"training_{round_[1:]}.0" / f"closed_{name}.yaml").read_text()):
            if "target_accuracy" in str(block.get("BEGIN")):
                exec(block["BEGIN"]["CODE"], {"s": state})
            if test := block.get("KEY", {}).get("ATLEAST_ONE_CHECK"):
                yield name, test, state


def limits(target: Target, is_open: bool) -> list[float]:
    # The ends of a target's range and their neighbours. Rules of 3D U-Net and two of v6.1 have no upper end; it is 1
    values = [math.nextafter(end, side) for end in (target.value, target.limit) for side in (-math.inf, math.inf)]
    values += [target.value, (target.value + target.limit) / 2]
    return [value for value in values if math.isfinite(value) and not (is_open and value >= min(target.limit, 1.0))]


@pytest.mark.parametrize("round_", [round_ for round_ in ROUNDS if round_ >= "v0.7"])
def test_targets_and_numbers_of_runs_equal_those_of_the_rule_files(round_: str) -> None:
    checked, counts = 0, get_result_file_counts("training")
    for name, test, state in official_targets(round_):
        targets = targets_of(round_, name, 1.0)
        assert rule_for(round_, name).runs == counts[name]
        scale = 0.01 if name in BLEU_BENCHMARKS else 1.0
        middle = {target.name: (target.value + target.limit) / 2 for target in targets if target.limit < math.inf}
        for target in targets:
            for value in limits(target, is_open=test.count("<") + test.count(">") == 1):
                quality = {**middle, target.name: value}
                logged = quality["value"] * scale if "value" in quality else quality
                is_met = all(target.met_by(quality) for target in targets)
                assert is_met == bool(eval(test, {"v": {"value": logged}, "s": state})), (name, logged)
                checked += 1
    assert checked > 4 * len(get_allowed_benchmarks("training", f"{round_[1:]}.0"))


def test_benchmarks_and_targets_of_rounds() -> None:
    assert not any("v6.1" in rounds_of(name) for name in ("retinanet", "rgat", "llama31_405b", "dlrm_dcnv2"))
    assert (targets_of("v9.9", "bert"), rule_for("v9.9", "bert")) == ((), None)
    bert = {batch: rule_for("v0.7", "bert", batch).targets[0].value for batch in (None, 8191, 8192)}
    assert bert == {None: 0.712, 8191: 0.712, 8192: 0.706}


# --- scores -----------------------------------------------------------------------------------------------


def score_json(path: Path) -> dict[str, Any]:
    return json.loads(CliRunner().invoke(app, ["score", str(path), "--json"]).stdout)


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.xz", "zip"])
def test_archive_is_scored_as_the_folder_in_it(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A path and a link that lead out of it are skipped, and no temporary file remains
    texts = [resnet_v07(40.0 + n, seed=n, start_ms=START_MS + 10**7 * n) for n in range(5)]
    folder = write_set(tmp_path / "round" / "Lab" / "results" / "box" / "resnet", texts)
    packed, temporary = tmp_path / f"round.{suffix}", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    if suffix == "zip":
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("../escaped.txt", resnet_v07())
            for file in folder.iterdir():
                archive.write(file, file.relative_to(tmp_path))
    else:
        with tarfile.open(packed, f"w:{suffix[4:]}") as archive:
            archive.add(folder / "result_0.txt", "../escaped.txt")
            link = tarfile.TarInfo("round/Lab/results/box/resnet/result_5.txt")
            link.type, link.linkname = tarfile.SYMTYPE, str(folder / "result_0.txt")
            archive.addfile(link)
            archive.add(folder, folder.relative_to(tmp_path))
    score = score_json(packed)
    assert (score["score_minutes"], len(score["runs"]), score["missing"]) == (42.0, 5, "")
    assert score == {**score_json(folder), "folder": str(packed / folder.relative_to(tmp_path))}
    assert [*temporary.iterdir()] == []
    packed.write_bytes(packed.read_bytes()[:300])
    error = CliRunner().invoke(app, ["score", str(packed)]).exception
    assert isinstance(error, EncoreError) and "cannot be read" in error.found


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("suffix", ["tar.gz", "zip"])
@pytest.mark.parametrize("command", ["score", "verify", "reproduce"])
def test_archive_bomb_is_rejected(command: str, suffix: str, kind: bytes, tmp_path: Path) -> None:
    if suffix == "zip" and (kind != tarfile.REGTYPE or command == "verify"):
        pytest.skip("a ZIP file has no headers of this kind, and bundles are tar files")
    path = bombs.write(tmp_path / f"bomb.{suffix}", "round/results/box/resnet/result_0.txt", b"\n", kind)
    with bombs.is_fast():
        error = CliRunner().invoke(app, [command, str(path)]).exception
    assert isinstance(error, EncoreError) and error.exit_code == 2
    assert "its content has more than" in error.found and str(path) in error.found


def test_archive_with_too_many_members_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_MEMBERS", 3)
    for suffix in ("tar.gz", "zip"):
        folder = write_set(tmp_path / suffix / "resnet", [resnet_v07()] * 4)
        packed = shutil.make_archive(str(tmp_path / "many"), {"tar.gz": "gztar"}.get(suffix, suffix), folder)
        with pytest.raises(EncoreError, match="more than 3 members"), files.unpacked(Path(packed), re.compile("")):
            pass


def test_missing_file_and_tree_with_a_link_to_itself(tmp_path: Path) -> None:
    write_set(tmp_path / "resnet", [resnet_v07()] * 5)
    (tmp_path / "resnet" / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert len(score_folder(tmp_path)) == 1
    assert read_run(tmp_path / "result_0.txt").reason is Reason.UNREADABLE


def test_official_scores_are_raw_scores_times_the_factor() -> None:
    for cell in load_published():
        minutes = cell.score_minutes and cell.score_minutes * (cell.scaling_factor or 1)
        assert cell.official_minutes == pytest.approx(minutes, abs=2e-4)


@pytest.mark.parametrize("batch", [3264, 3200, 1632, 4000, 30_000])
def test_scaling_factor_equals_that_of_the_official_checker(batch: int, tmp_path: Path) -> None:
    folder = write_set(tmp_path, dell_texts((35, 35.5, 34.5, 36, 35), batch))
    convergence = convergence_of(score_folder(folder)[0])
    passed, _, factor = rcp_checker.check_directory(
        str(folder), "training", "4.0.0", False, False, rcp_pass="pruned_rcps", set_scaling=True
    )
    assert (convergence.outcome is Outcome.PASSED, convergence.factor) == (passed, pytest.approx(factor, rel=1e-12))
    assert read_scaling(folder).factor == (pytest.approx(factor, rel=1e-12) if passed and factor > 1 else None)


def test_reference_points_of_a_benchmark_without_a_number_of_runs(tmp_path: Path) -> None:
    # The installed checker has points of DLRM and no number of runs
    logs = [text.replace("resnet", "dlrm").replace("0.7595", "0.8026") for text in dell_texts((0.95,) * 5, 65536)]
    (score,) = score_folder(write_set(tmp_path, logs), "v1.0")
    assert convergence_of(score).point.batch == 65536


def test_scores_as_csv(tmp_path: Path, recorded: Callable[[str, str], None]) -> None:
    write_set(tmp_path / "a" / "resnet", dell_texts())
    (tmp_path / "a" / "resnet" / "scaling.json").write_text('{"scaling_factor": 1.0042}')
    write_set(tmp_path / "b" / "resnet", dell_texts()[:1])
    recorded("scores.csv", CliRunner().invoke(app, ["score", str(tmp_path), "--csv"], env={"COLUMNS": "200"}).stdout)


@pytest.mark.parametrize("width", [80, 120])
def test_published_table_fits_the_terminal(width: int) -> None:
    options = ["published", "--table", "--round", "v0.7", "--submitter", "NVIDIA"]
    table = CliRunner().invoke(app, options, env={"COLUMNS": str(width)}).stdout
    cells = select(load_published(), round_="v0.7", submitter="NVIDIA")
    assert all(f"{cell.official_minutes:.3f}" in table for cell in cells)
    assert all(len(line) <= width for line in table.splitlines() if "official scores" not in line)
    assert ("continued" in table) == (width == 80)


# --- the checker ------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_set(tmp_path, [resnet_v07()]) / "result_0.txt"


@pytest.mark.parametrize("ruleset", official.rulesets())
def test_every_ruleset_of_the_library_checks_a_log(ruleset: str, log: Path) -> None:
    report = check(log, ruleset)
    assert (report.ruleset, report.passed) == (ruleset, ruleset == "0.7.0")


def test_severity_follows_the_measured_rate(log: Path) -> None:
    # tools/check_rates.py measures the rates on all public sets that mlperf-logging's checker passes
    measured = rates.measured("check")
    assert measured["sets"] > 2000 and {"cache_cleared_late", "no_seed"} <= set(measured["rules"])
    early = mllog("epoch_start", None, START_MS - 50, epoch_num=1)
    log.write_text(resnet_v07().replace(mllog("run_start"), early + mllog("run_start")))
    (finding,) = check(log).findings
    rate = measured["rules"]["data_before_clock"]["sets"] / measured["sets"]
    assert (finding.rate, finding.severity) == (rate, "error" if rate <= rates.MOST_OF_AN_ERROR else "warning")


# The checker executes code in the rule file that a value in the log leads to.
@pytest.mark.parametrize("key", ["submission_benchmark", "submission_division", "opt_name"])
def test_log_cannot_name_its_own_rule_file(key: str, log: Path, tmp_path: Path) -> None:
    for name in ("evil.yaml", "evil_common.yaml"):
        (tmp_path / name).write_text(f"- BEGIN:\n    CODE: \" open({str(tmp_path / 'proof')!r}, 'w').close() \"\n")
    log.write_text(resnet_v07(**{key: f"{'../' * 30}{str(tmp_path).lstrip('/')}/evil"}))
    assert (check(log, "0.7.0").passed, (tmp_path / "proof").exists()) == (False, False)


def test_state_of_the_checker_is_restored(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp_compliance.enqueued_configs.append("training_0.7.0/closed_bert.yaml")
    handlers, function = list(logging.getLogger().handlers), mlp_compliance.enqueue_config
    broken = write_set(tmp_path / "broken", [resnet_v07().replace("0.7605", '"high"')]) / "result_0.txt"
    assert [check(path).passed for path in (broken, log)] == [False, True]
    assert (mlp_compliance.enqueued_configs, mlp_compliance.enqueue_config) == ([], function)
    assert logging.getLogger().handlers == handlers
    # A rule file is parsed once, and a rule compiled once
    before = dict(vars(mlp_compliance))
    for name in ("yaml.load", "builtins.compile"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("not cached"))
    assert check(log).passed
    assert dict(vars(mlp_compliance)) == before


def test_alternative_events_have_one_order() -> None:
    collector = official._collector_class()("training", "6.0.0", False, False)
    for names in ("'block_stop' or 'epoch_stop'", "'epoch_stop' or 'block_stop'"):
        collector.put_message(f"Required AT_LEAST_ONE occurrence of {names}")
    ((_, message, _),) = collector.collected()
    assert message == "Required AT_LEAST_ONE occurrence of 'block_stop' or 'epoch_stop'"


def test_command_line_does_not_import_the_checker() -> None:
    heavy = ("mlperf_logging", "pandas", "scipy", "numpy")
    code = f"import sys, encore.cli.run, encore.cli.results; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ms: ms // 1000, "not in the years 2017 to 2100"),
        (lambda ms: 0, "not in the years 2017 to 2100"),
        (lambda ms: START_MS, "run_stop is -0.000 s before run_start"),
        (lambda ms: 2 * START_MS - ms, "before run_start"),
    ],
    ids=["seconds", "zero", "constant", "backwards"],
)
def test_impossible_clock_is_an_error_of_score_check_and_audit(
    change: Callable[[int], int], reason: str, tmp_path: Path
) -> None:
    text = re.sub(r'"time_ms": (\d+)', lambda match: f'"time_ms": {change(int(match[1]))}', resnet_v07())
    (score,) = score_folder(write_set(tmp_path, [text]))
    (run,) = score.runs
    assert run.minutes is None and reason in run.explanation
    errors = [finding for finding in check(run.path, "0.7.0").findings if finding.severity == "error"]
    assert run.explanation in [finding.found for finding in errors if finding.code == "impossible_clock"]
    assert "implausible_time" in [finding.rule for finding in audit_score(score) if finding.severity == "error"]


@pytest.mark.parametrize("value", ["0.7605", "high", None, math.nan, True], ids=str)
def test_nonnumeric_quality_is_one_error_of_score_check_and_audit(value: Any, tmp_path: Path) -> None:
    text = resnet_v07(quality=(0.7605, value))
    line = max(number for number, each in enumerate(text.splitlines(), 1) if "eval_accuracy" in each)
    (score,) = score_folder(write_set(tmp_path, [text]))
    (run,) = score.runs
    assert run.minutes is None and f"line {line} is {json.dumps(value)}: a number is expected" in run.explanation
    errors = [finding for finding in check(run.path, "0.7.0").findings if finding.severity == "error"]
    assert [(finding.code, finding.line) for finding in errors] == [("nonnumeric_quality", line)]
    assert [finding.rule for finding in audit_score(score) if finding.severity == "error"] == ["quality_units"]


@pytest.mark.parametrize(
    ("benchmark", "train_samples", "eval_samples", "is_small"),
    [
        ("maskrcnn", 118_287, 5_000, False), ("maskrcnn", 40_000, 1, False), ("maskrcnn", 64, 16, True),
        ("minigo", 8_192, 256, False), ("minigo", None, None, False), ("minigo", 256, 64, True),
    ],
)  # fmt: skip
def test_small_data_of_benchmarks_whose_logs_count_otherwise(
    benchmark: str, train_samples: int | None, eval_samples: int | None, is_small: bool
) -> None:
    counts = {"train_samples": train_samples, "eval_samples": eval_samples}
    assert bool(small_data_findings(RunLog(path=Path("x"), benchmark=benchmark, round="v0.7", **counts))) == is_small


@pytest.mark.parametrize(
    ("folders", "read"),
    [
        (("results/s/resnet", "benchmarks/resnet/logs", "systems"), ["results/s/resnet"]),
        (("Maker/results/s/resnet", "Maker/code/resnet"), ["Maker/results/s/resnet"]),
        (("results/one", "other"), ["other", "results/one"]),
        (("code", "other"), ["code", "other"]),
    ],
)
def test_of_a_submitter_only_results_are_read(folders: tuple[str, ...], read: list[str], tmp_path: Path) -> None:
    for folder in folders:
        write_set(tmp_path / folder, [resnet_v07()])
    assert [str(folder.relative_to(tmp_path)) for folder, _ in find_sets(tmp_path)] == read


@pytest.mark.parametrize(
    ("names", "submitter"),
    [
        (["SUBMISSION_ORG_PLACEHOLDER", "Krai", "Krai", "Dell"], "Krai"),
        (["SUBMISSION_ORG_PLACEHOLDER", None], None),
        (["Dell", "Krai", "Krai"], "Krai"),
    ],
)
def test_submitter_is_the_one_of_most_logs(names: list[str | None], submitter: str | None) -> None:
    assert submitter_of([RunLog(path=Path("x"), org=name) for name in names]) == submitter
