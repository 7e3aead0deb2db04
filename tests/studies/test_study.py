"""The study of multi-GPU training: grid, report from generated measurements, traffic on a DGX-1, and a killed run."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from encore import paths
from encore.errors import EncoreError
from encore.lab.studies import folder as folders
from encore.lab.studies import measurement, topology
from encore.lab.studies import report as page
from encore.lab.studies.definition import Point, Study, changed, load
from encore.machine.links import parse_topology
from encore.results.report.report import Report
from encore.results.report.report import write_files as write_report
from tests.conftest import Encore
from tests.json_schemas import validate
from tests.results.result_logs import write_files
from tests.trainings import in_background, wait_until

Recorded = Callable[[str, object], None]

OWN = Path(__file__).with_name("own.toml")
WEIGHTS = {"lenet": 70_753_070, "alexnet": 50_844_008, "googlenet": 6_998_552, "inception-v3": 23_817_352}


def measurement_json(point: Point, seconds: float) -> dict[str, Any]:
    ranks, batch = int(point.axes["ranks"]), int(point.axes["batch_size"])
    weights = WEIGHTS.get(str(point.axes["network"]), 1_795_131)
    blocks, stages = [0.99 * seconds, seconds, 1.01 * seconds], {"fp_bp": 0.7, "wu": 0.3, "step": 1.0, "metric": 0.2}
    return {
        "schema": 1,
        "config": dict(point.config),
        "network": {
            "convolutions": 2, "fully_connected": 2, "weights": weights, "output": [2, 10],
            "sizes": {"a": weights // 2, "b": weights - weights // 2},
        },
        "first_step_seconds": 2 * seconds,
        "steps_per_block": 4,
        "step_seconds": blocks,
        "stages": {name: [share * block for block in blocks] for name, share in stages.items()},
        "operators": {"fp": 0.2 * seconds, "bp": 0.4 * seconds, "wu": 0.2 * seconds},
        "memory_mib": {
            "empty": [200.0] * ranks,
            "before_training": [400.0] * ranks,
            "training": [1000.0 + 10 * batch, *[900.0 + 10 * batch] * (ranks - 1)],
        },
        "wall_seconds": 5.0,
    }  # fmt: skip


def create(
    study: Study, results: Path, seconds: Callable[[Point], float | None], passes: tuple[float, ...] = (1.01, 1.0)
) -> folders.Folder[Study]:
    # Create the folder of a study with these seconds per point (None: not measured), times a factor per pass
    folder = folders.create(study, f"study-{study.name}", results)
    for point, number in product(study.points(), range(study.passes)):
        if (value := seconds(point)) is not None:
            content = measurement_json(point, value * passes[number % len(passes)])
            write_files(folder.point_folder(point, number + 1), {folders.MEASUREMENT: content})
    return folder


def is_measured(point: Point) -> bool:
    is_large = (point.axes["network"], point.axes["ranks"]) == ("inception-v3", 8)
    return point.axes["precision"] != "fp16" and "largest_batch" not in point.axes and not is_large


def printed_seconds(point: Point) -> float | None:
    # NCCL adds the printed 16.4 %; n GPUs take (1 + n) / 2 times as long for a batch each
    slowdown = (1 + int(point.axes["ranks"])) / 2 * (1.164 if point.axes["way"] == "nccl" else 1.0)
    return 0.001 * int(point.axes["batch_size"]) * slowdown if is_measured(point) else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> folders.Folder[Study]:
    return create(load("multi-gpu"), tmp_path_factory.mktemp("results"), printed_seconds)


def test_grid_of_the_study() -> None:
    study, small = load("multi-gpu"), load("multi-gpu", small=True).points()
    assert (len(study.points()), study.epoch.images, len(study.questions)) == (5 * 3 * 3 * 4 * 2 + 5, 256_000, 7)
    assert {point.axes["network"] for point in small} == {point.axes["network"] for point in study.points()}
    assert [(point.axes["ranks"], point.config["device"]) for point in small] == [(1, "cpu")] * 16 + [(2, "cpu")] * 15
    records = {point.config["records"] for point in changed(study, ["records=/data/train.rec"]).points()}
    assert (records, [point.key for point in load(str(OWN)).points()]) == (
        {"/data/train.rec"}, ["lenet-local-2-1", "lenet-horovod-2-1", "lenet-local-2-2", "lenet-horovod-2-2"]
    )  # fmt: skip
    with pytest.raises(EncoreError, match="--set ranks"):
        changed(study, ["ranks=4"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('network = ["lenet"]', 'network = ["lenett"]', "network = 'lenett'"),
        ("momentum = 0.9", "momentun = 0.9", "'momentun'"),
        ("seed = 1", "", "does not say seed"),
        ('series = ["ranks"]', 'series = ["rank"]', "'rank'"),
        ('kind = "against"', 'kind = "agains"', "questions.0.kind"),
        ("batch_size = [2]", "batch_size = [0]", "batch_size must be above 0"),
    ],
    ids=["value", "key", "missing", "axis", "kind", "number"],
)
def test_invalid_study_is_rejected(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_files(tmp_path, {"own.toml": OWN.read_text(encoding="utf-8").replace(old, new)})
    with pytest.raises(EncoreError, match=message):
        load(str(tmp_path / "own.toml"))


def contents(report: Report) -> dict[str, Any]:
    # The texts of a report, and the columns and some rows of its tables
    return {
        "about": report.about, "notices": report.notices,
        "chapters": {
            chapter.key: [
                chapter.title, chapter.sentence, chapter.note, [figure.key for figure in chapter.figures], chapter.terms
            ]
            for chapter in report.chapters
        },
        "tables": {
            chapter.key: [
                [table.title, table.columns, table.note, len(table.rows), *table.rows[:5], *table.rows[5::20]]
                for table in (*chapter.tables, *chapter.folded)
            ]
            for chapter in report.chapters
        },
    }  # fmt: skip


@pytest.mark.slow
def test_report_answers_every_question(folder: folders.Folder[Study], tmp_path: Path, recorded: Recorded) -> None:
    # 8 GPUs are 1.78 times as fast as one, and NCCL costs 16.4 %, as printed; memory has no interval
    report, machine = page.build(folder), page._machine_summary(folder.machine())
    files = {path.name: path.read_text("utf-8") for path in write_report(report, tmp_path)}
    recorded("multi_gpu.json", {**contents(report), "about": report.about.replace(machine, "MACHINE")})
    assert report.chapters[0].sentence.split(";")[0] in files["report.html"] and "None" not in files["report.md"]
    assert [files[f"question_2_{number}.csv"].count("\n") for number in (2, 3)] == [1 + 15, 1 + 2]


@pytest.mark.slow
def test_report_compares_the_largest_batches(tmp_path: Path, recorded: Recorded) -> None:
    folder = create(load("multi-gpu"), tmp_path, lambda point: 0.01 if point.axes["ranks"] == 1 else None)
    for point in [point for point in folder.study.points() if "largest_batch" in point.axes]:
        batches = {"largest_batch": {"fits": 128, "does_not": 256}, "network": folder.measurements(point)[0]["network"]}
        write_files(folder.point_folder(point), {folders.MEASUREMENT: batches})
    recorded("largest_batches.json", contents(page.build(folder))["tables"]["question_6"])


def test_report_of_busy_cpus_has_wide_intervals(tmp_path: Path, recorded: Recorded) -> None:
    # The second pass takes 1.3 times as long at every point; blocks of one pass differ by 1 %
    study = load("multi-gpu", small=True)
    first, second = ([point.key for number, point in study.order() if number == wanted] for wanted in (1, 2))
    assert first != second and sorted(first) == sorted(second)
    folder = create(study, tmp_path, lambda point: 0.01, (1.0, 1.3))
    for point in study.points()[:3]:
        content = {**folder.measurements(point)[1], "others_cores": 1.25, "cores": 2}
        write_files(folder.point_folder(point, 2), {folders.MEASUREMENT: content})
    report = page.build(folder)
    recorded("busy_cpus.json", {**contents(report), "about": ""})
    recorded("busy_cpus.svg", "\n".join(figure.svg for chapter in report.chapters for figure in chapter.figures))
    html = next(path.read_text("utf-8") for path in write_report(report, tmp_path) if path.suffix == ".html")
    assert "<summary>The study&#39;s printed figures: speedup, not measured here (24)" in html
    for point in study.points():
        (folder.point_folder(point, 2) / folders.MEASUREMENT).unlink()
    assert "without drift between points" in page.build(folder).chapters[-3].sentence
    assert {*map(folder.state, study.points())} == {"to do"}


@pytest.mark.slow
def test_job_array_has_the_missing_points(folder: folders.Folder[Study]) -> None:
    missing = [str(number) for number, point in enumerate(folder.study.points()) if not is_measured(point)]
    options = (f"array={','.join(missing)}", "partition=gpu", "gpus-per-node=8")
    script = measurement.script(folder, {"partition": "gpu"}).splitlines()
    assert {f"#SBATCH --{option}" for option in options} <= {*script}
    seconds = pytest.approx(5.0 * len(missing) * folder.study.passes)
    assert (folders.open_folder(folder.path, Study), measurement.seconds_left(folder)) == (folder, seconds)


# -- traffic on a DGX-1 ---------------------------------------------------------------------------------


def test_links_and_bytes_of_a_step_on_a_dgx_1() -> None:
    links = topology.load_links("dgx1-v100")
    listing = (paths.ROOT / "tests" / "samples" / "topology" / "dgx1-v100.txt").read_text("utf-8")
    nvlinks = parse_topology(listing).nvlinks.items()
    assert {tuple(sorted(int(gpu[3:]) for gpu in pair)): width for pair, width in nvlinks} == links.widths
    assert all(topology._pair(*pair) in links.widths for pair in zip(links.ring, (*links.ring[1:], 0), strict=True))
    assert (len(topology.two_hops(links, 8)), topology.two_hops(links, 4), links.path(0, 1)) == (28 - 16, [], (0, 1))
    # Two arrays with one of two GPUs as owner each: to the owner and back. One array on eight GPUs: three GPUs are
    # reached by two hops, each of which moves it again
    trees = (topology.tree(links, [100, 60], 2), sum(topology.tree(links, [100], 8).values()))
    rings = [[*topology.ring(links, [100, 60], gpus).values()] for gpus in (1, 8)]
    assert (trees, rings) == (({(0, 1): 2 * 100 + 2 * 60}, 2 * 100 * (7 + 3)), [[], [2 * 7 / 8 * 160] * 8])


# -- real measurements ----------------------------------------------------------------------------------


@pytest.mark.long
def test_killed_study_resumes_without_repeating_a_point(mxnet_python: Path, encore: Encore, tmp_path: Path) -> None:
    own = OWN.read_text(encoding="utf-8").replace('["lenet"]', '["googlenet"]').replace("image = 28", "image = 64")
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
    for point in folder.study.points():
        first_pass, _ = folder.measurements(point)
        stages, memory = first_pass["stages"], first_pass["memory_mib"]
        assert 0 < stages["wu"][0] < stages["fp_bp"][0] + stages["wu"][0] <= stages["step"][0]
        ranks = int(point.axes["ranks"]) if point.axes["way"] == "horovod" else 1
        assert len(memory["training"]) == ranks and memory["empty"] < memory["before_training"] < memory["training"]
