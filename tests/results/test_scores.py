"""Rounds as data: the targets of mlperf-logging's rule files, v6.1, unknown rounds, and one that is invented."""

import csv
import importlib.util
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlperf_logging.benchmark_meta import get_allowed_benchmarks, get_result_file_counts
from typer.testing import CliRunner

from encore import paths
from encore.cli.app import app
from encore.errors import EncoreError
from encore.results import findings as rates
from encore.results.compliance import official
from encore.results.compliance.compliance import ComplianceReport, check
from encore.results.compliance.convergence import Outcome, convergence_of, points_known
from encore.results.logs.run_log import Reason, read_run
from encore.results.published.published import DATA, load_published, select
from encore.results.rules import BLEU_BENCHMARKS, ROUNDS, Target, canonical, rounds_of, rule_for, targets_of
from encore.results.scores.power import energy_of
from encore.results.scores.score import read_scaling, score_folder
from tests.results.result_logs import START_MS, dell_texts, flux1_v61, mllog, power_log, resnet_v07, write_set

LIBRARY = Path(str(importlib.util.find_spec("mlperf_logging").origin)).parent
RULES = LIBRARY / "compliance_checker"
WITH_TARGETS = [round_ for round_ in ROUNDS if round_ >= "v0.7"]


# Yield each benchmark of a round with its check of the quality and the state that the check refers to.
def official_targets(round_: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    ruleset = f"{round_[1:]}.0"
    for name in get_allowed_benchmarks("training", ruleset):
        state: dict[str, Any] = {"global_batch_size": 1}
        for block in yaml.safe_load((RULES / f"training_{ruleset}" / f"closed_{name}.yaml").read_text()):
            if "target_accuracy" in str(block.get("BEGIN")):
                exec(block["BEGIN"]["CODE"], {"s": state})
            test = block.get("KEY", {}).get("ATLEAST_ONE_CHECK")
            if test:
                yield name, test, state


# Value of a target, the end of its range, and their neighbours.
def around(target: Target) -> list[float]:
    values = [target.value, 0.5 * (target.value + target.limit)] if math.isfinite(target.limit) else [target.value]
    values += [math.nextafter(target.value, side) for side in (-math.inf, math.inf)]
    return values + [math.nextafter(target.limit, side) for side in (-math.inf, math.inf)]


@pytest.mark.parametrize("round_", WITH_TARGETS)
def test_targets_and_runs_are_those_of_the_rule_files(round_: str) -> None:
    checked, counts = 0, get_result_file_counts("training")
    for name, test, state in official_targets(round_):
        targets = targets_of(round_, name, 1.0)
        assert rule_for(round_, name).runs == counts[name]
        scale = 0.01 if name in BLEU_BENCHMARKS else 1.0
        reached = {target.name: (target.value + target.limit) / 2 for target in targets if math.isfinite(target.limit)}
        for target in targets:
            # 3D U-Net's rule, and two of v6.1, name no end of the range, which is 1 all the same.
            open_ended = test.count("<") + test.count(">") == 1
            for value in around(target):
                if open_ended and (not math.isfinite(value) or value >= min(target.limit, 1.0)):
                    continue
                found = {**reached, target.name: value}
                one = found["value"] * scale if "value" in found else None
                v = {"value": one if one is not None else found}
                assert all(each.met_by(found) for each in targets) == bool(eval(test, {"v": v, "s": state})), (name, v)
                checked += 1
    assert checked > 4 * len(get_allowed_benchmarks("training", f"{round_[1:]}.0"))


def test_what_ended_with_a_round_is_not_in_the_next() -> None:
    assert {name for name in ("retinanet", "rgat", "llama31_405b", "dlrm_dcnv2") if "v6.1" in rounds_of(name)} == set()
    assert targets_of("v9.9", "bert") == ()
    assert rule_for("v9.9", "bert") is None


def test_berts_target_of_v07_is_lower_for_a_large_batch() -> None:
    found = {batch: rule_for("v0.7", "bert", batch) for batch in (None, 8191, 8192)}
    assert {batch: rule and rule.targets[0].value for batch, rule in found.items()} == {
        **dict.fromkeys((None, 8191), 0.712), 8192: 0.706
    }  # fmt: skip


@pytest.mark.parametrize("ruleset", official.rulesets())
def test_each_ruleset_of_the_library_checks_a_log(ruleset: str, tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    log.write_text(resnet_v07())
    report = check(log, ruleset)
    assert (report.ruleset, report.passed) == (ruleset, ruleset == "0.7.0")


# Copy a tree as links.
def linked(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    return target


# An invented v7.0 with a benchmark of its own: two TOML files here, rule files and points in mlperf-logging.
@pytest.mark.slow
def test_a_new_round_is_data_alone(tmp_path: Path) -> None:
    rounds = linked(paths.ROOT / "encore", tmp_path / "encore") / "results" / "data" / "rounds"
    (rounds / "v7.0.toml").write_text(
        'dialects = ["mllog"]\nwritten = [2026.5, 2027.5]\n\n[targets]\nflux9 = [{ at_most = 0.586, unit = "loss" }]\n'
    )
    benchmarks = (rounds / "benchmarks.toml").read_text()
    (rounds / "benchmarks.toml").unlink()
    entry = '[flux9]\nnames = ["flux-9"]\nruns = 3\npoints_in = "samples"\nsamples_count = true\n'
    (rounds / "benchmarks.toml").write_text(f"{benchmarks}\n{entry}")
    library = linked(LIBRARY, tmp_path / "mlperf_logging")
    for part, name in (("compliance_checker", "closed_flux{}.yaml"), ("rcp_checker", "rcps_flux{}.json")):
        old, new = library / part / "training_6.1.0", library / part / "training_7.0.0"
        new.mkdir()
        for file in (name.format(1), "common.yaml", "closed_common.yaml"):
            if (old / file).exists():
                text = (old / file).read_text().replace("6.1.0", "7.0.0").replace("flux1", "flux9")
                (new / file.replace("flux1", "flux9")).write_text(text)
    parsers = library / "compliance_checker" / "mlp_parser"
    shutil.copy(parsers / "ruleset_610.py", parsers / "ruleset_700.py")
    texts = [flux1_v61(40.0 + number, submission_benchmark="flux9") for number in range(3)]
    write_set(tmp_path / "results" / "flux9", texts)
    for command, expected in (("score", ("v7.0", "flux9", "41.000")), ("check", ("ruleset 7.0.0", "3 of 3 logs pass"))):
        done = subprocess.run(
            [sys.executable, "-c", "from encore.cli.app import main; main()", command, "results/flux9"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert all(part in done.stdout for part in expected), done.stdout + done.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert read_run(tmp_path / "result_0.txt").reason is Reason.UNREADABLE


def test_a_tree_with_a_link_to_itself(tmp_path: Path) -> None:
    write_set(tmp_path / "resnet", [resnet_v07()] * 5)
    (tmp_path / "resnet" / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert len(score_folder(tmp_path)) == 1


def published_rows() -> dict[tuple[str, str, str, str | None], dict[str, str]]:
    with (DATA / "published.csv").open(encoding="utf-8", newline="") as file:
        return {
            (row["round"], row["submitter"].lower(), row["system"], canonical(row["benchmark"])): row
            for row in csv.DictReader(file)
        }


# Sets of which the archive holds one log.
NOT_COMPLETE = {
    ("v0.6", "NVIDIA", "dgx1_ngc19.05_pytorch", "maskrcnn"),
    ("v0.6", "NVIDIA", "dgx1_ngc19.05_tensorflow", "minigo"),
    ("v0.7", "NVIDIA", "dgx1_ngc20.06_pytorch", "bert"),
    ("v0.7", "NVIDIA", "dgx1_ngc20.06_pytorch", "maskrcnn"),
    ("v0.7", "NVIDIA", "dgxa100_ngc20.06_pytorch", "bert"),
}


@pytest.mark.slow
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


# No link and no path leads out of it, and nothing is left behind.
@pytest.mark.parametrize("ending", ["tar.gz", "tar.xz", "zip"])
def test_an_archive_is_scored_as_the_folder_in_it(tmp_path: Path, ending: str) -> None:
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


def run(*arguments: object) -> str:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "200"}).stdout


def test_an_official_score_is_the_raw_one_times_the_factor() -> None:
    for each in load_published():
        wanted = each.score_minutes and each.score_minutes * (each.scaling_factor or 1)
        assert each.official_minutes == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("batch", [3264, 3200, 1632, 4000, 30_000])
def test_the_factor_is_that_of_the_official_checker(batch: int, tmp_path: Path) -> None:
    from mlperf_logging.rcp_checker import rcp_checker

    folder = write_set(tmp_path, dell_texts((35, 35.5, 34.5, 36, 35), batch))
    mine = convergence_of(score_folder(folder)[0])
    passed, _, factor = rcp_checker.check_directory(
        str(folder), "training", "4.0.0", False, False, rcp_pass="pruned_rcps", set_scaling=True
    )
    assert (mine.outcome is Outcome.PASSED) == passed
    assert mine.factor == pytest.approx(factor, rel=1e-12)
    assert read_scaling(folder).factor == (pytest.approx(factor, rel=1e-12) if passed and factor > 1 else None)


# DLRM has points, but no number of runs in rcp_checker's own table.
def test_benchmarks_that_the_installed_checker_no_longer_counts(tmp_path: Path) -> None:
    assert "dlrm" in points_known("1.0.0")
    logs = [each.replace("resnet", "dlrm").replace("0.7595", "0.8026") for each in dell_texts((0.95,) * 5, 65536)]
    (score,) = score_folder(write_set(tmp_path, logs), "v1.0")
    assert convergence_of(score).point.batch == 65536


def test_energy_is_that_of_the_official_summarizer(tmp_path: Path) -> None:
    from mlperf_logging.result_summarizer.result_summarizer import _compute_total_power

    folder = write_set(tmp_path, dell_texts())
    for number in range(5):
        part = folder / "power" / f"result_{number}"
        part.mkdir(parents=True)
        for node in range(2):
            (part / f"node_{node}.txt").write_text(power_log([1000.0, 2000.0, 3000.0 + node], stop=node == 0))
        (part / "sw_0.txt").write_text(mllog("conversion_eff", 0.5) + mllog("interconnect_power_est", 400))
    (score,) = score_folder(folder)
    theirs = [
        _compute_total_power(str(folder), str(each.path), (each.minutes or 0) * 60_000, "4.0.0")
        for each in score.counted
    ]
    found = energy_of(score)
    assert found.kilojoules == pytest.approx(sum(theirs) / len(theirs) / 1000)


def test_scores_as_csv(tmp_path: Path, recorded: Callable[[str, str], None]) -> None:
    write_set(tmp_path / "a" / "resnet", dell_texts())
    (tmp_path / "a" / "resnet" / "scaling.json").write_text('{"scaling_factor": 1.0042}')
    write_set(tmp_path / "b" / "resnet", dell_texts()[:1])
    recorded("scores.csv", run("score", tmp_path, "--csv"))


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_table_shows_every_score_at_any_width(width: int) -> None:
    options = ["published", "--table", "--round", "v0.7", "--submitter", "NVIDIA"]
    shown = CliRunner().invoke(app, options, env={"COLUMNS": str(width)}).stdout
    for each in select(load_published(), round_="v0.7", submitter="NVIDIA"):
        assert f"{each.official_minutes:.3f}" in shown, each.name
    assert all(len(line) <= width for line in shown.splitlines() if "official scores" not in line)
    assert ("continued" in shown) == (width == 80)


def check_text(text: str, tmp_path: Path, ruleset: str | None = None) -> ComplianceReport:
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    return check(path, ruleset)


# The rates are measured by tools/check_rates.py on all public sets that mlperf-logging's checker passes.
def test_no_rule_of_our_own_is_an_error_where_public_sets_have_it(tmp_path: Path) -> None:
    found = rates.measured("check")
    assert found["sets"] > 2000
    assert {"data_before_clock", "cache_cleared_late", "no_seed"} <= set(found["rules"])
    early = mllog("epoch_start", None, START_MS - 50, epoch_num=1)
    (finding,) = check_text(resnet_v07().replace(mllog("run_start"), early + mllog("run_start")), tmp_path).findings
    rate = found["rules"]["data_before_clock"]["sets"] / found["sets"]
    assert (finding.rate, finding.severity) == (rate, "error" if rate <= rates.MOST_OF_AN_ERROR else "warning")


# The checker executes the rule file that a value in the log leads to.
@pytest.mark.parametrize("key", ["submission_benchmark", "submission_division", "opt_name"])
def test_a_log_cannot_name_rules_of_its_own(key: str, tmp_path: Path) -> None:
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


def test_the_checker_is_not_imported_before_it_is_needed() -> None:
    import subprocess

    heavy = ("mlperf_logging", "pandas", "scipy", "numpy")
    code = f"import sys, encore.cli.run, encore.cli.results; print([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
