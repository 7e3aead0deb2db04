"""Phases by the timestamps, and differences in the order of their weight."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore import catalogue
from encore.cli.app import app
from encore.results.compare.compare import compare, compare_with
from encore.results.compare.explain import Difference, explain
from encore.results.compare.nearest import AS_GIVEN
from encore.results.compare.sides import Side, load_side, load_sides
from encore.results.logs.timing import phases_of
from tests.results.result_logs import timed_log, write_set


def one(folder: Path, text: str) -> Side:
    return load_side(write_set(folder, [text]))


def test_the_shares_of_the_phases_add_up_to_the_ratio_that_compare_prints(tmp_path: Path) -> None:
    """Runs that vary, of which one missed its target: medians of the phases would add up to another one."""
    logs = [timed_log(60.0 + 2 * n**2, 3.0 + n, 4 + n % 2, seed=n) for n in range(4)]
    missed = timed_log(60.0, 3.0).replace('"success"', '"aborted"').replace("0.761", "0.7")
    ours = load_side(write_set(tmp_path / "a", [*logs, missed]))
    theirs = load_side(write_set(tmp_path / "b", [timed_log(50.0 + n, 9.0, seed=n) for n in (0, 1, 2, 4, 9)]))
    compared, clock = compare_with(ours, theirs, AS_GIVEN), ("start of training", "training", "evaluation")
    assert compared.score.ratio == pytest.approx((335 + 297 + 425) / (245 + 249 + 257))
    shares = [
        float(each.sentence.split(", ")[-1].split("%")[0]) / 100
        for each in explain(ours, theirs).differences
        if each.name in clock
    ]
    assert sum(shares) == pytest.approx(compared.score.ratio - 1, abs=0.0015)
    assert compared.per_length.ratio * compared.lengths.ratio == pytest.approx(compared.score.ratio)
    scaled = compare_with(replace(ours, scaling_factor=1.02), replace(theirs, scaling_factor=1.0), AS_GIVEN)
    assert math.prod(each.ratio or 0.0 for each in scaled.factors[1:]) == pytest.approx(scaled.factors[0].ratio)
    assert len(scaled.factors) == 4
    (factor,) = (each.sentence for each in explain(scaled.ours, theirs).differences if each.area == "score")
    assert factor.startswith("factor of the reference convergence: 1.02, theirs 1: the official score is the time")


def test_the_samples_that_bert_took_are_no_setting(tmp_path: Path) -> None:
    """Its train_samples are those until the target; of other benchmarks they are the data set's."""
    sides = [
        one(tmp_path / name, timed_log(60, 3, train_samples=n)) for name, n in (("a", 1_281_167), ("b", 1_300_000))
    ]
    assert [each.name for each in explain(*sides).differences] == ["train_samples"]
    bert = [replace(side, benchmark="bert") for side in sides]
    assert explain(*bert).differences == ()


def passport(folder: Path, **changed: object) -> Path:
    content = {
        "round": "v0.7",
        "nodes": 1,
        "ranks_per_node": 2,
        "runtime": "host",
        "environment": {"NCCL_DEBUG": "INFO"},
        "code": {"commit": "a" * 40},
        "data": {"name": "digits", "id": "1"},
        "configuration": {"precision": {"value": "fp32", "origin": "default"}},
        **changed,
    }
    (folder / "run.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("choices", [3, [], {"0": 1}, {"0": {"kernels": None}}, {"0": {"kernels": [1]}}])
def test_choices_of_a_foreign_run_json_are_no_traceback(tmp_path: Path, choices: object) -> None:
    write_set(tmp_path, [timed_log(60, 3)])
    passport(tmp_path, choices=choices)
    assert set(load_side(tmp_path).choices) <= {"kernels"}


def test_the_environment_of_a_submission_is_that_of_its_system(tmp_path: Path) -> None:
    """What rank 0 saw counts before what was given."""
    write_set(tmp_path, [timed_log(60, 3)])
    system = catalogue.find_system(catalogue.choose("resnet"), "dgx1", "v0.7")
    given = {name: value for variables in system.environment.values() for name, value in variables.items()}
    passport(tmp_path, name="resnet", environment=given, rank_environment={"HOROVOD_CYCLE_TIME": "5"})
    theirs = compare(load_side(tmp_path), "v0.7/NVIDIA/dgx1_ngc20.06_mxnet").theirs
    found = [each for each in explain(load_side(tmp_path), theirs).differences if each.area == "environment"]
    assert [(each.name, each.ours, each.theirs) for each in found] == [("environment.HOROVOD_CYCLE_TIME", "5", "0.1")]


def test_the_command_shows_the_differences(tmp_path: Path) -> None:
    write_set(tmp_path, [timed_log(60, 3)])
    shown = CliRunner().invoke(app, ["compare", str(tmp_path), "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"])
    assert "global_batch_size: 1664, theirs 3264" in shown.output


def test_against_a_submission_by_what_is_kept_of_its_logs(public_logs: Path) -> None:
    """DellEMC's DSS8440 against the DGX-1: another card, and a faster evaluation."""
    ours = load_side(public_logs / "v0.7" / "DellEMC" / "DSS8440" / "resnet")
    theirs = compare(ours, "v0.7/NVIDIA/dgx1_ngc20.06_mxnet").theirs
    by_name: dict[str, Difference] = {each.name: each for each in explain(ours, theirs).differences}
    assert by_name["accelerator"].area == "topology"
    assert by_name["evaluation"].ratio == pytest.approx(32.7 / 41.5, rel=0.01)


def test_phases_of_every_public_set_are_sensible(public_logs: Path) -> None:
    for side in load_sides(public_logs):
        for run in side.logs:
            phases = phases_of(run)
            if run.elapsed_minutes is None or phases.train_s is None:
                continue
            total = (phases.start_s or 0) + phases.train_s + (phases.evaluate_s or 0)
            assert total == pytest.approx(run.elapsed_minutes * 60, abs=0.01)
            assert phases.train_s >= 0, run.path
