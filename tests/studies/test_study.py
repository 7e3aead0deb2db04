"""A study as data, its answers from measurements that follow a rule, and the bytes over the links of a DGX-1."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from encore import files, paths
from encore.errors import EncoreError
from encore.lab.studies import answers as page
from encore.lab.studies import folder as folders
from encore.lab.studies import machine as traffic
from encore.lab.studies import measuring
from encore.lab.studies.definition import Point, Study, changed, load
from encore.lab.studies.folder import MEASUREMENT, Folder
from encore.machine.links import parse_topology
from encore.results.report.report import Report, write_files

Recorded = Callable[[str, object], None]

OWN = Path(__file__).with_name("own.toml")
WEIGHTS = {"lenet": 70_753_070, "alexnet": 50_844_008, "googlenet": 6_998_552, "inception-v3": 23_817_352}


def measurement(point: Point, seconds: float, spread: float = 0.01) -> dict[str, Any]:
    weights = WEIGHTS.get(str(point.axes["network"]), 1_795_131)
    blocks = [seconds * factor for factor in (1 - spread, 1.0, 1 + spread)]
    ranks = int(point.axes["ranks"])
    memory = [1000.0 + 10 * int(point.axes["batch_size"]), *[900.0 + 10 * int(point.axes["batch_size"])] * (ranks - 1)]
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
        "stages": {
            "fp_bp": [0.7 * each for each in blocks], "wu": [0.3 * each for each in blocks], "step": blocks,
            "metric": [0.2 * each for each in blocks],
        },
        "operators": {"fp": 0.2 * seconds, "bp": 0.4 * seconds, "wu": 0.2 * seconds},
        "memory_mib": {"empty": [200.0] * ranks, "before_training": [400.0] * ranks, "training": memory},
        "wall_seconds": 5.0,
    }  # fmt: skip


def measured(
    study: Study,
    results: Path,
    seconds: Callable[[Point], float | None],
    shift: Callable[[Point, int], float] = lambda point, number: 1 + 0.01 * (number % 2),
) -> Folder[Study]:
    """Return the folder of a study whose passes took ``shift`` times the ``seconds`` of their point; None: not done."""
    made = folders.create(study, f"study-{study.name}", results)
    for point in study.points():
        value = seconds(point)
        if value is None:
            continue
        for number in range(1, study.passes + 1):
            made.at(point, number).mkdir(parents=True)
            files.write_json(made.at(point, number) / MEASUREMENT, measurement(point, value * shift(point, number)))
    return made


def follows(point: Point) -> float | None:
    """The study's own NCCL overhead of 16.4 %, half the linear speed-up, and Inception-v3 not measured on 8 GPUs."""
    ranks, batch = int(point.axes["ranks"]), int(point.axes["batch_size"])
    if (
        point.axes["precision"] == "fp16"
        or "largest_batch" in point.axes
        or (point.axes["network"] == "inception-v3" and ranks == 8)
    ):
        return None
    return 0.001 * batch * (1 + ranks) / 2 * (1.164 if point.axes["way"] == "nccl" else 1.0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder[Study], Report, Path]:
    folder = measured(load("multi-gpu"), tmp_path_factory.mktemp("results"), follows)
    found = page.build(folder)
    write_files(found, folder.path / "report")
    return folder, found, folder.path / "report"


def test_the_grid_is_the_study_s() -> None:
    study = load("multi-gpu")
    assert (len(study.points()), study.epoch.images, len(study.questions)) == (5 * 3 * 3 * 4 * 2 + 5, 256_000, 7)
    small = load("multi-gpu", small=True).points()
    assert {point.axes["network"] for point in small} == {point.axes["network"] for point in study.points()}
    assert [(point.axes["ranks"], point.config["device"]) for point in small] == [(1, "cpu")] * 16 + [(2, "cpu")] * 15


