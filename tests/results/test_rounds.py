"""Rounds as data: the targets of mlperf-logging's rule files, v6.1, unknown rounds, and one that is invented."""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlperf_logging.benchmark_meta import get_allowed_benchmarks, get_result_file_counts
from typer.testing import CliRunner

from encore import paths
from encore.cli.app import app
from encore.errors import EncoreError
from encore.results.compliance import official
from encore.results.compliance.compliance import check
from encore.results.compliance.convergence import Outcome, convergence_of
from encore.results.logs.run_log import read_run
from encore.results.rules import BLEU_BENCHMARKS, ROUNDS, Target, rounds_of, rule_for, targets_of
from encore.results.scores.score import score_logs
from tests.results.result_logs import flux1_v61, resnet_v07, write_set

LIBRARY = Path(str(importlib.util.find_spec("mlperf_logging").origin)).parent
RULES = LIBRARY / "compliance_checker"
WITH_TARGETS = [round_ for round_ in ROUNDS if round_ >= "v0.7"]


def official_targets(round_: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each benchmark of a round with its check of the quality and the state that the check refers to."""
    ruleset = f"{round_[1:]}.0"
    for name in get_allowed_benchmarks("training", ruleset):
        state: dict[str, Any] = {"global_batch_size": 1}
        for block in yaml.safe_load((RULES / f"training_{ruleset}" / f"closed_{name}.yaml").read_text()):
            if "target_accuracy" in str(block.get("BEGIN")):
                exec(block["BEGIN"]["CODE"], {"s": state})
            test = block.get("KEY", {}).get("ATLEAST_ONE_CHECK")
            if test:
                yield name, test, state


def around(target: Target) -> list[float]:
    """Return the value of a target, the end of its range, and their neighbours."""
    values = [target.value, 0.5 * (target.value + target.limit)] if math.isfinite(target.limit) else [target.value]
    values += [math.nextafter(target.value, side) for side in (-math.inf, math.inf)]
    return values + [math.nextafter(target.limit, side) for side in (-math.inf, math.inf)]


@pytest.mark.parametrize("round_", WITH_TARGETS)
def test_targets_are_those_of_the_rule_files(round_: str) -> None:
    checked = 0
    for name, test, state in official_targets(round_):
        targets = targets_of(round_, name, 1.0)
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


@pytest.mark.parametrize("round_", WITH_TARGETS)
def test_every_benchmark_of_a_round_has_the_official_number_of_runs(round_: str) -> None:
    counts = get_result_file_counts("training")
    for name in get_allowed_benchmarks("training", f"{round_[1:]}.0"):
        rule = rule_for(round_, name)
        assert rule is not None
        assert rule.runs == counts[name]


def test_what_ended_with_a_round_is_not_in_the_next() -> None:
    assert {name for name in ("retinanet", "rgat", "llama31_405b", "dlrm_dcnv2") if "v6.1" in rounds_of(name)} == set()
    assert targets_of("v9.9", "bert") == ()
    assert rule_for("v9.9", "bert") is None


@pytest.mark.parametrize("ruleset", official.rulesets())
def test_each_ruleset_of_the_library_checks_a_log(ruleset: str, tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    log.write_text(resnet_v07())
    report = check(log, ruleset)
    assert (report.ruleset, report.passed) == (ruleset, ruleset == "0.7.0")


@pytest.mark.parametrize("ruleset", ["9.9.0", "6.2", "banana"])
def test_a_ruleset_that_there_is_not_is_refused_with_those_that_there_are(ruleset: str, tmp_path: Path) -> None:
    with pytest.raises(EncoreError, match="there is no ruleset") as refused:
        check(tmp_path / "result_0.txt", ruleset)
    assert refused.value.expected == ", ".join(f"{round_[1:]}.0" for round_ in ROUNDS)


def test_a_set_of_v61_is_found_checked_scored_and_compared_with_the_reference(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "flux1", [flux1_v61(40.0 + number, seed=number) for number in range(10)])
    report = check(folder / "result_0.txt")
    assert (report.ruleset, report.passed, [each.found for each in report.findings]) == ("6.1.0", True, [])
    (score,) = score_logs(folder, [read_run(file) for file in sorted(folder.iterdir())])
    assert (score.round, score.benchmark, score.required) == ("v6.1", "flux1", 10)
    assert score.score_minutes == pytest.approx(44.5)
    found = convergence_of(score)
    assert found is not None
    assert (found.outcome, found.unit, found.mean) == (Outcome.PASSED, "samples", 28 * 262_144)


@pytest.mark.parametrize("key", ["lowest_numerical_precision_in_attn", "expert_parallelism", "config_filename"])
def test_v61_asks_for_what_is_new_in_it(key: str, tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    log.write_text(re.sub(rf"^.*{key}.*\n", "", flux1_v61(), flags=re.MULTILINE))
    assert [each.found for each in check(log).findings] == [f"no {key} event"]


def test_the_folder_of_a_round_to_come_is_newer_than_what_is_known(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "training_results_v7.0" / "flux1", [flux1_v61()])
    run = read_run(folder / "result_0.txt")
    assert (run.round, run.round_is_guess) == (None, False)
    assert run.round_found == f"its folder is of v7.0, which is newer than the rounds that are known, to {ROUNDS[-1]}"


def test_the_name_of_a_benchmark_that_no_round_had_is_printed(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "results", [flux1_v61(submission_benchmark="flux9") for _ in range(3)])
    result = CliRunner().invoke(app, ["score", str(folder)])
    assert "no round that is known has a benchmark 'flux9'" in result.output


def linked(source: Path, target: Path) -> Path:
    """Copy a tree as links."""
    shutil.copytree(source, target, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def test_a_new_round_is_data_alone(tmp_path: Path) -> None:
    """An invented v7.0 with a benchmark of its own: two TOML files here, rule files and points in mlperf-logging."""
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
