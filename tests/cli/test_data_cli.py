"""``encore data``: the host side of preparing, verifying and listing."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.common.data import passport
from encore import data
from encore.cli import data as data_cli
from encore.errors import EncoreError, ExitCode


@pytest.fixture
def app(mxnet_python, monkeypatch) -> typer.Typer:
    """The command line with nothing but ``data``, in an environment that is there already."""
    module = types.ModuleType("encore.environment")
    module.ensure_environment = lambda framework: mxnet_python
    monkeypatch.setitem(sys.modules, "encore.environment", module)
    app = typer.Typer()
    data_cli.register(app)
    return app


def run(app: typer.Typer, *words: object):
    return CliRunner().invoke(app, ["data", *map(str, words)])


@pytest.fixture(scope="module")
def digits(tmp_path_factory, mxnet_python) -> Path:
    """The small set, prepared by the host side's own function."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    updates: list[data.Update] = []
    passport = data.prepare("resnet", folder, data.Preparation(), mxnet_python, updates.append)
    assert passport.counts == {"train": 1500, "val": 297}
    assert {"convert", "join"} <= {update.phase for update in updates}
    return folder


def test_prepare_then_verify_by_the_command_line(app, tmp_path):
    done = run(app, "prepare", "resnet", "--to", tmp_path / "d")
    assert done.exit_code == 0, done.output
    assert "digits, 1,500 train, 297 val, 10 classes" in done.output
    assert "convert: 1,797 of 1,797 images" in done.output
    again = run(app, "prepare", "resnet", "--to", tmp_path / "d")
    assert "nothing to do" in again.output
    for how in ("--quick", "--full"):
        done = run(app, "verify", "resnet", tmp_path / "d", how)
        assert done.exit_code == 0
        assert "is whole" in done.output
    (tmp_path / "d" / "val.rec").write_bytes(b"")
    done = run(app, "verify", "resnet", tmp_path / "d")
    assert done.exit_code == ExitCode.REFUSED
    assert "val.rec has 0 bytes" in done.output
    assert "--overwrite" in done.output


def test_verify_as_json_is_nothing_but_json(app, digits, tmp_path):
    done = run(app, "verify", "resnet", digits, "--json")
    assert json.loads(done.stdout) == {"directory": str(digits), "whole": True, "findings": []}
    done = run(app, "verify", "resnet", tmp_path / "nowhere", "--json")
    assert done.exit_code == ExitCode.REFUSED
    assert json.loads(done.stdout)["findings"][0]["found"].startswith("no folder")


def test_a_dry_run_prints_the_command_and_does_nothing(app, tmp_path):
    words = ["--from", "raw images", "--to", tmp_path / "d", "--resize", 480, "--quality", 95]
    done = run(app, "prepare", "resnet", *words, "--workers", 4, "--skip-corrupt", "--dry-run")
    assert shlex.split(done.output) == [
        *("python", "-m", "benchmarks.resnet.prepare", "--to", str(tmp_path / "d")),
        *("--from", str(Path.cwd() / "raw images"), "--workers", "4"),
        *("--resize", "480", "--quality", "95", "--skip-corrupt"),
    ]
    assert not (tmp_path / "d").exists()


def test_a_benchmark_judges_its_own_options(app, tmp_path):
    done = run(app, "prepare", "dlrm", "--index-limit", 9, "--frequency-threshold", 3, "--dry-run")
    assert shlex.split(done.output)[-4:] == ["--index-limit", "9", "--frequency-threshold", "3"]
    for words, found in (
        (("ncf", "--resize", 256), "unrecognized arguments: --resize 256"),
        (("resnet-pytorch", "--index-limit", 9), "unrecognized arguments: --index-limit 9"),
        (("resnet", "--quality", 101), "argument --quality: 101 is not from 1 to 100"),
        (("dlrm", "more"), "unrecognized arguments: more"),
    ):
        done = run(app, "prepare", *words, "--to", tmp_path / "d", "--dry-run")
        assert isinstance(done.exception, EncoreError)
        assert done.exception.found == found
        assert done.exception.exit_code is ExitCode.REFUSED
        assert done.exception.remedy.startswith("encore data prepare ")
    assert "the options of dlrm: --to" in done.exception.expected


