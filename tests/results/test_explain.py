"""Phases by the timestamps, and differences in the order of their weight."""

from __future__ import annotations

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
from encore.results.logs.run_log import read_run
from encore.results.logs.timing import length_of, phases_of
from encore.results.report.report import write_report
from tests.results.result_logs import START_MS, mllog, resnet_v07, v05, write_set


def timed_log(train_s: float, evaluate_s: float, epochs: int = 4, start_s: float = 5.0, **values: object) -> str:
    """Return a log with so many seconds of start, and per epoch of training and evaluation."""
    head = resnet_v07(1.0, quality=()).splitlines(keepends=True)
    changed = [
        mllog(key, values[key], START_MS) if (key := json.loads(line[9:])["key"]) in values else line
        for line in head[:-1]
    ]
    now = START_MS + start_s * 1000
    for epoch in range(1, epochs + 1):
        changed.append(mllog("epoch_start", None, now, epoch_num=epoch))
        now += train_s * 1000
        changed.append(mllog("epoch_stop", None, now, epoch_num=epoch))
        changed.append(mllog("eval_start", None, now, epoch_num=epoch))
        now += evaluate_s * 1000
        changed.append(mllog("eval_stop", None, now, epoch_num=epoch))
        changed.append(mllog("eval_accuracy", 0.5 if epoch < epochs else 0.761, now, epoch_num=epoch))
    return "".join(changed) + mllog("run_stop", None, now, status="success")


def one(folder: Path, text: str) -> Side:
    return load_side(write_set(folder, [text]))


def test_phases_add_up_to_the_run(tmp_path: Path) -> None:
    run = read_run(write_set(tmp_path, [timed_log(60.0, 3.0)]) / "result_0.txt")
    phases = phases_of(run)
    assert phases.start_s == pytest.approx(5.0)
    assert phases.train_s == pytest.approx(240.0)
    assert phases.evaluate_s == pytest.approx(12.0)
    assert phases.epoch_s == pytest.approx(60.0)
    assert phases.evaluation_s == pytest.approx(3.0)
    assert phases.init_s == pytest.approx(0.0)
    assert run.elapsed_minutes == pytest.approx((5 + 240 + 12) / 60)
    length = length_of(run)
    assert length is not None
    assert (length.value, length.unit) == (4, "epochs")


def test_epochs_numbered_from_zero_or_from_minus_one(tmp_path: Path) -> None:
    """Three epochs begun, numbered 0 to 2; v0.5 logs number the evaluation after them 3, 2 or 1."""
    begin = 1_541_720_386.0
    for shift, name in ((1, "one"), (0, "zero"), (-1, "minus")):
        text = v05("run_start", seconds=begin)
        for epoch in range(3):
            text += v05("train_epoch", str(epoch), begin + 10 + 60 * epoch)
            value = json.dumps({"epoch": epoch + shift, "value": 0.7 + 0.025 * epoch})
            text += v05("eval_accuracy", value, begin + 69 + 60 * epoch)
        text += v05("run_stop", seconds=begin + 190)
        length = length_of(read_run(write_set(tmp_path / name, [text]) / "result_0.txt"))
        assert length is not None
        assert length.value == 3, name


def test_a_slow_evaluation_is_named_first_and_in_words(tmp_path: Path) -> None:
    ours = one(tmp_path / "a", timed_log(60.0, 31.0))
    theirs = one(tmp_path / "b", timed_log(60.0, 10.0))
    found = explain(ours, theirs)
    first = found.differences[0]
    assert (first.area, first.name) == ("phases", "evaluation")
    assert "your evaluation takes 3.1 times theirs" in first.sentence
    assert first.ratio == pytest.approx(3.1)
    assert [each.name for each in found.differences if each.area == "phases"] == [
        "evaluation",
        "single evaluation",
    ]


def test_the_shares_of_the_phases_add_up_to_the_ratio_that_compare_prints(tmp_path: Path) -> None:
    """Runs that vary, of which one missed its target: medians of the phases would add up to another one."""
    logs = [timed_log(60.0 + 2 * n**2, 3.0 + n, 4 + n % 2, seed=n) for n in range(4)]
    missed = timed_log(60.0, 3.0).replace('"success"', '"aborted"').replace("0.761", "0.7")
    ours = load_side(write_set(tmp_path / "a", [*logs, missed]))
    theirs = load_side(write_set(tmp_path / "b", [timed_log(50.0 + n, 9.0, seed=n) for n in (0, 1, 2, 4, 9)]))
    compared, clock = compare_with(ours, theirs, AS_GIVEN), ("start of training", "training", "evaluation")
    assert compared.score is not None
    assert compared.score.ratio == pytest.approx((335 + 297 + 425) / (245 + 249 + 257))
    shares = [
        float(each.sentence.split(", ")[-1].split("%")[0]) / 100
        for each in explain(ours, theirs).differences
        if each.name in clock
    ]
    assert sum(shares) == pytest.approx(compared.score.ratio - 1, abs=0.0015)
    assert compared.per_length is not None
    assert compared.lengths is not None
    assert compared.per_length.ratio * compared.lengths.ratio == pytest.approx(compared.score.ratio)
    scaled = compare_with(replace(ours, scaling_factor=1.02), replace(theirs, scaling_factor=1.0), AS_GIVEN)
    assert math.prod(each.ratio or 0.0 for each in scaled.factors[1:]) == pytest.approx(scaled.factors[0].ratio)
    assert len(scaled.factors) == 4
    (factor,) = (each.sentence for each in explain(scaled.ours, theirs).differences if each.area == "score")
    assert factor.startswith("factor of the reference convergence: 1.02, theirs 1: the official score is the time")


