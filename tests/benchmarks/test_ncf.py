"""NCF: whole runs on tiny data, sources and bad input; its network and sampler are in tests/in_framework/pytorch."""

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from encore import data, paths
from encore.errors import EncoreError
from encore.results.compliance.compliance import check
from tests.conftest import Encore, evaluations, losses, only_run, quality, records
from tests.trainings import PATIENCE, recorded

# The real model on a tenth of the small system's width, for runs of seconds.
SMALL = ("--set", "layers=[32,16,8]", "--set", "factors=8", "--set", "stop_at_target=false")


@pytest.fixture(scope="session")
def tastes(pytorch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small data set of ncf."""
    folder = tmp_path_factory.mktemp("tastes") / "ncf"
    data.prepare("ncf", folder, data.Preparation(), pytorch_python, lambda update: None)
    return folder


# -- whole runs ---------------------------------------------------------------------------------------


def test_two_ranks_reach_the_target_and_the_log_passes(encore: Encore, tastes: Path, tmp_path: Path) -> None:
    done = encore("run", "ncf", "2", "--data", str(tastes), "--results", str(tmp_path), "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = only_run(tmp_path)
    report = check(folder / "result_0.txt")
    assert report.ruleset == "0.5.0"
    errors = [each for each in report.findings if each.severity == "error" and each.kind != "small_data"]
    assert errors == []
    assert {each.kind for each in report.findings if each.severity == "error"} == {"small_data"}
    assert records(folder / "experiment_0" / "metrics.jsonl", "end")[0]["outcome"] == "reached"


def train(encore: Encore, data_set: Path, results: Path, ranks: int, *more: str) -> Path:
    results.mkdir(exist_ok=True)
    base = ("--data", str(data_set), "--results", str(results), "--seed", "5", *SMALL)
    done = encore("run", "ncf", str(ranks), *base, *more)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    return recorded(only_run(results) / "experiment_0") / "metrics.jsonl"


# Three epochs of 15 steps; each evaluation takes many batches, so that a signal may come within one.
THREE_EPOCHS = ("--set", "epochs=3", "--set", "eval_batch_size=16384")


@pytest.fixture(scope="module")
def whole(encore: Encore, tastes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The metrics stream of a run on one rank that nothing disturbed."""
    return train(encore, tastes, tmp_path_factory.mktemp("whole") / "results", 1, *THREE_EPOCHS)


def test_ranks_agree(encore: Encore, tastes: Path, tmp_path: Path, whole: Path) -> None:
    two = train(encore, tastes, tmp_path / "two", 2, *THREE_EPOCHS)
    assert len(losses(two)) == len(losses(whole)) == 45
    # The same pairs in the same steps: only the order of the sums differs.
    assert losses(two) == pytest.approx(losses(whole), rel=1e-4)
    scores = [[quality(each) for each in evaluations(path)] for path in (two, whole)]
    assert scores[0] == pytest.approx(scores[1], abs=0.01)


def test_resume_is_exact(tastes: Path, tmp_path: Path, pytorch_python: Path, whole: Path) -> None:
    expected = losses(whole)
    # The same run, stopped in the middle of an epoch and resumed, by hand as in a container.
    output = tmp_path / "stopped"
    output.mkdir()
    command = [
        str(pytorch_python), "-m", "benchmarks.ncf.pytorch.train", "--config",
        str(whole.parent / "config.json"), "--data", str(tastes), "--output", str(output),
    ]  # fmt: skip
    variables = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    child = subprocess.Popen(command, cwd=paths.ROOT, env=variables)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and child.poll() is None:
        metrics = output / "metrics.jsonl"
        if metrics.exists() and len(metrics.read_text().splitlines()) > 20:
            child.send_signal(signal.SIGTERM)
            break
        time.sleep(0.01)
    assert child.wait(timeout=PATIENCE) == 0
    assert records(output / "metrics.jsonl", "end")[0]["outcome"] == "interrupted"
    assert 0 < len(losses(output / "metrics.jsonl")) < len(expected)
    subprocess.run(command, cwd=paths.ROOT, env=variables, check=True)
    assert losses(output / "metrics.jsonl") == expected
    assert evaluations(output / "metrics.jsonl") == evaluations(whole)


# -- data ---------------------------------------------------------------------------------------------

RATINGS = [(user, item, 4, 1000 + 10 * user + item) for user in range(1, 7) for item in range(user, user + 5)]


def prepare(source: Path, to: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.ncf.prepare", str(source), "-o", str(to), *more]
    return subprocess.run(command, capture_output=True, text=True, cwd=paths.ROOT, check=False)


def rows(separator: str, ratings: Sequence[tuple[object, ...]] = RATINGS) -> str:
    return "".join(separator.join(map(str, row)) + "\n" for row in ratings)


def test_the_three_formats_of_movielens_are_read_alike(tmp_path: Path) -> None:
    sources = {
        "ratings.csv": "userId,movieId,rating,timestamp\n" + rows(","),
        "ratings.dat": rows("::"),
        "u.data": rows("\t"),
    }
    found = set()
    for name, text in sources.items():
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_text(text)
        done = prepare(folder, tmp_path / f"set_{name}", "--name", "mine")
        assert done.returncode == 0, done.stderr
        found.add(data.read_passport(tmp_path / f"set_{name}").id)
    archive = tmp_path / "ml-mine.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ml-mine/ratings.csv", sources["ratings.csv"])
    assert prepare(archive, tmp_path / "set_zip", "--name", "mine").returncode == 0
    found.add(data.read_passport(tmp_path / "set_zip").id)
    assert len(found) == 1
    passport = data.read_passport(tmp_path / "set_zip")
    assert passport.counts == {"train": 24, "test": 6}
    assert data.check_data(tmp_path / "set_zip", "ncf") == passport


def change_ids(prefix: str) -> list[tuple[object, ...]]:
    """RATINGS with other ids in the same order."""
    return [(f"{prefix}{user:02}", f"{prefix}{item:02}", *rest) for user, item, *rest in RATINGS]


def test_what_does_not_matter_in_a_file_of_ratings(tmp_path: Path) -> None:
    header = "userId,movieId,rating,timestamp\n"
    swapped = "".join(f"{item},{user},{time},{stars}\n" for user, item, stars, time in RATINGS)
    quoted = "".join(f'"{user}","{item}","{stars}","{time}"\r\n' for user, item, stars, time in RATINGS)
    more = "".join(f'{n},{user},{item},{stars},{time},"a, b"\n' for n, (user, item, stars, time) in enumerate(RATINGS))
    sources = {
        "plain": header + rows(","),
        "no header": rows(","),
        "another order": "movieId,userId,timestamp,rating\n" + swapped,
        "byte order mark": "\ufeff" + header + rows(","),
        "quotes and Windows' line ends": header + quoted,
        "more columns": "n,user_id,ITEM_ID,rating,timestamp,note\n" + more,
        "blank lines": "\n" + header + "\n" + rows(",") + "\n\n",
        "leading zeros": header + rows(",", change_ids("0")),
        "ids above 2**53": header + rows(",", change_ids("900719925474099")),
        "ids of text": header + rows(",", change_ids("film-")),
        "any positive scale": header + rows(",", [(user, item, 100, time) for user, item, _, time in RATINGS]),
    }
    found = {}
    for name, text in sources.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "ratings.csv").write_bytes(text.encode())
        done = prepare(folder, tmp_path / f"{name} set", "--name", "mine")
        assert done.returncode == 0, (name, done.stderr)
        found[name] = data.read_passport(tmp_path / f"{name} set").id
    assert len(set(found.values())) == 1, found


