"""``encore data``: the host side of preparing, verifying and listing."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.common.data import passport
from encore import data, paths
from encore.cli.app import app
from encore.containers import runtimes
from encore.containers.engines import Engine
from encore.errors import EncoreError, ExitCode


def run(*words: object):
    return CliRunner().invoke(app, ["data", *map(str, words)])


@pytest.fixture(scope="module")
def digits(tmp_path_factory, mxnet_python) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    updates: list[data.Update] = []
    passport = data.prepare("resnet", folder, data.Preparation(), mxnet_python, updates.append)
    assert passport.counts == {"train": 1500, "val": 297}
    assert {"convert", "join"} <= {update.phase for update in updates}
    return folder


def test_prepare_then_verify_by_the_command_line(mxnet_python, tmp_path):
    place = tmp_path / "d"
    steps = [
        (("prepare", "resnet", "-o", place), 0, "digits, 1,500 train, 297 val, 10 classes"),
        (("prepare", "resnet", "-o", place), 0, "nothing to do"),
        (("verify", "resnet", place, "--quick"), 0, "is whole"),
        (("verify", "resnet", place), 0, "is whole"),
        (("verify", "resnet", place), 2, "val.rec has 0 bytes"),
    ]
    for number, (words, code, expected) in enumerate(steps, 1):
        if number == len(steps):
            (place / "val.rec").write_bytes(b"")
        done = run(*words)
        assert (done.exit_code, expected in done.output) == (code, True), done.output
    assert "--overwrite" in done.output


def test_verify_as_json_is_nothing_but_json(digits, tmp_path):
    done = run("verify", "resnet", digits, "--json")
    assert json.loads(done.stdout) == {
        "benchmark": "resnet", "directory": str(digits), "whole": True, "findings": []
    }  # fmt: skip
    done = run("verify", "resnet", tmp_path / "nowhere", "--json")
    assert done.exit_code == ExitCode.REFUSED
    assert json.loads(done.stdout)["findings"][0]["found"].startswith("no folder")


def test_a_dry_run_prints_the_command_and_does_nothing(tmp_path):
    words = ["raw images", "-o", tmp_path / "d", "--resize", 480, "--quality", 95]
    done = run("prepare", "resnet", *words, "--workers", 4, "--skip-corrupt", "--dry-run")
    assert shlex.split(done.output) == [
        *("python", "-m", "benchmarks.resnet.prepare", str(Path.cwd() / "raw images")),
        *("-o", str(tmp_path / "d"), "--workers", "4"),
        *("--resize", "480", "--quality", "95", "--skip-corrupt"),
    ]
    assert not (tmp_path / "d").exists()


def test_paths_in_a_benchmarks_own_options_are_those_of_the_caller(tmp_path, monkeypatch):
    # The child runs in the project's root, and a container sees what is mounted.
    monkeypatch.chdir(tmp_path)
    for name in ("raw", "480"):
        Path(name).mkdir()
    Path("vocab.txt").write_text("[PAD]")
    done = run("prepare", "bert", "raw", "--vocabulary", "vocab.txt", "--evaluation", "later", "--dry-run")
    assert shlex.split(done.output)[-4:] == ["--vocabulary", str(tmp_path / "vocab.txt"), "--evaluation", "later"]
    wanted = data.Preparation(source=Path("raw"), options=("--vocabulary", "vocab.txt", "--length", "480"))
    target = replace(runtimes.ON_HOST, runtime="docker", image="bert", engine=Engine(name="docker", program="docker"))
    argv = runtimes.preparation(target, "bert", tmp_path / "out", wanted).argv
    mounted = [word for word in argv if str(tmp_path / "vocab.txt") in word and word.endswith("readonly")]
    assert len(mounted) == 1 and not any(str(tmp_path / "480") in word for word in argv)


def test_a_benchmark_judges_its_own_options(tmp_path):
    done = run("prepare", "dlrm", "--index-limit", 9, "--frequency-threshold", 3, "--dry-run")
    assert shlex.split(done.output)[-4:] == ["--index-limit", "9", "--frequency-threshold", "3"]
    for words, found in (
        (("ncf", "--resize", 256), "unrecognized arguments: --resize"),
        (("resnet-pytorch", "--index-limit", 9), "unrecognized arguments: --index-limit"),
        (("resnet", "--quality", 101), "argument --quality: 101 is not from 1 to 100"),
        (("dlrm", "raw", "more"), "unrecognized arguments: more"),
    ):
        done = run("prepare", *words, "-o", tmp_path / "d", "--dry-run")
        assert isinstance(done.exception, EncoreError)
        assert (done.exception.found, done.exception.exit_code) == (found, ExitCode.REFUSED)
        assert done.exception.hint.startswith("encore data prepare ")
    assert "the options of dlrm: --output" in done.exception.expected


def test_help_on_a_benchmark_ends_with_its_own_options():
    own = {"resnet": "--resize", "resnet-tensorflow": "--resize", "dlrm": "--index-limit"}
    for benchmark in (*own, "ncf"):
        done = run("prepare", benchmark, "--help")
        assert {each for each in (*own.values(), "--overwrite") if each in done.output} == {
            "--overwrite",
            own.get(benchmark, "--overwrite"),
        }


def test_list_shows_what_is_there(digits, monkeypatch, tmp_path):
    # A data set is listed under every benchmark that reads it
    monkeypatch.setattr(paths, "default_data", lambda benchmark: tmp_path / benchmark)
    (tmp_path / "resnet").symlink_to(digits)
    splits = {name: {"count": 1, "files": []} for name in ("train", "val")}
    content = {"benchmark": "ssd", "name": "scenes", "classes": [], "splits": splits, "facts": {}, "how": {}}
    (tmp_path / "ssd").mkdir()
    passport.write({**content, "shared_with": ["ssd", "maskrcnn"]}, tmp_path / "ssd")
    output = run("verify").output
    assert f"resnet      {tmp_path / 'resnet'}: ready: digits, 1,500 train, 297 val" in output
    assert f"ncf         there is no data set in {tmp_path / 'ncf'}: no such folder" in output
    lines = [line.split() for line in output.splitlines()]
    assert [words[0] for words in lines if f"{tmp_path / 'ssd'}:" in words] == ["maskrcnn", "ssd"]
    assert run("verify").exit_code == 0, "what is not there is not damaged"
    (tmp_path / "ssd" / "dataset.json").write_text("{}")
    assert (run("verify").exit_code, run("verify", "--json").exit_code) == (ExitCode.REFUSED, ExitCode.REFUSED)


def test_an_error_of_the_child_comes_back_in_its_three_parts(tmp_path, mxnet_python):
    wanted = data.Preparation(source=tmp_path / "nowhere")
    with pytest.raises(EncoreError) as caught:
        data.prepare("resnet", tmp_path / "d", wanted, mxnet_python)
    error = caught.value
    assert (error.found, error.exit_code) == (f"{tmp_path / 'nowhere'} does not exist", ExitCode.REFUSED)
    assert error.expected and error.hint


@pytest.mark.parametrize(
    ("script", "code", "expected"),
    [
        ("import sys; sys.exit('the last words')", ExitCode.FAILED, "the last words"),
        ("import os; os.kill(os.getpid(), 9)", ExitCode.FAILED, "signal 9"),
        (
            'print(\'{"error": {"found": "f", "expected": "", "hint": "r"}}\'); raise SystemExit(130)',
            ExitCode.INTERRUPTED,
            "f",
        ),
    ],
)
def test_a_child_that_breaks_is_an_error_with_its_last_words(script, code, expected):
    problems = data.follow([sys.executable, "-c", script], lambda update: None)
    assert [problem.exit_code for problem in problems] == [code] and expected in problems[0].found


def test_an_interrupt_stops_the_child(tmp_path):
    script = (
        "import pathlib, sys, time\n"
        # The interrupt may come as soon as the line is out, so the line is inside what catches it.
        'try:\n    print(\'{"note": "begun"}\', flush=True)\n    time.sleep(60)\n'
        f"except KeyboardInterrupt:\n    pathlib.Path({str(tmp_path / 'stopped')!r}).touch()\n"
    )

    def interrupt(update: data.Update) -> None:
        raise KeyboardInterrupt

    with pytest.raises(EncoreError, match="interrupted") as caught:
        data.follow([sys.executable, "-c", script], interrupt)
    assert caught.value.exit_code is ExitCode.INTERRUPTED and (tmp_path / "stopped").exists()


def test_a_python_of_the_users_prepares_and_verifies(tmp_path, pytorch_python):
    done = run("prepare", "ncf", "-o", tmp_path / "d", "--python", pytorch_python)
    assert done.exit_code == 0, done.output
    done = run("verify", "ncf", tmp_path / "d", "--python", pytorch_python)
    assert (done.exit_code, "is whole" in done.output) == (0, True), done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--python", sys.executable), "cannot import torch"),
        (("--python", "/none"), "no Python /none"),
        (("--python", sys.executable, "--runtime", "docker"), "--python with --runtime docker"),
    ],
)
def test_a_python_that_does_not_do_is_refused(tmp_path, arguments, message):
    done = run("prepare", "ncf", "-o", tmp_path / "d", *arguments)
    assert isinstance(done.exception, EncoreError) and message in str(done.exception)
    assert not (tmp_path / "d").exists()


def test_a_python_that_is_not_there(tmp_path):
    with pytest.raises(EncoreError, match="does not start"):
        data.prepare("resnet", tmp_path, data.Preparation(), tmp_path / "python")


# -- the look before a run ----------------------------------------------------------------------------


def copy_of(digits: Path, folder: Path) -> Path:
    subprocess.run(["cp", "-r", str(digits), str(folder)], check=True)
    return folder


def test_a_whole_data_set_passes(digits):
    passport = data.check_data(digits, "resnet")
    assert (passport.name, passport.classes, len(passport.id)) == ("digits", 10, 64)
    assert passport.bytes == sum(path.stat().st_size for path in digits.glob("*.[ri]*"))


def edit(folder: Path, **changes: object) -> None:
    facts = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**facts, **changes}))


def half(folder: Path) -> None:
    (folder / "dataset.json").unlink()
    (folder / "parts").mkdir()


DAMAGES = {
    "missing": (lambda folder: subprocess.run(["rm", "-r", str(folder)], check=True), "no such folder"),
    "half-written": (half, "is half-written"),
    "no passport": (lambda folder: (folder / "dataset.json").unlink(), "holds no prepared data set"),
    "damaged": (lambda folder: (folder / "dataset.json").write_text("{"), "is damaged"),
    "fields": (lambda folder: edit(folder, splits=[1]), "is damaged"),
    "schema": (lambda folder: edit(folder, schema=7), "has schema 7"),
    "other": (lambda folder: edit(folder, benchmark="ssd"), "holds the data set digits of ssd"),
    "short": (lambda folder: (folder / "val.rec").write_bytes(b"1"), "has changed: 1 bytes"),
    "gone": (lambda folder: (folder / "train.idx").unlink(), "train.idx: No such file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_data_set_that_cannot_be_used_is_refused(digits, tmp_path, damage):
    folder = copy_of(digits, tmp_path / "copy")
    change, expected = DAMAGES[damage]
    change(folder)
    with pytest.raises(EncoreError) as caught:
        data.check_data(folder, "resnet")
    assert expected in caught.value.found and caught.value.hint and "BENCHMARK" not in caught.value.hint


def test_a_mistyped_data_folder_is_not_to_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(EncoreError) as caught:
        data.check_data(tmp_path / "mistyped", "ncf")
    assert "prepare" not in caught.value.hint
    with pytest.raises(EncoreError) as caught:
        data.check_data(tmp_path, "ncf")
    assert f"-o {tmp_path}" not in caught.value.hint
