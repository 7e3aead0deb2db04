"""`encore export`: the model of a run, its passport, refusals, and the tolerance for decisions."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.common.export import export
from encore import files
from encore.errors import EncoreError
from encore.lab.serving import export as exports
from encore.run import programs, run_folder
from tests.conftest import Encore, ToyRun, evaluations, quality
from tests.trainings import evaluated, exported, make_run


@pytest.fixture(scope="module")
def run(pytorch_python: Path, toy_run: Callable[[str], ToyRun]) -> ToyRun:
    return toy_run("ncf")


@pytest.fixture
def copy(run: ToyRun, tmp_path: Path) -> run_folder.Experiment:
    return run_folder.Experiment(0, shutil.copytree(run.folder, tmp_path / run.folder.name) / "experiment_0")


def refused(run: Path, to: Path, format_name: str = "torch-export") -> EncoreError:
    with pytest.raises(EncoreError) as error:
        programs.export(programs.Export(run=run, to=to, format=format_name), lambda step: None)
    assert not [path for path in to.parent.glob(".*") if path.is_dir()], "a temporary folder is left"
    return error.value


@pytest.mark.long
def test_served_model_has_the_quality_of_the_run(
    encore: Encore, serving_python: Path, run: ToyRun, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "ncf"
    content, passport = exported(encore, run.folder, folder, "onnx"), files.read_json(run.folder / "run.json")
    evaluated(encore, folder, run.folder, content, "--max-batch-size", "65536")
    facts = {"quality": {"hit_rate": quality(evaluations(run.metrics)[-1])}, "commit": passport["code"]["commit"]}
    assert content["reached"] and content == {**files.read_json(folder / "export.json"), **facts}
    assert (content["run"]["id"], content["data"]["id"]) == (passport["sha256"], passport["data"]["id"])
    with np.load(folder / "example.npz") as example:
        assert {name: example[name].dtype.name for name in example} == {
            "users": "int64",
            "items": "int64",
            "scores": "float32",
        }
        assert len(np.unique(example["scores"])) > 1


def test_evaluation_with_another_run_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path).path
    (tmp_path / "export.json").write_text('{"schema": 1, "run": {"name": "other", "id": "0", "experiment": 0}}')
    with pytest.raises(EncoreError, match=r"(?s)is not from.*expected: the run other"):
        exports.plan(tmp_path, run, None)


def test_export_refuses_bad_requests(tmp_path: Path, run: ToyRun, copy: run_folder.Experiment) -> None:
    to = tmp_path / "to"
    assert "is not a run folder" in str(refused(tmp_path, to))
    assert "exists" in str(refused(run.folder, tmp_path))
    assert refused(run.folder, to, "saved-model").expected == "onnx or torch-export"
    (file,) = copy.folder.glob("checkpoint/trained_*/shared")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert "differs from its checksum" in refused(copy.folder.parent, to).found
    shutil.rmtree(copy.folder / "checkpoint")
    error = refused(copy.folder.parent, to)
    assert "no checkpoint" in error.found and "--set checkpoint_interval=1" in error.hint
    copy.set_state(run_folder.ExperimentState(status="running"))
    assert "is running" in str(refused(copy.folder.parent, to))


def test_model_below_its_target_needs_an_option(copy: run_folder.Experiment, encore: Encore, tmp_path: Path) -> None:
    files.write_json(copy.config, {**files.read_json(copy.config), "quality_target": 0.99})
    error = refused(copy.folder.parent, tmp_path / "to")
    assert "did not reach its target: hit_rate 0." in error.found
    assert error.expected == "hit_rate 0.99" and "--below-target" in error.hint
    assert not exported(encore, copy.folder.parent, tmp_path / "to", "torch-export", "--below-target")["reached"]


@pytest.mark.parametrize(
    ("share", "differ", "problem"), [(0.0, 1, "differ by 1 "), (0.25, 1, ""), (0.25, 2, "2 samples of 4")]
)
def test_some_samples_may_have_other_decisions(share: float, differ: int, problem: str) -> None:
    values, turned = np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32)
    turned[:differ, 1] = 1
    subject = export.Subject(
        model=None,
        inputs=(export.Value("x", ""),),
        outputs=(export.Value("y", ""),),
        example=(values,),
        preprocessing={},
        evaluate=lambda infer: {"sum": float(infer(values)[0].sum())},
        original=lambda x: (x,),
        turned=share,
    )
    tools = export.Tools(module=None, infer=lambda subject: lambda x: (x,), writers={})
    with pytest.raises(Problem, match=problem) if problem else contextlib.nullcontext():
        _, checked = export.check(export.as_parts(subject), {export.WHOLE: lambda x: (turned,)}, tools)
        assert (checked["turned"], checked["largest_difference"], checked["quality"]) == (1, 0.0, {"sum": 1.0})
