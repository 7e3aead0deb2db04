"""NCF: whole runs on tiny data, sources and bad input; its network and sampler are in tests/in_framework/pytorch."""

import contextlib
import json
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.ncf.pytorch.config import Config
from encore import data
from encore.errors import EncoreError
from encore.results.compliance.compliance import check
from tests import preparing
from tests.conftest import Encore, evaluations, losses, only_run, quality, records
from tests.trainings import BareRuns, assert_resumed, bare_runs, recorded, steps_so_far, write_small_config

# Three epochs of 15 steps; each evaluation takes many batches, so that a signal may come within one.
SMALL = ("layers=[32,16,8]", "factors=8", "stop_at_target=false", "epochs=3", "eval_batch_size=16384")
STEPS = 45


@pytest.fixture(scope="session")
def tastes(pytorch_python: Path, toy: Callable[[str], Path]) -> Path:
    return toy("ncf")


# -- whole runs ---------------------------------------------------------------------------------------


def test_two_ranks_reach_the_target_and_the_log_passes(encore: Encore, tastes: Path, tmp_path: Path) -> None:
    done = encore("run", "ncf", "2", "--data", str(tastes), "--results", str(tmp_path), "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = only_run(tmp_path)
    recorded(folder / "experiment_0")
    report = check(folder / "result_0.txt")
    assert report.ruleset == "0.5.0"
    errors = [each for each in report.findings if each.severity == "error" and each.kind != "small_data"]
    assert errors == []
    assert {each.kind for each in report.findings if each.severity == "error"} == {"small_data"}
    assert records(folder / "experiment_0" / "metrics.jsonl", "end")[0]["outcome"] == "reached"


def write_config(path: Path, ranks: int, *settings: str) -> Path:
    # config.json of the small system, of a tenth of its width, with a fixed seed.
    return write_small_config(path, "ncf", ranks, (*SMALL, *settings))


runs = bare_runs("benchmarks.ncf.pytorch.train", "tastes", write_config)


def test_ranks_agree(runs: BareRuns) -> None:
    metrics = [runs.uninterrupted(ranks) / "metrics.jsonl" for ranks in (1, 2)]
    one, two = map(losses, metrics)
    assert len(one) == len(two) == STEPS
    # The same pairs in the same steps: only the order of the sums differs.
    assert two == pytest.approx(one, rel=1e-4)
    scores = [[quality(each) for each in evaluations(path)] for path in metrics]
    assert scores[1] == pytest.approx(scores[0], abs=0.01)


def test_resume_in_the_middle_of_an_epoch_is_exact(runs: BareRuns, tmp_path: Path) -> None:
    output = tmp_path / "stopped"
    metrics = output / "metrics.jsonl"
    runs.stop(output, 1, once=lambda: steps_so_far(metrics) >= STEPS // 3 + 2)
    assert 0 < len(losses(metrics)) < STEPS
    assert_resumed(runs.end(output, 1), runs.uninterrupted(1))


# -- data ---------------------------------------------------------------------------------------------

RATINGS = [(user, item, 4, 1000 + 10 * user + item) for user in range(1, 7) for item in range(user, user + 5)]
HEADER = "userId,movieId,rating,timestamp\n"
prepare = partial(preparing.here, "ncf")


def rows(separator: str, ratings: Sequence[tuple[object, ...]] = RATINGS) -> str:
    return "".join(separator.join(map(str, row)) + "\n" for row in ratings)


def change_ids(prefix: str) -> str:
    # RATINGS with other ids in the same order.
    return rows(",", [(f"{prefix}{user:02}", f"{prefix}{item:02}", *rest) for user, item, *rest in RATINGS])


SWAPPED = "".join(f"{item},{user},{time},{stars}\n" for user, item, stars, time in RATINGS)
QUOTED = "".join(f'"{user}","{item}","{stars}","{time}"\r\n' for user, item, stars, time in RATINGS)
MORE = "".join(f'{n},{user},{item},{stars},{time},"a, b"\n' for n, (user, item, stars, time) in enumerate(RATINGS))
SAME = {
    "plain": ("ratings.csv", HEADER + rows(",")),
    "ml-1m's": ("ratings.dat", rows("::")),
    "ml-100k's": ("u.data", rows("\t")),
    "no header": ("ratings.csv", rows(",")),
    "another order": ("ratings.csv", "movieId,userId,timestamp,rating\n" + SWAPPED),
    "byte order mark": ("ratings.csv", "\ufeff" + HEADER + rows(",")),
    "quotes and Windows' line ends": ("ratings.csv", HEADER + QUOTED),
    "more columns": ("ratings.csv", "n,user_id,ITEM_ID,rating,timestamp,note\n" + MORE),
    "blank lines": ("ratings.csv", "\n" + HEADER + "\n" + rows(",") + "\n\n"),
    "leading zeros": ("ratings.csv", HEADER + change_ids("0")),
    "ids above 2**53": ("ratings.csv", HEADER + change_ids("900719925474099")),
    "ids of text": ("ratings.csv", HEADER + change_ids("film-")),
    "any positive scale": ("ratings.csv", HEADER + rows(",", [(u, i, 100, time) for u, i, _, time in RATINGS])),
}


def test_what_does_not_matter_in_a_file_of_ratings(tmp_path: Path) -> None:
    found = {}
    for name, (file, text) in SAME.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(text.encode())
        prepare(tmp_path / name, "-o", tmp_path / f"{name} set", "--name", "mine")
        found[name] = data.read_passport(tmp_path / f"{name} set").id
    with zipfile.ZipFile(tmp_path / "ml-mine.zip", "w") as archive:
        archive.writestr("ml-mine/ratings.csv", SAME["plain"][1])
    prepare(tmp_path / "ml-mine.zip", "-o", tmp_path / "zip set", "--name", "mine")
    passport = data.read_passport(tmp_path / "zip set")
    assert set(found.values()) == {passport.id}, found
    assert passport.counts == {"train": 24, "test": 6}
    assert data.check_data(tmp_path / "zip set", "ncf") == passport
    arrays = {path.stem: np.load(path) for path in (tmp_path / "zip set").glob("*.npy")}
    # Users rate 5 items in a row, the last of them last in time.
    assert arrays["train_users"].tolist() == [user for user in range(6) for _ in range(4)]
    assert arrays["train_items"].tolist() == [user + number for user in range(6) for number in range(4)]
    assert arrays["test_items"].tolist() == [4, 5, 6, 7, 8, 9]
    for user, negatives in enumerate(arrays["test_negatives"]):
        assert len(negatives) == 999
        assert set(negatives.tolist()) == set(range(10)) - set(range(user, user + 5)), user


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
        (lambda rows: [*rows, "2::99::0::99"], "line 31: '2::99::0::99'"),
        (lambda rows: [*rows, "2::99::inf::99"], "line 31: '2::99::inf::99'"),
        (lambda rows: [*rows, "2::99::4::nan"], "line 31: '2::99::4::nan'"),
        (lambda rows: [*rows, "2::99::4::-1"], "line 31: '2::99::4::-1'"),
        (lambda rows: [*rows, "::99::4::99"], "line 31: '::99::4::99'"),
        (lambda rows: ["userId::movieId::timestamp", *rows], "no column rating in its header"),
        (lambda rows: ["nothing here"], "begins with 'nothing here"),
        (lambda rows: ["1::2::3::2024-05-01"], "number the lines in a column timestamp"),
        (lambda rows: ["user::item::rating", "1::2::3"], "number the lines in a column timestamp"),
    ],
)  # fmt: skip
def test_bad_ratings(tmp_path: Path, change: Callable[[list[str]], list[str]], told: str) -> None:
    lines = change(rows("::").splitlines())
    (tmp_path / "ratings.dat").write_text("\n".join(lines) + "\n")
    said = prepare(tmp_path / "ratings.dat", "-o", tmp_path / "to", "--name", "mine", code=2)
    assert told in said and "hint" in said
    assert not (tmp_path / "to" / "dataset.json").exists()