def write_ratings(folder: Path, ratings: list[tuple[object, ...]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "ratings.dat").write_text("".join("::".join(map(str, row)) + "\n" for row in ratings))
    return folder


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: [*rows[:-1], "6::10::4"], "line 30: '6::10::4'"),
        (lambda rows: [*rows, "-7::1::4::99"], "line 31: '-7::1::4::99'"),
        (lambda rows: [*rows, "1::1::4::99"], "line 31: user 1 rates item 1 again, as in line 1"),
        (lambda rows: [*rows, "9::1::4::99"], "1 users with a single rating, the first is user 9 in line 31"),
        (lambda rows: [*rows, *(f"9::{item}::4::{item}" for item in range(1, 11))], "user 9 has met all 10 items"),
        (lambda rows: [*rows[:5], "1::77::4::9::5", "1::78::4", *rows[5:]], "line 7: '1::78::4'"),
        (lambda rows: [*rows, "2::99::nan::99"], "line 31: '2::99::nan::99'"),
        (lambda rows: [*rows, "2::99::inf::99"], "line 31: '2::99::inf::99'"),
        (lambda rows: [*rows, "2::99::4::nan"], "line 31: '2::99::4::nan'"),
        (lambda rows: [*rows, "2::99::-1::99"], "line 31: '2::99::-1::99'"),
        (lambda rows: [*rows, "::99::4::99"], "line 31: '::99::4::99'"),
        (lambda rows: ["userId::movieId::timestamp", *rows], "no column rating in its header"),
        (lambda rows: ["nothing here"], "begins with 'nothing here"),
        (lambda rows: ["1::2::3::2024-05-01"], "number the lines in a column timestamp"),
        (lambda rows: ["user::item::rating", "1::2::3"], "number the lines in a column timestamp"),
    ],
)  # fmt: skip
def test_bad_ratings(tmp_path: Path, change: Callable[[list[str]], list[str]], told: str) -> None:
    (tmp_path / "raw").mkdir()
    lines = change(rows("::").splitlines())
    (tmp_path / "raw" / "ratings.dat").write_text("\n".join(lines) + "\n")
    done = prepare(tmp_path / "raw", tmp_path / "to", "--name", "mine")
    assert done.returncode == 2
    assert told in done.stderr
    assert "hint:" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "to" / "dataset.json").exists()


