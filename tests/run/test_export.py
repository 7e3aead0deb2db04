"""`encore export`: a run's model, written and read back in each format, its passport, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.common.export import export
from encore import data
from encore.errors import EncoreError
from encore.lab.serving import export as exports
from encore.run import programs
from encore.run.run_folder import Experiment, ExperimentState
from tests.conftest import Encore, evaluations, only_run, quality
from tests.trainings import evaluated, exported

# Reached by any model: what is looked at is how a model that reached its target leaves the run.
SETTINGS = ("layers=[32,16,8]", "factors=8", "epochs=2", "quality_target=0.001")


@pytest.fixture(scope="module")
def run(encore: Encore, pytorch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    data.prepare("ncf", folder / "ncf", data.Preparation(), pytorch_python, lambda update: None)
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    encore("run", "ncf", "1", "--data", str(folder / "ncf"), "--results", str(folder / "results"), *settings, code=0)
    return only_run(folder / "results")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Experiment:
    folder = tmp_path / run.name
    shutil.copytree(run, folder)
    return Experiment(0, folder / "experiment_0")


def refused(request: programs.Export) -> EncoreError:
    with pytest.raises(EncoreError) as caught:
        programs.export(request, lambda step: None)
    assert not [each for each in request.to.parent.glob(".*") if each.is_dir()], "something is left"
    return caught.value


def test_exported_model_is_the_one_that_reached_the_target(
    encore: Encore, serving_python: Path, run: Path, tmp_path: Path
) -> None:
    """A server's clients get its quality too."""
    folder = tmp_path / "models" / "ncf"
    content = exported(encore, run, folder, "onnx")
    evaluated(encore, folder, run, content, "--max-batch-size", "65536")
    assert content == json.loads((folder / "export.json").read_text(encoding="utf-8"))
    last = evaluations(run / "experiment_0" / "metrics.jsonl")[-1]
    assert content["reached"] and content["quality"] == {"hit_rate": quality(last)}
    assert (folder / content["model"]).is_file()
    passport = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert content["run"]["name"] == run.name and content["run"]["id"] == passport["sha256"]
    assert content["data"]["id"] == passport["data"]["id"] and content["commit"] == passport["code"]["commit"]
    assert [each["shape"] for each in (*content["inputs"], *content["outputs"])] == [[-1]] * 3
    with np.load(folder / "example.npz") as example:
        assert {name: example[name].dtype.name for name in example} == {
            "users": "int64",
            "items": "int64",
            "scores": "float32",
        }
        assert len(set(example["scores"].tolist())) > 1, "a model that scores all pairs alike shows nothing"


def test_export_of_another_run_is_not_evaluated(run: Path, tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text('{"schema": 1, "run": {"name": "other", "id": "0", "experiment": 0}}')
    with pytest.raises(EncoreError, match="is not from") as caught:
        exports.plan(tmp_path, run, None)
    assert caught.value.expected == "the run other"


def test_request_that_cannot_be(run: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    assert "is no run folder" in str(refused(programs.Export(run=tmp_path, to=to)))
    assert "exists" in str(refused(programs.Export(run=run, to=tmp_path)))
    assert refused(programs.Export(run=run, to=to, format="saved-model")).expected == "onnx or torch-export"


def test_run_that_has_no_checkpoint_or_has_not_ended(copy: Experiment, tmp_path: Path) -> None:
    request = programs.Export(run=copy.folder.parent, to=tmp_path / "to", format="torch-export")
    shutil.rmtree(copy.folder / "checkpoint")
    problem = refused(request)
    assert "no checkpoint" in problem.found and "--set checkpoint_interval=1" in problem.hint
    copy.set_state(ExperimentState(status="running"))
    assert "is running" in str(refused(request))


def test_damaged_checkpoint(copy: Experiment, tmp_path: Path) -> None:
    (file,) = copy.folder.glob("checkpoint/trained_*/shared")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    problem = refused(programs.Export(run=copy.folder.parent, to=tmp_path / "to", format="torch-export"))
    assert "differs from its checksum" in problem.found


def test_model_below_its_target_needs_a_word(copy: Experiment, encore: Encore, tmp_path: Path) -> None:
    config = json.loads(copy.config.read_text(encoding="utf-8"))
    copy.config.write_text(json.dumps({**config, "quality_target": 0.9}), encoding="utf-8")
    problem = refused(programs.Export(run=copy.folder.parent, to=tmp_path / "to", format="torch-export"))
    assert "did not reach its target: hit_rate 0." in problem.found
    assert problem.expected == "hit_rate 0.9" and "--below-target" in problem.hint
    assert not exported(encore, copy.folder.parent, tmp_path / "to", "torch-export", "--below-target")["reached"]


@pytest.mark.parametrize(
    ("share", "differ", "problem"), [(0.0, 1, "differ by 1 "), (0.25, 1, ""), (0.25, 2, "2 samples of 4")]
)
def test_a_share_of_samples_may_have_decisions_that_a_last_bit_turned(share: float, differ: int, problem: str) -> None:
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
    parts = export.as_parts(subject)
    tools = export.Tools(module=None, infer=lambda subject: lambda x: (x,), writers={})
    if problem:
        with pytest.raises(Problem, match=problem):
            export.check(parts, {export.WHOLE: lambda x: (turned,)}, tools)
        return
    _, found = export.check(parts, {export.WHOLE: lambda x: (turned,)}, tools)
    assert (found["turned"], found["largest_difference"], found["quality"]) == (1, 0.0, {"sum": 1.0})