def test_help_on_a_benchmark_ends_with_its_own_options(app):
    own = {"resnet": "--resize", "resnet-tensorflow": "--resize", "dlrm": "--index-limit"}
    for benchmark in (*own, "ncf"):
        done = run(app, "prepare", benchmark, "--help")
        assert done.exit_code == 0
        assert "--overwrite" in done.output
        for option in own.values():
            assert (option in done.output) == (own.get(benchmark) == option)


def test_an_unknown_benchmark_is_refused_with_the_nearest_name(app):
    done = run(app, "prepare", "resnt")
    assert isinstance(done.exception, EncoreError)
    assert "did you mean 'resnet'?" in str(done.exception)


def test_list_shows_what_is_there(app, digits, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "default_directory", lambda benchmark: tmp_path / "data" / benchmark)
    assert "no such folder" in run(app, "list").output
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "resnet").symlink_to(digits)
    done = run(app, "list")
    assert "1,500 train, 297 val" in done.output
    assert "ready" in done.output


def test_list_shows_a_shared_set_under_all_that_read_it(app, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "default_directory", lambda benchmark: tmp_path / benchmark)
    splits = {name: {"count": 1, "files": []} for name in ("train", "val")}
    content = {"benchmark": "ssd", "name": "scenes", "classes": [], "splits": splits, "facts": {}, "how": {}}
    (tmp_path / "ssd").mkdir()
    passport.write({**content, "shared_with": ["ssd", "maskrcnn"]}, tmp_path / "ssd")
    lines = [line.split() for line in run(app, "list").output.splitlines()]
    assert [words[0] for words in lines if f"{tmp_path / 'ssd'}:" in words] == ["maskrcnn", "ssd"]


def test_an_error_of_the_child_comes_back_in_its_three_parts(tmp_path, mxnet_python):
    wanted = data.Preparation(source=tmp_path / "nowhere")
    with pytest.raises(EncoreError) as caught:
        data.prepare("resnet", tmp_path / "d", wanted, mxnet_python)
    assert caught.value.found == f"{tmp_path / 'nowhere'} does not exist"
    assert caught.value.expected
    assert caught.value.remedy
    assert caught.value.exit_code is ExitCode.REFUSED


@pytest.mark.parametrize(
    ("script", "code", "expected"),
    [
        ("import sys; sys.exit('the last words')", ExitCode.FAILED, "the last words"),
        ("import os; os.kill(os.getpid(), 9)", ExitCode.FAILED, "signal 9"),
        (
            'print(\'{"error": {"found": "f", "expected": "", "remedy": "r"}}\'); raise SystemExit(130)',
            ExitCode.INTERRUPTED,
            "f",
        ),
    ],
)
def test_a_child_that_breaks_is_an_error_with_its_last_words(script, code, expected):
    problems = data.follow([sys.executable, "-c", script], lambda update: None)
    assert [problem.exit_code for problem in problems] == [code]
    assert expected in problems[0].found


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
    assert caught.value.exit_code is ExitCode.INTERRUPTED
    assert (tmp_path / "stopped").exists()


def test_a_python_of_the_users_prepares_and_verifies(app, tmp_path, pytorch_python):
    done = run(app, "prepare", "ncf", "--to", tmp_path / "d", "--python", pytorch_python)
    assert done.exit_code == 0, done.output
    done = run(app, "verify", "ncf", tmp_path / "d", "--python", pytorch_python)
    assert (done.exit_code, "is whole" in done.output) == (0, True), done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--python", sys.executable), "cannot import torch"),
        (("--python", "/none"), "no Python /none"),
        (("--python", sys.executable, "--runtime", "docker"), "--python with --runtime docker"),
    ],
)
def test_a_python_that_does_not_do_is_refused(app, tmp_path, arguments, message):
    done = run(app, "prepare", "ncf", "--to", tmp_path / "d", *arguments)
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
    assert expected in caught.value.found
    assert caught.value.remedy
    assert "BENCHMARK" not in caught.value.remedy
    assert caught.value.exit_code is ExitCode.REFUSED


def test_a_mistyped_data_folder_is_not_to_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(EncoreError) as caught:
        data.check_data(tmp_path / "mistyped", "ncf")
    assert "prepare" not in caught.value.remedy
    with pytest.raises(EncoreError) as caught:
        data.check_data(tmp_path, "ncf")
    assert f"--to {tmp_path}" not in caught.value.remedy