def test_a_release_must_be_whole(tmp_path: Path) -> None:
    for folder, name, told in (
        ("ml-20m", None, "20,000,263 ratings of 138,493 users on 26,744 items, as ml-20m has"),
        ("other", "ml-1m", "1,000,209 ratings of 6,040 users on 3,706 items, as ml-1m has"),
        ("other", None, "no known release of MovieLens"),
    ):
        source = tmp_path / folder
        if not source.exists():
            write_ratings(source, list(RATINGS))
        done = prepare(source, tmp_path / "to", *(("--name", name) if name else ()))
        assert done.returncode == 2
        assert "30 ratings of 6 users on 10 items" in done.stderr
        assert told in done.stderr


def write_paper_files(folder: Path) -> Path:
    folder.mkdir()
    (folder / "x.train.rating").write_text("0\t1\t5\t9\n0\t2\t5\t9\n1\t0\t5\t9\n1\t3\t5\t9\n")
    (folder / "x.test.rating").write_text("0\t3\t5\t9\n1\t4\t5\t9\n")
    (folder / "x.test.negative").write_text("(0,3)\t0\t4\t5\n(1,4)\t1\t2\t5\n")
    return folder


def test_the_papers_files(tmp_path: Path) -> None:
    done = prepare(write_paper_files(tmp_path / "raw"), tmp_path / "to")
    assert done.returncode == 0, done.stderr
    assert "1 of 6 items are held out and never trained on (the first is 4)" in done.stderr
    passport = data.read_passport(tmp_path / "to")
    assert (passport.name, passport.counts) == ("x", {"train": 4, "test": 2})


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("x.test.rating", "0\t3\n0\t4\n", "lists user 0 2 times"),
        ("x.test.rating", "1\t3\n2\t4\n", "does not list the users 0, 1, 2 ... in order"),
        ("x.test.rating", "0\t3\n1\t-4\n", "line 2: '1\\t-4'"),
        ("x.train.rating", "0\t1\n1\t0\n0\t1\n", "line 3: user 0 with item 1, as in line 1"),
        ("x.train.rating", "0\t1\n1\t4294967297\n", "line 2: '1\\t4294967297'"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,4)\t1\t2\t4294967297\n", "line 2 does not fit"),
        ("x.train.rating", "0\t1\n7\t1\n", "has user 7"),
        ("x.train.rating", "0\t3\n1\t1\n", "trains on 1 of the held-out pairs"),
        ("x.train.rating", "0 1\n", "user TAB item"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n", "has 1 lines"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,3)\t1\t2\t5\n", "line 2 does not fit"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,4)\t1\t2\n", "line 2 does not fit"),
    ],
)
def test_bad_files_of_the_paper(tmp_path: Path, file: str, text: str, told: str) -> None:
    folder = write_paper_files(tmp_path / "raw")
    (folder / file).write_text(text)
    done = prepare(folder, tmp_path / "to")
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr and "Traceback" not in done.stderr


def test_a_changed_data_set_is_refused_before_the_start(encore: Encore, pytorch_python: Path, tmp_path: Path) -> None:
    prepare(write_paper_files(tmp_path / "raw"), tmp_path / "to")
    with (tmp_path / "to" / "test_negatives.npy").open("ab") as file:
        file.write(b"more")
    with pytest.raises(EncoreError, match="has changed"):
        data.check_data(tmp_path / "to", "ncf")
    done = encore("run", "ncf", "1", "--data", str(tmp_path / "to"), "--results", str(tmp_path / "results"))
    assert done.returncode == 2
    assert "has changed" in done.stderr
    (problem,) = data.verify("ncf", tmp_path / "to", pytorch_python)
    assert "bytes" in problem.found
