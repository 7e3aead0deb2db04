"""``encore data``: the host side of preparing, verifying and listing."""

import json
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.common.data import passport
from encore import data, paths
from encore.cli.app import app
from encore.containers import runtimes
from encore.containers.engines import Engine
from encore.errors import EncoreError, ExitCode


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, words)])


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    # A prepared data set that SSD and Mask R-CNN read
    folder, splits = tmp_path / "scenes", {}
    folder.mkdir()
    for name, size in (("train", 12), ("val", 3)):
        (folder / f"{name}.rec").write_bytes(bytes(size))
        file = {"name": f"{name}.rec", "bytes": size, "sha256": "0" * 64}
        splits[name] = {"count": size // 3, "files": [file], "unlisted_bytes": 1000}
    content = {"benchmark": "ssd", "name": "scenes", "classes": ["a", "b"], "splits": splits, "facts": {}, "how": {}}
    passport.write({**content, "shared_with": ["ssd", "maskrcnn"]}, folder)
    return folder


def test_prepare_then_verify_by_the_command_line(mxnet_python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    steps = [
        (("prepare", "resnet", "-o", folder), 0, "digits, 1,500 train, 297 val, 10 classes"),
        (("prepare", "resnet", "-o", folder), 0, "nothing to do"),
        (("verify", "resnet", folder, "--quick"), 0, "is whole"),
        (("verify", "resnet", folder), 0, "is whole"),
        (("verify", "resnet", folder, "--json"), 0, '"whole": true'),
        (("verify", "resnet", folder), 2, "val.rec has 0 bytes"),
        (("verify", "resnet", tmp_path / "none", "--json"), 2, '"found": "no folder'),
    ]
    for number, (words, code, text) in enumerate(steps):
        if number == 5:
            (folder / "val.rec").write_bytes(b"")
        result = run(*words)
        assert (result.exit_code, text in result.output) == (code, True), result.output


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (
            "resnet 'raw images' --resize 480 --quality 95 --workers 4 --skip-corrupt",
            "benchmarks.resnet.prepare HERE/'raw images' -o HERE/out --workers 4 --resize 480 --quality 95 "
            "--skip-corrupt",
        ),
        (
            "dlrm --index-limit 9 --frequency-threshold 3 --name clicks --seed 5 --overwrite",
            "benchmarks.dlrm.prepare -o HERE/out --name clicks --seed 5 --overwrite --index-limit 9 "
            "--frequency-threshold 3",
        ),
        # The preparation runs in the project's root: a relative path of the caller becomes absolute if it exists.
        (
            "bert raw --vocabulary vocab.txt --evaluation later",
            "benchmarks.bert.prepare HERE/raw -o HERE/out --vocabulary HERE/vocab.txt --evaluation later",
        ),
    ],
)
def test_dry_run_prints_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]", encoding="utf-8")
    result = run("prepare", *shlex.split(words), "-o", "out", "--dry-run")
    assert shlex.split(result.output) == shlex.split(f"python -m {arguments}".replace("HERE", str(tmp_path)))
    assert not (tmp_path / "out").exists()


def test_paths_in_options_are_mounted_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("vocab.txt", "480"):
        Path(name).touch()
    preparation = data.Preparation(source=Path("raw"), options=("--vocabulary", "vocab.txt", "--length", "480"))
    target = replace(runtimes.ON_HOST, runtime="docker", image="bert", engine=Engine(name="docker", program="docker"))
    argv = runtimes.preparation(target, "bert", tmp_path / "out", preparation).argv
    read_only = [word for word in argv if str(tmp_path / "vocab.txt") in word and word.endswith("readonly")]
    assert (len(read_only), any(str(tmp_path / "480") in word for word in argv)) == (1, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ncf --resize 256", "unrecognized arguments: --resize"),
        ("resnet-pytorch --index-limit 9", "unrecognized arguments: --index-limit"),
        ("resnet --quality 101", "argument --quality: 101 is not from 1 to 100"),
        ("dlrm raw more", "unrecognized arguments: more"),
    ],
)
def test_invalid_options_of_a_benchmark_are_refused(tmp_path: Path, words: str, message: str) -> None:
    error = run("prepare", *words.split(), "-o", tmp_path / "out", "--dry-run").exception
    assert isinstance(error, EncoreError)
    assert (error.found, error.exit_code) == (message, ExitCode.REFUSED)
    assert error.hint.startswith("encore data prepare ")
    assert ("the options of " in error.expected) == ("unrecognized" in message)


def test_help_lists_the_options_of_the_benchmark() -> None:
    options = {"resnet": {"--resize"}, "resnet-tensorflow": {"--resize"}, "dlrm": {"--index-limit"}, "ncf": set()}
    for benchmark, names in options.items():
        output = run("prepare", benchmark, "--help").output
        assert {name for name in ("--resize", "--index-limit", "--overwrite") if name in output} == {
            "--overwrite",
            *names,
        }