def test_a_study_of_one_s_own() -> None:
    assert [point.key for point in load(str(OWN)).points()] == [
        "lenet-local-2-1", "lenet-horovod-2-1", "lenet-local-2-2", "lenet-horovod-2-2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "said"),
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
def test_a_study_that_cannot_be_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(EncoreError, match=said):
        load(str(path))


def contents(report: Report) -> dict[str, Any]:
    """Return what a page says: sentences and notes, and of each table its columns and its first rows."""
    tables = {
        each.key: [
            [table.title, table.columns, table.note, len(table.rows), *table.rows[:5], *table.rows[5::20]]
            for table in (*each.tables, *each.folded)
        ]
        for each in report.chapters
    }
    chapters = {
        each.key: [each.title, each.sentence, each.note, [figure.key for figure in each.figures], each.terms]
        for each in report.chapters
    }
    return {"about": report.about, "notices": report.notices, "chapters": chapters, "tables": tables}


@pytest.mark.slow
def test_every_question_is_answered_from_the_data_next_to_the_printed_figures(
    built: tuple[Folder[Study], Report, Path], recorded: Recorded
) -> None:
    """8 devices, and a step of 4.5 times as long: 1.78 times as fast; an overhead of NCCL of 16.4 %, as printed.

    Memory has no interval; both ends of a printed headline are of no point.
    """
    folder, found, report = built
    machine = page._machine(folder.machine())
    recorded("multi_gpu.json", {**contents(found), "about": found.about.replace(machine, "MACHINE")})
    written = (report / "report.html").read_text("utf-8")
    assert all(each.sentence.split(";")[0] in written for each in found.chapters[:1])
    assert "None" not in (report / "report.md").read_text("utf-8")
    assert [(report / f"question_2_{n}.csv").read_text("utf-8").count("\n") for n in (2, 3)] == [1 + 15, 1 + 2]


@pytest.mark.slow
def test_largest_batches_are_printed_next_to_the_study_s(tmp_path: Path, recorded: Recorded) -> None:
    study = load("multi-gpu")
    folder = measured(study, tmp_path, lambda point: 0.01 if point.axes["ranks"] == 1 else None)
    for point in folder.study.points():
        if "largest_batch" in point.axes:
            found = {
                "largest_batch": {"fits": 128, "does_not": 256},
                "network": folder.measurements(point)[0]["network"],
            }
            (folder.at(point) / MEASUREMENT).write_text(json.dumps(found), encoding="utf-8")
    recorded("largest_batches.json", contents(page.build(folder))["tables"]["question_6"])


def test_a_setting_of_the_base_and_none_of_an_axis() -> None:
    study = changed(load("multi-gpu"), ["records=/data/train.rec"])
    assert {point.config["records"] for point in study.points()} == {"/data/train.rec"}
    with pytest.raises(EncoreError, match="--set ranks"):
        changed(study, ["ranks=4"])


def test_passes_apart_widen_the_intervals_and_a_busy_machine_is_reported(tmp_path: Path, recorded: Recorded) -> None:
    """On CPUs the second pass takes 1.3 times as long at every point, blocks of one pass differ by 1 %."""
    study = load("multi-gpu", small=True)
    passes = [[point.key for number, point in study.order() if number == each] for each in (1, 2)]
    assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1])
    folder = measured(study, tmp_path, lambda point: 0.01, lambda point, number: 1.3 if number == 2 else 1.0)
    for point in folder.study.points()[:3]:
        path = folder.at(point, 2) / MEASUREMENT
        path.write_text(json.dumps({**json.loads(path.read_text()), "others_cores": 1.25, "cores": 2}))
    found = page.build(folder)
    recorded("busy_cpus.json", {**contents(found), "about": ""})
    write_files(found, tmp_path / "report")
    written = (tmp_path / "report/report.html").read_text("utf-8")
    # An interval at each end of a line; what is not measured here is folded.
    assert written.count('class="l thin') > 20
    assert "<summary>The study&#39;s printed figures: speedup, not measured here (24)" in written
    assert all("Measured on CPUs" in (tmp_path / f"report/report.{kind}").read_text("utf-8") for kind in ("html", "md"))
    for point in folder.study.points():
        (folder.at(point, 2) / MEASUREMENT).unlink()
    assert "drifts between two points is not in them" in page.build(folder).chapters[-3].sentence
    assert {folder.state(point) for point in folder.study.points()} == {"to do"}


@pytest.mark.slow
def test_resume_and_array_hold_what_is_missing(built: tuple[Folder[Study], Report, Path]) -> None:
    folder, _, _ = built
    missing = [str(number) for number, point in enumerate(folder.study.points()) if folder.state(point) != "done"]
    lines = measuring.script(folder, {"partition": "gpu"}).splitlines()
    options = (f"array={','.join(missing)}", "partition=gpu", "gpus-per-node=8")
    assert {f"#SBATCH --{option}" for option in options} <= {*lines}
    assert folders.open_folder(folder.path, Study) == folder


def test_a_device_of_a_cpu_is_as_large_in_each_point(tmp_path: Path) -> None:
    folder = Folder(tmp_path, load("multi-gpu", small=True))
    commands = {int(each.axes["ranks"]): measuring.command(folder, each, None) for each in folder.study.points()}
    assert sorted(commands) == [1, 2]
    assert len({each.environment["OMP_NUM_THREADS"] for each in commands.values()}) == 1


@pytest.mark.slow
def test_time_that_is_left(built: tuple[Folder[Study], Report, Path]) -> None:
    folder = built[0]
    missing = [point for point in folder.study.points() if folder.state(point) != "done"]
    assert measuring.seconds_left(folder) == pytest.approx(5.0 * len(missing) * folder.study.passes)
    known = [(Point({"network": name, "ranks": 1}, {}), seconds) for name, seconds in (("a", 4.0), ("b", 20.0))]
    assert measuring._seconds_like(Point({"network": "b", "ranks": 2}, {}), known) == 20.0
    assert measuring._seconds_like(Point({"network": "c", "ranks": 1}, {}), known) == 12.0


def test_two_hops_of_a_dgx_1() -> None:
    links = traffic.links_of("dgx1-v100")
    listing = (paths.ROOT / "tests" / "samples" / "topology" / "dgx1-v100.txt").read_text("utf-8")
    found = {tuple(sorted(int(gpu[3:]) for gpu in pair)): n for pair, n in parse_topology(listing).nvlinks.items()}
    assert found == links.widths
    # A V100 has six links.
    assert [sum(width for pair, width in links.widths.items() if gpu in pair) for gpu in range(8)] == [6] * 8
    assert all(traffic._pair(*pair) in links.widths for pair in zip(links.ring, (*links.ring[1:], 0), strict=True))
    hops = traffic.two_hops(links, 8)
    assert (len(hops), traffic.two_hops(links, 4), links.path(0, 1)) == (28 - 16, [], (0, 1))
    assert links.path(0, 5) in hops


def test_bytes_of_a_step() -> None:
    links = traffic.links_of("dgx1-v100")
    # Two arrays, each owned by one of two GPUs: each goes to its owner and comes back.
    assert traffic.tree(links, [100, 60], 2) == {(0, 1): 2 * 100 + 2 * 60}
    assert traffic.ring(links, [100, 60], 1) == {}
    assert list(traffic.ring(links, [100, 60], 8).values()) == [2 * 7 / 8 * 160] * 8
    # Of one array on eight GPUs, what goes to GPUs without a link to its owner is moved twice.
    tree = traffic.tree(links, [100], 8)
    reached = sum(1 for other in range(1, 8) if len(links.path(0, other)) == 3)
    assert sum(tree.values()) == 2 * 100 * (7 + reached)
