"""Invalid names, files and options are rejected before any command does anything; omitted columns are named."""

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from encore import paths
from encore.cli import bench, layout
from encore.errors import EncoreError, ExitCode
from tests.command_line import error_of, output_of, run_encore
from tests.results.result_logs import resnet_v07, write_files

FILES = {
    "BINARY": b"\xff\xfe\0",
    "CUT": b'{"step": {',
    "DAMAGED/run.json": b"[",
    "OTHER/study.json": b"{}",
    "NUMBER/study.json": b'{"study": 5}',
    "LOG": resnet_v07().encode(),
    "TREE/a/result_0.txt": resnet_v07().encode(),
    "TREE/b/result_0.txt": resnet_v07().encode(),
    "BROKEN.zip": b"PK\x03\x04 not really",
    "BROKEN.tar.gz": b"no archive" * 100,
    "LONG/config_LONG.sh": b"A" * 2_000_000,
    "PEM": b"-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----\n",
    "UNNAMED": b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 me@lab\n",
    "COMMENT": b"# no key\n",
    "CURVES/column.csv": b"benchmark,gpus\nresnet,1\n",
    "CURVES/zero.csv": b"benchmark,gpus,minutes\nresnet,1,0\n",
    "CURVES/gpus.csv": b"benchmark,gpus,minutes\nresnet,0,1\n",
    "CURVES/word.csv": b"benchmark,gpus,minutes\nresnet,one,5\n",
    "CURVES/nan.csv": b"benchmark,gpus,minutes\nresnet,1,nan\n",
    "CURVES/empty.csv": b"",
}
CASES = {
    # Words in capitals are FILES or an empty folder.
    "resnt": "unknown command 'resnt'",
    "run resnt 2 --dry-run": "did you mean 'resnet'?",
    "run resnet 2 --cluster BINARY --dry-run": "BINARY is not valid TOML",
    "run resnet 2 --hostfile BINARY --dry-run": "the host file BINARY cannot be read",
    "run resnet 2 --hang-seconds -1 --dry-run": "'--hang-seconds'",
    "run --resume EMPTY --dry-run": "EMPTY is not a run folder",
    "run --resume DAMAGED": "DAMAGED/run.json cannot be read",
    "follow DAMAGED": "DAMAGED/run.json cannot be read",
    "cancel DAMAGED": "does not run: damaged",
    "doctor --cluster EMPTY": "--cluster without --slurm",
    "doctor --quick": "without --nodes",
    "selftest --device tpu": "'tpu' is not one of",
    "images convert resnet --runtime docker": "'docker' is not one of",
    "score BINARY": "no MLPerf log in BINARY",
    "score EMPTY": "no MLPerf log in EMPTY",
    "score EMPTY/none": "EMPTY/none does not exist",
    "check EMPTY": "no result log in EMPTY",
    "audit EMPTY": "no MLPerf log in EMPTY",
    "compare BINARY": "no MLPerf log in BINARY",
    "report EMPTY": "no MLPerf log in EMPTY",
    "archive EMPTY -o EMPTY/new": "no MLPerf log in EMPTY",
    "plan 8 resnet --curves BINARY": "BINARY has no column benchmark",
    "data prepare ncf --resize 256 -o EMPTY/new --dry-run": "unrecognized arguments: --resize\n  expected: the options",
    "data prepare resnet-pytorch --index-limit 9 -o EMPTY/new --dry-run": "unrecognized arguments: --index-limit",
    "data prepare resnet --quality 101 -o EMPTY/new --dry-run": (
        "argument --quality: 101 is not from 1 to 100\n  hint: encore data prepare resnet --help"
    ),
    "data prepare dlrm raw more -o EMPTY/new --dry-run": "unrecognized arguments: more",
    f"data prepare ncf -o EMPTY/new --python {sys.executable}": "cannot import torch",
    "data prepare ncf -o EMPTY/new --python /none": "no Python /none",
    "data prepare ncf -o EMPTY/new --python /none --runtime docker": "--python with --runtime docker",
    "plan 0 resnet": "0 GPUs requested",
    "plan 8 resnt": "did you mean 'resnet'?",
    "plan 8 bert": "no curve of bert",
    "plan 8 resnet=x": "the number of runs must be",
    "plan 4 resnet --curves v0.7/NVIDIA/dgxa100": "measured on 8 to 768 GPUs, and there are 4",
    "plan 8 resnet --curves v0.7/NVIDIA": "one kind of accelerator",
    "plan 8 resnet --curves published": "a part of their names",
    "plan 8 resnet --curves ./none.csv": "./none.csv does not exist",
    "plan 8 resnet --curves CURVES/column.csv": "has no column minutes",
    "plan 8 resnet --curves CURVES/zero.csv": "line 2: resnet,1,0",
    "plan 8 resnet --curves CURVES/gpus.csv": "line 2: resnet,0,1",
    "plan 8 resnet --curves CURVES/word.csv": "line 2: resnet,one,5",
    "plan 8 resnet --curves CURVES/nan.csv": "positive minutes",
    "plan 8 resnet --curves CURVES/empty.csv": "has no column benchmark, gpus, minutes",
    "sweep resnet --gpus-per-node 1,x": "positive integers",
    "sweep resnet --gpus-per-node 0": "positive integers",
    "sweep resnet": "no numbers of GPUs given",
    "sweep resnet --results EMPTY --gpus-per-node 1 --set batch_size=3": "use --global-batch, or --weak",
    "sweep resnet --results EMPTY --gpus-per-node 1 --precision fp32 --set precision=fp32": "use --precision",
    "sweep resnet --results EMPTY --gpus-per-node 1,2 --precision fp16": "device=cpu cannot run precision=fp16",
    "sweep resnet --results EMPTY --gpus-per-node 1 --weak --global-batch 64": "--global-batch 64 with weak scaling",
    "sweep resnet --results EMPTY --gpus-per-node 3 --global-batch 64": "cannot share a global batch of 64 evenly",
    "sweep resnet --results EMPTY --gpus-per-node 1 --predict 4": "--predict with one number of GPUs",
    "sweep --resume EMPTY --gpus-per-node 1": "--resume takes all settings from the study folder",
    "sweep resnet --gpus-per-node 5000 --dry-run": "--gpus-per-node 5000",
    "sweep --resume EMPTY": "EMPTY is not a study folder",
    "study run nothing": "unknown study 'nothing'",
    "study run multi-gpu --small --point 99 --dry-run": "no point 99",
    "study report CUT CUT": "CUT cannot be read",
    "study report OTHER": "no MLPerf log in OTHER",
    "study report NUMBER": "no MLPerf log in NUMBER",
    "study run EMPTY/grid.txt": "no file EMPTY/grid.txt",
    "study report EMPTY": "no MLPerf log in EMPTY",
    "reproduce EMPTY": "EMPTY has no config_*.sh",
    "reproduce EMPTY --round 9": "unknown round '9'",
    "reproduce EMPTY/none": "EMPTY/none does not exist",
    "reproduce BROKEN.zip": "BROKEN.zip cannot be read",
    "reproduce BROKEN.tar.gz": "BROKEN.tar.gz cannot be read",
    "reproduce LONG": "config_LONG.sh",
    "reproduce LONG/config_LONG.sh": "config_LONG.sh",
    "verify BROKEN.tar.gz --signers PEM": "PEM, line 1: '-----BEGIN' is not followed by an SSH public key",
    "verify BROKEN.tar.gz --signers UNNAMED": "UNNAMED, line 1: a public key without a signer name",
    "verify BROKEN.tar.gz --signers COMMENT": "COMMENT has no key\n  expected: lines of NAME and SSH public key",
    "export EMPTY -o EMPTY/new": "EMPTY is not a run folder",
    "serve EMPTY": "EMPTY is not an export",
    "serve EMPTY --runtime enroot --dry-run": "'enroot' is not one of",
    "play resnet model": "resnet has no game to play",
    "published --markdown": "--markdown without --table",
    "published --csv --json": "--json and --csv cannot be combined",
    "published --table --markdown --json": "--json and --markdown cannot be combined",
    "score BINARY --json --csv": "--json and --csv cannot be combined",
    "check BINARY --json --format sarif": "--json and --format sarif cannot be combined",
    "published --benchmark resnett": "did you mean 'resnet'",
    "published --submitter nvida": "did you mean 'NVIDIA'",
    "published --submitter nobody": "unknown submitter 'nobody'",
    "published --round v9.9": "choose one of these",
    "compare LOG nowhere": (
        "unknown submission 'nowhere'\n  expected: one of 369, such as v4.0/tinycorp/tinybox_red, "
        "v0.5/google/research_v3.32, v4.0/tinycorp/tinybox_green, v2.1/NVIDIA/dgxh100_preview, "
        "v0.5/google/research_v3.512\n  hint: "
    ),
    "compare TREE": "TREE contains 2 sets of runs",
    "compare LOG v0.7/NVIDIA/dgxa100_ngc20.06_mxnt": "did you mean 'v0.7/NVIDIA/dgxa100_ngc20.06_mxnet'",
    "compare LOG dgxa100_n2": "did you mean 'v0.7/NVIDIA/dgxa100_n2_ngc20.06_mxnet'",
    "compare LOG v0.7/NVIDIA/dgxa100_ngc20.06_pytorch": "has no result of resnet",
    "report LOG --detections": "does not contain detections",
    "report --study microway-dgx1": "did you mean 'microway-dgx1-scaling'",
    "published --round 6.1": "no published result of v6.1",
    "check OTHER --ruleset 9.9": "unknown ruleset '9.9'",
    "run resnet --gpus 2": "No such option: --gpus",
    "run resnet 2 --hosts n1:4,n2:4 --hostfile x --dry-run": "--hosts and --hostfile",
    "run resnet 640 --system dgx1_n80 --data EMPTY": "one node, 8, or submit it: sbatch -N 80 slurm/run.sub resnet",
    "run resnet 2 --launcher mpirun --dry-run": "--launcher mpirun without hosts\n  hint: ",
    "run resnet 2 --hosts n1:4,n2:4 --dry-run": "2 GPUs requested, the hosts have 8 slots (n1:4,n2:4)",
    "run resnet 2 --hosts n1:1,n2:1 --launcher torchrun --dry-run": "torchrun does not support mxnet",
    "submit resnet --nodes 0 --dry-run": "--nodes 0",
    "submit resnet --gpus-per-node a100:99 --dry-run": "--gpus-per-node 99",
    "submit resnet --gpus-per-node a100: --dry-run": "optionally with a type: a100:8",
    "submit resnet --array 5 --dry-run": "--array 5",
    "submit resnet --array 0-2 --runs 2 --dry-run": "in an array of 3 tasks",
    "submit resnet --array 1-4 --dry-run": "--array 1-4",
    "submit resnet --array 0,2 --dry-run": "--array 0,2",
    "submit resnet --cluster /nosuch.toml --dry-run": "no cluster file",
    "submit resnet --time 1 --dry-run": "--time 1",
    "submit resnet --sbatch constraint --dry-run": "is not an sbatch option",
    "submit resnet --sbatch=--time=2:00:00 --dry-run": "use --time MINUTES",
    "submit resnet --sbatch=--tim=1 --dry-run": "use --time MINUTES",
    "submit resnet --sbatch=-t5 --dry-run": "use --time MINUTES",
    "submit resnet --sbatch='-N 4' --dry-run": "use --nodes N",
    "submit resnet --sbatch=--job-name=mine --dry-run": "conflicts with an option that Encore sets",
    "submit resnet --set epoch=2 --dry-run": "unknown configuration key 'epoch'",
    "submit resnet --resume x --dry-run": "--resume takes all",
    "selftest nfc --device cpu": "did you mean 'ncf'?",
    "selftest --device cpu --python /none": "no such file",
    "selftest --device cpu --python /bin/sh --image a": "one of them",
    "selftest --device cpu --time-limit 0": "a limit of 0 seconds",
    "run resnet 2 --system cpu --runtime dokcer": "did you mean 'docker'?",
    "bench resnet --roofline -o EMPTY/new": "steps of mxnet are not counted\n  expected: a benchmark in pytorch: bert",
    "bench resnet --project --measured 1": "--project without --system",
    "bench resnet --measured 1": "--measured without --project",
    "bench resnet --system h200 --project --roofline -o new": "--output, --roofline with --project",
    "bench resnet --system h200-141gb --project": "system h200-141gb was not submitted",
    "bench resnet-pytorch --system h200 --project --measured 0/s": "--measured 0/s",
    "bench resnet-pytorch --system h200 --project --measured fast": "--measured fast",
    "bench dlrm --system dgxa100 --project --measured 1": "dlrm: the projection is not calibrated",
    "bench minigo --system dgxa100 --project --measured 1": "minigo: the projection is not calibrated",
    "bench resnet-pytorch --profile EMPTY": "EMPTY is a folder\n  expected: a .json or .json.gz file\n  hint: ",
    "bench resnet-pytorch --profile EMPTY/none/p.json": "EMPTY/none\n  expected: a file in an existing folder\n",
    "bench resnet-pytorch --profile p.txt": "--profile p.txt: unsupported file type",
    "bench resnet-pytorch --profile p.json --roofline -o EMPTY": "--output, --roofline with --profile",
    "bench resnet-pytorch --profile p.json --steps 3": "--steps with --profile\n",
    "bench resnet-pytorch --roofline -o EMPTY --repeats 3": "--repeats with --roofline\n",
    "images build resnet --engine enroot": "'enroot' is not one of 'docker', 'podman'",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", CASES)
def test_invalid_input_is_rejected(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Restored after the test: --cluster sets it for child processes.
    monkeypatch.setenv("ENCORE_CLUSTER", os.environ["ENCORE_CLUSTER"])
    write_files(tmp_path, FILES)
    (tmp_path / "EMPTY").mkdir()
    names = tuple(path.name for path in tmp_path.iterdir())
    result = run_encore(
        *(tmp_path / word if word.startswith(names) else word for word in shlex.split(command)), width=200
    )
    is_encore = isinstance(result.exception, EncoreError)
    code = result.exception.exit_code if is_encore else result.exit_code
    assert (code, list((tmp_path / "EMPTY").iterdir())) == (ExitCode.REFUSED, []), repr(result.exception)
    assert CASES[command] in str(result.exception if is_encore else result.output).replace(f"{tmp_path}/", "")


def test_incomplete_profile_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_counted", lambda *_: (tmp_path / "p.json").write_text("{"))
    error = error_of("bench", "resnet-pytorch", "--profile", tmp_path / "p.json", code=ExitCode.FAILED)
    assert "p.json is not a profile: Expecting" in error.found


@pytest.mark.parametrize("words", ["list", "list --json", "-h"])
def test_closed_pipe_is_no_failure(words: str) -> None:
    # Like `| head`: nobody reads the output
    command = f"set -o pipefail; {sys.executable} -m encore.cli.app {words} | true"
    done = subprocess.run(["bash", "-c", command], cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (ExitCode.REACHED, "")


def test_paths_are_utf8_and_the_locale_may_be_ascii(tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(paths.ROOT)}
    rejected, accepted = (
        subprocess.run(
            [sys.executable, "-m", "encore.cli.app", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, check=False,
        )
        for arguments in (
            ("check", os.fsencode(tmp_path) + b"/\xff"),
            ("run", "resnet", "2", "--dry-run", "--results", f"{tmp_path}/é"),
        )
    )  # fmt: skip
    message = f"error: {tmp_path}/\\udcff is not valid UTF-8".encode()
    assert (rejected.returncode, rejected.stdout, rejected.stderr.splitlines()[0]) == (2, b"", message)
    assert (accepted.returncode, "/é/TIME".encode() in accepted.stdout) == (0, True)


@pytest.mark.slow
def test_omitted_columns_are_named() -> None:
    narrow, wide = (output_of("published", "--benchmark", "resnet", width=width) for width in (60, 200))
    screen = layout.Console(width=20, record=True, file=io.StringIO())
    layout.show(screen, "", ("name", "figure"), [("x" * 40, "1234567890.12")], numbers=("figure",))
    shown = [re.findall("also shows: (.*)", output) for output in (narrow, wide, screen.export_text())]
    assert shown == [["runs, accelerators"], [], ["figure"]]
    assert "also shows the meaning of the keys" in output_of("show", "resnet", "--system", "dgxa100", width=60)