def test_verify_lists_all_data_sets(scenes: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A data set is listed under every benchmark that reads it
    monkeypatch.setattr(paths, "default_data", lambda benchmark: tmp_path / "data" / benchmark)
    (tmp_path / "data").mkdir()
    scenes.rename(tmp_path / "data" / "ssd")
    result = run("verify")
    lines = result.output.splitlines()
    ready = f"{tmp_path / 'data' / 'ssd'}: ready: scenes, 4 train, 1 val, 2 classes, 2.0 kB, id "
    assert [line[:12].strip() for line in lines if ready in line] == ["maskrcnn", "ssd"]
    assert f"ncf         there is no data set in {tmp_path / 'data' / 'ncf'}: no such folder" in lines
    assert result.exit_code == 0, "a missing data set is no damage"
    (tmp_path / "data" / "ssd" / "dataset.json").write_text("{}", encoding="utf-8")
    assert (run("verify").exit_code, run("verify", "--json").exit_code) == (ExitCode.REFUSED, ExitCode.REFUSED)


ERROR = '{"error": {"found": "f", "expected": "", "hint": "r"}}'


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ("import sys; sys.exit('the last line')", ExitCode.FAILED, "ended with exit code 1:\n    the last line"),
        ("import os; os.kill(os.getpid(), 9)", ExitCode.FAILED, "ended with signal 9"),
        (
            'print(\'{"error": {"found": "f", "expected": "", "hint": "r"}}\'); raise SystemExit(130)',
            ExitCode.INTERRUPTED,
            "f",
        ),
        (
            'print(\'{"error": {"found": "f", "expected": "", "hint": "r"}}\'); raise SystemExit(2)',
            ExitCode.REFUSED,
            "f",
        ),
    ],
)
def test_failure_of_the_preparation_is_reported(program: str, code: ExitCode, message: str) -> None:
    problems = data.follow([sys.executable, "-c", program], lambda update: None)
    assert [(problem.exit_code, problem.found[-len(message) :]) for problem in problems] == [(code, message)]


def test_progress_is_passed_on() -> None:
    updates: list[data.Update] = []
    program = 'print(\'{"phase": "join", "done": 3, "total": 4, "unit": "games"}\\n{"note": "n"}\\ntext\')'
    assert data.follow([sys.executable, "-c", program], updates.append) == []
    join = data.Update(phase="join", done=3, total=4, unit="games")
    assert updates == [join, data.Update(note="n"), data.Update(note="text")]


def test_interrupt_stops_the_preparation(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        # The interrupt may arrive as soon as the line is printed, so the line is inside the try block.
        'try:\n    print(\'{"note": "started"}\', flush=True)\n    time.sleep(600)\n'
        f"except KeyboardInterrupt:\n    pathlib.Path({str(tmp_path / 'stopped')!r}).touch()\n"
    )

    def interrupt(update: data.Update) -> None:
        raise KeyboardInterrupt

    with pytest.raises(EncoreError, match="interrupted") as caught:
        data.follow([sys.executable, "-c", program], interrupt)
    assert caught.value.exit_code is ExitCode.INTERRUPTED and (tmp_path / "stopped").exists()


def test_python_option_prepares_and_verifies(tmp_path: Path, pytorch_python: Path) -> None:
    for words in (("prepare", "ncf", "-o", tmp_path / "d"), ("verify", "ncf", tmp_path / "d")):
        result = run(*words, "--python", pytorch_python)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--python", sys.executable), "cannot import torch"),
        (("--python", "/none"), "no Python /none"),
        (("--python", sys.executable, "--runtime", "docker"), "--python with --runtime docker"),
    ],
)
def test_unsuitable_python_is_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("prepare", "ncf", "-o", tmp_path / "d", *arguments)
    assert isinstance(result.exception, EncoreError) and message in str(result.exception)
    assert not (tmp_path / "d").exists()


def test_missing_python_is_reported(tmp_path: Path) -> None:
    with pytest.raises(EncoreError, match="does not start"):
        data.prepare("resnet", tmp_path, data.Preparation(), tmp_path / "python")


# -- the check before a run -----------------------------------------------------------------------------


def test_complete_data_set_passes(scenes: Path) -> None:
    content = data.check_data(scenes, "maskrcnn")
    assert (content.name, content.classes, content.counts) == ("scenes", 2, {"train": 4, "val": 1})
    assert (content.bytes, content.files, len(content.id)) == (2015, {"train.rec": 12, "val.rec": 3}, 64)


def edit(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    (folder / "dataset.json").write_text(json.dumps({**content, **changes}), encoding="utf-8")


DAMAGES = {
    "missing": (shutil.rmtree, "no such folder"),
    "half-written": (lambda folder: (folder / "dataset.json").rename(folder / "parts"), "is half-written"),
    "no passport": (lambda folder: (folder / "dataset.json").unlink(), "holds no prepared data set"),
    "damaged": (lambda folder: (folder / "dataset.json").write_text("{"), "is damaged"),
    "fields": (lambda folder: edit(folder, splits=[1]), "is damaged"),
    "schema": (lambda folder: edit(folder, schema=7), "has schema 7"),
    "other": (lambda folder: edit(folder, benchmark="ncf", shared_with=[]), "holds the data set scenes of ncf"),
    "short": (lambda folder: (folder / "val.rec").write_bytes(b"1"), "has changed: 1 bytes"),
    "gone": (lambda folder: (folder / "train.rec").unlink(), "train.rec: No such file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data_set_is_refused(scenes: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    change(scenes)
    with pytest.raises(EncoreError) as caught:
        data.check_data(scenes, "ssd")
    assert message in caught.value.found and caught.value.hint and "BENCHMARK" not in caught.value.hint


def test_hint_does_not_write_to_a_mistyped_folder(tmp_path: Path) -> None:
    for folder, text in ((tmp_path / "mistyped", "prepare"), (tmp_path, f"-o {tmp_path}")):
        with pytest.raises(EncoreError) as caught:
            data.check_data(folder, "ncf")
        assert text not in caught.value.hint