def test_hyperparameters_are_ranked_by_what_they_can_do(tmp_path: Path) -> None:
    ours = one(
        tmp_path / "a",
        timed_log(60, 3, global_batch_size=3328, opt_name="lars", sgd_opt_weight_decay=5e-5, model_bn_span=208),
    )
    theirs = one(tmp_path / "b", timed_log(60, 3))
    names = [each.name for each in explain(ours, theirs).differences]
    assert names == ["global_batch_size", "opt_name", "sgd_opt_weight_decay"]


def test_what_was_measured_comes_before_what_settings_may_do(tmp_path: Path) -> None:
    ours = one(tmp_path / "a", timed_log(63, 3, global_batch_size=3328))
    theirs = one(tmp_path / "b", timed_log(60, 3))
    first, *rest = explain(ours, theirs).differences
    assert first.sentence.startswith("your training takes 5.0% longer than theirs: 252 s against 240 s")
    assert "global_batch_size" in [each.name for each in rest]


def test_the_samples_that_bert_took_are_no_setting(tmp_path: Path) -> None:
    """Its train_samples are those until the target; of other benchmarks they are the data set's."""
    sides = [
        one(tmp_path / name, timed_log(60, 3, train_samples=n)) for name, n in (("a", 1_281_167), ("b", 1_300_000))
    ]
    assert [each.name for each in explain(*sides).differences] == ["train_samples"]
    bert = [replace(side, benchmark="bert") for side in sides]
    assert explain(*bert).differences == ()


def test_the_same_run_has_no_difference(tmp_path: Path) -> None:
    ours = one(tmp_path / "a", timed_log(60, 3, seed=1))
    theirs = one(tmp_path / "b", timed_log(60, 3, seed=2))
    assert explain(ours, theirs).differences == ()


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


def test_two_runs_of_encore_are_compared_in_environment_and_configuration(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_set(tmp_path / name, [timed_log(60, 3)])
    passport(tmp_path / "a")
    passport(
        tmp_path / "b",
        environment={"NCCL_DEBUG": "WARN"},
        code={"commit": "b" * 40},
        configuration={"precision": {"value": "fp16", "origin": "--set"}},
    )
    runs = ("explain", str(tmp_path / "a"), str(tmp_path / "b"), "--json")
    result = CliRunner().invoke(app, runs)
    assert result.output == CliRunner().invoke(app, [*runs[:2], "--other", *runs[2:]]).output
    found = {each["name"]: each for each in json.loads(result.output)["differences"]}
    assert list(found) == ["precision", "code.commit", "environment.NCCL_DEBUG"]
    assert found["precision"]["area"] == "configuration"
    assert found["precision"]["ours"] == "fp32"


def test_what_each_run_took_for_auto_is_a_difference(tmp_path: Path) -> None:
    """Both say kernels=auto; the second run's experiments measured anew and took different ones."""
    auto = {"configuration": {name: {"value": "auto", "origin": "default"} for name in ("compile", "kernels")}}
    taken = {"compile": "default", "kernels": {"gather": "triton"}, "tf32": {"matmul": False}}
    other = {**taken, "kernels": {"gather": "plain"}, "tf32": {"matmul": True}}
    for name, choices in (("a", {"0": taken}), ("b", {"0": taken, "1": other})):
        write_set(tmp_path / name, [timed_log(60, 3)])
        passport(tmp_path / name, choices=choices, **auto)
    ours, theirs = load_side(tmp_path / "a"), load_side(tmp_path / "b")
    found = {each.name: (each.area, each.ours, each.theirs) for each in explain(ours, theirs).differences}
    assert found == {
        "kernels.gather": ("configuration", "triton", "triton / plain"),
        "tf32.matmul": ("configuration", "false", "false / true"),
    }
    compared = compare_with(ours, theirs, AS_GIVEN)
    assert "kernels.gather: triton, theirs triton / plain" in compared.caveats
    write_report([tmp_path / "b"], tmp_path / "report")
    for page in ("report.md", "report.html"):
        assert "triton / plain" in (tmp_path / "report" / page).read_text("utf-8")


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
    assert theirs is not None
    found = [each for each in explain(load_side(tmp_path), theirs).differences if each.area == "environment"]
    assert [(each.name, each.ours, each.theirs) for each in found] == [("environment.HOROVOD_CYCLE_TIME", "5", "0.1")]


def test_the_command_takes_one_thing_to_compare_with(tmp_path: Path) -> None:
    write_set(tmp_path, [timed_log(60, 3)])
    result = CliRunner().invoke(app, ["explain", str(tmp_path), "--other", str(tmp_path), "--with", "x"])
    assert result.exit_code != 0
    shown = CliRunner().invoke(app, ["explain", str(tmp_path), "--with", "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"])
    assert "global_batch_size: 1664, theirs 3264" in shown.output


def test_against_a_submission_by_what_is_kept_of_its_logs(public_logs: Path) -> None:
    """DellEMC's DSS8440 against the DGX-1: another card, and a faster evaluation."""
    ours = load_side(public_logs / "v0.7" / "DellEMC" / "DSS8440" / "resnet")
    theirs = compare(ours, "v0.7/NVIDIA/dgx1_ngc20.06_mxnet").theirs
    assert theirs is not None
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