@pytest.mark.parametrize(
    ("folder", "name", "told"),
    [
        ("ml-20m", (), "20,000,263 ratings of 138,493 users on 26,744 items, as ml-20m has"),
        ("other", ("--name", "ml-1m"), "1,000,209 ratings of 6,040 users on 3,706 items, as ml-1m has"),
        ("other", (), "no known release of MovieLens"),
    ],
)
def test_a_release_must_be_whole(tmp_path: Path, folder: str, name: tuple[str, ...], told: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "ratings.dat").write_text(rows("::"))
    said = prepare(tmp_path / folder, "-o", tmp_path / "to", *name, code=2)
    assert "30 ratings of 6 users on 10 items" in said and told in said


PAPER = {
    "x.train.rating": "0\t1\t5\t9\n0\t2\t5\t9\n1\t0\t5\t9\n1\t3\t5\t9\n",
    "x.test.rating": "0\t3\t5\t9\n1\t4\t5\t9\n",
    "x.test.negative": "(0,3)\t0\t4\t5\n(1,4)\t1\t2\t5\n",
}


def write_paper(folder: Path, **changed: str) -> Path:
    folder.mkdir()
    for name, text in {**PAPER, **changed}.items():
        (folder / name).write_text(text)
    return folder


def test_the_papers_files(tmp_path: Path) -> None:
    said = prepare(write_paper(tmp_path / "raw"), "-o", tmp_path / "to")
    assert "1 of 6 items are held out and never trained on (the first is 4)" in said
    passport = data.read_passport(tmp_path / "to")
    assert (passport.name, passport.counts) == ("x", {"train": 4, "test": 2})
    assert "error" not in prepare("--verify", tmp_path / "to")
    arrays = {path.stem: np.load(path).tolist() for path in (tmp_path / "to").glob("*.npy")}
    assert arrays == {
        "train_users": [0, 0, 1, 1], "train_items": [1, 2, 0, 3], "test_items": [3, 4],
        "test_negatives": [[0, 4, 5], [1, 2, 5]],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("x.test.rating", "0\t3\n0\t4\n", "lists user 0 2 times"),
        ("x.test.rating", "1\t3\n2\t4\n", "does not list the users 0, 1, 2 ... in order"),
        ("x.test.rating", "0\t3\n1\t-4\n", "line 2: '1\\t-4'"),
        ("x.train.rating", "0\t1\n1\t0\n0\t1\n", "line 3: user 0 with item 1, as in line 1"),
        ("x.train.rating", "0\t1\n1\t4294967297\n", "line 2: '1\\t4294967297'"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,4)\t1\t2\t4294967297\n", "line 2 does not fit"),
        ("x.train.rating", "0\t1\n2\t1\n", "has user 2"),
        ("x.train.rating", "0\t3\n1\t1\n", "trains on 1 of the held-out pairs"),
        ("x.train.rating", "0 1\n", "user TAB item"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n", "has 1 lines"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,3)\t1\t2\t5\n", "line 2 does not fit"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,4)\t1\t2\n", "line 2 does not fit"),
    ],
)
def test_bad_files_of_the_paper(tmp_path: Path, file: str, text: str, told: str) -> None:
    said = json.loads(
        prepare(write_paper(tmp_path / "raw", **{file: text}), "-o", tmp_path / "to", code=2).splitlines()[-1]
    )
    assert told in str(said["error"]["found"]) + said["error"]["expected"]


