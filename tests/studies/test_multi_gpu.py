"""The study of multi-GPU training with real measurements: killed, then resumed."""

import json
from pathlib import Path

import pytest

from encore.lab.studies import folder as folders
from encore.lab.studies.definition import Study
from tests.conftest import Encore
from tests.json_schemas import validate
from tests.results.result_logs import write_files
from tests.trainings import in_background, wait_until

pytestmark = pytest.mark.long


def test_killed_study_resumes_without_repeating_a_point(mxnet_python: Path, encore: Encore, tmp_path: Path) -> None:
    own = Path(__file__).with_name("own.toml").read_text(encoding="utf-8")
    own = own.replace('["lenet"]', '["googlenet"]').replace("image = 28", "image = 64")
    write_files(tmp_path, {"own.toml": own})
    process = in_background("study", "run", str(tmp_path / "own.toml"), "--results", str(tmp_path))
    wait_until(lambda: len(list(tmp_path.rglob("measurement.json"))) >= 1, "a point is measured")
    wait_until(lambda: len(list(tmp_path.rglob("output.txt"))) >= 2, "the next point has begun")
    process.kill()
    process.communicate()
    written, first = min((path.stat().st_mtime_ns, path) for path in tmp_path.rglob("measurement.json"))
    (path,) = tmp_path.glob("*-study-own")
    report = json.loads(encore("study", "run", "--resume", str(path), "--json", code=0).stdout)
    validate("study-report", report)
    assert ([point["state"] for point in report["points"]], first.stat().st_mtime_ns) == (["done"] * 4, written)
    assert (path / "report" / "report.html").is_file()
    folder = folders.open_folder(path, Study)
    assert [len(folder.measurements(point)) for point in folder.study.points()] == [2] * 4
    for point in folder.study.points():
        stages, memory = (folder.measurements(point)[0][name] for name in ("stages", "memory_mib"))
        seconds = zip(stages["fp_bp"], stages["wu"], stages["step"], strict=True)
        assert all(0 < update < gradients + update <= step for gradients, update, step in seconds)
        mib = list(zip(memory["empty"], memory["before_training"], memory["training"], strict=True))
        assert all(empty < before < training for empty, before, training in mib)
        assert len(mib) == (int(point.axes["ranks"]) if point.axes["way"] == "horovod" else 1)
