"""Wrong names, files and options: every command refuses them with a message before it does anything."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError, ExitCode
from tests.results.result_logs import resnet_v07

FILES = {
    "BINARY": b"\xff\xfe\0",
    "CUT": b'{"step": {',
    "DAMAGED/run.json": b"[",
    "OTHER/study.json": b"{}",
    "NUMBER/study.json": b'{"study": 5}',
    "LOG": resnet_v07().encode(),
    "TREE/a/result_0.txt": resnet_v07().encode(),
    "TREE/b/result_0.txt": resnet_v07().encode(),
}
CASES = {
    # Words in capitals are FILES, and an empty folder.
    "resnt": "unknown command 'resnt'",
    "run resnt 2 --dry-run": "did you mean 'resnet'?",
    "run resnet 2 --cluster BINARY --dry-run": "BINARY is not valid TOML",
    "run resnet 2 --hostfile BINARY --dry-run": "the host file BINARY cannot be read",
    "run resnet 2 --hang-seconds -1 --dry-run": "'--hang-seconds'",
    "run --resume EMPTY --dry-run": "EMPTY is no run folder",
    "run --resume DAMAGED": "DAMAGED/run.json cannot be read",
    "follow DAMAGED": "DAMAGED/run.json cannot be read",
    "cancel DAMAGED": "does not run: damaged",
    "doctor --cluster EMPTY": "--cluster without --slurm",
    "selftest --device tpu": "'tpu' is not one of",
    "images convert resnet --runtime docker": "'docker' is not one of",
    "score BINARY": "no MLPerf log in BINARY",
    "score EMPTY": "no MLPerf log in EMPTY",
    "score EMPTY/none": "there is no EMPTY/none",
    "check EMPTY": "no result log in EMPTY",
    "audit EMPTY": "no MLPerf log in EMPTY",
    "compare BINARY": "no MLPerf log in BINARY",
    "report EMPTY": "no MLPerf log in EMPTY",
    "archive EMPTY -o EMPTY/new": "no MLPerf log in EMPTY",
    "plan 8 resnet --curves BINARY": "BINARY has no column benchmark",
    "sweep resnet --gpus-per-node 1,x": "whole numbers from 1 on",
    "sweep resnet --gpus-per-node 5000 --dry-run": "--gpus-per-node 5000",
    "sweep --resume EMPTY": "EMPTY is no folder of a study",
    "study run nothing": "unknown study 'nothing'",
    "study run multi-gpu --small --point 99 --dry-run": "no point 99",
    "study report CUT CUT": "CUT cannot be read",
    "study report OTHER": "no MLPerf log in OTHER",
    "study report NUMBER": "no MLPerf log in NUMBER",
    "study run EMPTY/grid.txt": "no file EMPTY/grid.txt",
    "study report EMPTY": "no MLPerf log in EMPTY",
    "reproduce EMPTY": "EMPTY has no config_*.sh",
    "reproduce EMPTY --round 9": "there is no round '9'",
    "export EMPTY -o EMPTY/new": "EMPTY is no run folder",
    "serve EMPTY": "EMPTY is no export",
    "serve EMPTY --runtime enroot --dry-run": "'enroot' is not one of",
    "play resnet model": "resnet is no game",
    "published --markdown": "--markdown without --table",
    "published --csv --json": "--json and --csv at once",
    "published --table --markdown --json": "--json and --markdown at once",
    "score BINARY --json --csv": "--json and --csv at once",
    "check BINARY --json --format sarif": "--json and --format sarif at once",
    "published --benchmark resnett": "did you mean 'resnet'",
    "published --submitter nvida": "did you mean 'NVIDIA'",
    "published --submitter nobody": "unknown submitter 'nobody'",
    "published --round v9.9": "name one of these",
    "compare LOG nowhere": "unknown submission 'nowhere'",
    "compare TREE": "TREE holds 2 sets of runs",
    "compare LOG v0.7/NVIDIA/dgxa100_ngc20.06_mxnt": "did you mean 'v0.7/NVIDIA/dgxa100_ngc20.06_mxnet'",
    "compare LOG dgxa100_n2": "did you mean 'v0.7/NVIDIA/dgxa100_n2_ngc20.06_mxnet'",
    "compare LOG v0.7/NVIDIA/dgxa100_ngc20.06_pytorch": "has no result of resnet",
    "report LOG --detections": "has no detections",
    "report --study microway-dgx1": "did you mean 'microway-dgx1-scaling'",
    "published --round 6.1": "no published result of v6.1",
    "check OTHER --ruleset 9.9": "there is no ruleset '9.9'",
}


@pytest.mark.parametrize("command", CASES)
def test_wrong_input_is_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # --cluster sets it, for what the command starts.
    monkeypatch.setenv("ENCORE_CLUSTER", os.environ["ENCORE_CLUSTER"])
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "EMPTY").mkdir()
    names = tuple(each.name for each in tmp_path.iterdir())
    words = [str(tmp_path / word) if word.startswith(names) else word for word in command.split()]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    error = done.exception
    of_user = (error.exit_code, str(error)) if isinstance(error, EncoreError) else None
    code, printed = of_user or (done.exit_code, done.output)
    assert code == ExitCode.REFUSED, repr(error)
    assert CASES[command] in printed.replace(f"{tmp_path}/", "") and not list((tmp_path / "EMPTY").iterdir())
