"""The measuring program for real: a study that is killed and resumed."""

import json
import signal
from pathlib import Path

import pytest

from encore.lab.studies import folder as folders
from encore.lab.studies.definition import Study
from tests.conftest import Encore
from tests.json_schemas import validate_file
from tests.trainings import in_background, wait_until


@pytest.fixture(scope="module")
def resumed(
    mxnet_python: Path, encore: Encore, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, int]]:
    """A study that was killed while it measured its second point or a later one, then resumed; what was done before."""
    folder = tmp_path_factory.mktemp("study")
    own = Path(__file__).with_name("own.toml").read_text(encoding="utf-8")
    own = own.replace('["lenet"]', '["googlenet"]').replace("image = 28", "image = 64")
    (folder / "own.toml").write_text(own, encoding="utf-8")
    process = in_background("study", "run", str(folder / "own.toml"), "--results", str(folder / "results"))
    wait_until(lambda: len(list(folder.rglob("measurement.json"))) >= 1, "a point is done")
    wait_until(lambda: len(list(folder.rglob("output.txt"))) >= 2, "the next point has begun")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {path.parent.name: path.stat().st_mtime_ns for path in folder.rglob("measurement.json")}
    (path,) = (folder / "results").glob("*-study-own")
    done = encore("study", "run", "--resume", str(path), "--json")
    assert done.returncode == 0, done.stderr
    (path / "printed.json").write_text(done.stdout, encoding="utf-8")
    validate_file("study-report", path / "printed.json")
    return path, before


def test_after_a_kill_nothing_is_measured_twice(resumed: tuple[Path, dict[str, int]]) -> None:
    path, before = resumed
    folder = folders.open_folder(path, Study)
    assert {folder.state(point) for point in folder.study.points()} == {"done"}
    # The one that the kill left running ends by itself, and is waited for.
    (first, *_) = sorted(before, key=lambda key: before[key])
    assert (path / first / "measurement.json").stat().st_mtime_ns == before[first]
    printed = json.loads((path / "printed.json").read_text("utf-8"))
    assert [each["state"] for each in printed["points"]] == ["done"] * 4
    passes = [each for point in folder.study.points() for each in folder.measurements(point)]
    # Nobody was there to record it for the one that the kill left running.
    watched = [each for each in passes if "others_cores" in each]
    assert len(passes) == 4 * 2 and len(watched) >= len(passes) - 1
    assert all(0 <= each["others_cores"] <= each["cores"] for each in watched)
    assert (path / "report" / "report.html").is_file()


def test_stages_are_parts_of_the_step_and_memory_grows(resumed: tuple[Path, dict[str, int]]) -> None:
    folder = folders.open_folder(resumed[0], Study)
    for point in folder.study.points():
        found = folder.measurements(point)[0]
        stages, memory = found["stages"], found["memory_mib"]
        for fp_bp, wu, step in zip(stages["fp_bp"], stages["wu"], stages["step"], strict=True):
            assert 0 < wu < fp_bp + wu <= step
        assert len(memory["training"]) == (int(point.axes["ranks"]) if point.axes["way"] == "horovod" else 1)
        for empty, before, training in zip(memory["empty"], memory["before_training"], memory["training"], strict=True):
            assert empty < before < training