def test_a_changed_data_set_is_refused_before_the_start(encore: Encore, pytorch_python: Path, tmp_path: Path) -> None:
    prepare(write_paper(tmp_path / "raw"), "-o", tmp_path / "to")
    with (tmp_path / "to" / "test_negatives.npy").open("ab") as file:
        file.write(b"more")
    with pytest.raises(EncoreError, match="has changed"):
        data.check_data(tmp_path / "to", "ncf")
    done = encore("run", "ncf", "1", "--data", str(tmp_path / "to"), "--results", str(tmp_path / "results"))
    assert done.returncode == 2
    assert "has changed" in done.stderr
    (problem,) = data.verify("ncf", tmp_path / "to", pytorch_python)
    assert "bytes" in problem.found


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"beta1": 1.0}, "beta1 and beta2"),
        ({"beta2": -0.1}, "beta1 and beta2"),
        ({"beta1": 0.0, "beta2": 0.0, "layers": (2, 1)}, ""),
        ({"layers": (2,)}, "at least two values"),
        ({"layers": (2, 0)}, "at least two values"),
        ({"layers": (3, 2)}, "must be even"),
        ({"precision": "bf16", "factors": 0}, "factors must be at least 1"),
        ({"optimizer_kernel": "apex"}, "device=cpu has no apex"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) if told else contextlib.nullcontext():
        Config(**{"device": "cpu", "precision": "fp32", **changes})
