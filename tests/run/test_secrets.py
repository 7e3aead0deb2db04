"""Secrets reach the ranks through the environment, and no file or output."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from encore.lab.submissions import bundle
from encore.run import run_metadata, submission
from tests.command_line import error_of, output_of, run_encore
from tests.trainings import Started

CANARY = "canary7d1f"
SECRETS = {
    **dict.fromkeys(("HF_TOKEN", "GITHUB_PAT", "PGPASSWORD", "DB_PASS", "my_secret", "API_KEY", "AWS_REGION"), CANARY),
    "HTTPS_PROXY": f"http://proxy/{CANARY}",
    "MIRROR": f"https://anna:{CANARY}@mirror.example.org/x",
    "INDEX": f"https://{CANARY}@index.example.org",
    "OTHER": f"hf_{CANARY}0123456789",
    "NGC": f"nvapi-{CANARY}0123456789",
    "HEADER": f"Bearer {CANARY}",
    "LINK": f"https://blob.example.org/x?part=1&sig={CANARY}",
    "AZURE_CONNECTION_STRING": CANARY,
    **dict.fromkeys(("DATABASE_URL", "REDIS_URL", "MYSQL_PWD_DB", "ROOTPWD", "AUTHORIZATION"), CANARY),
    "MONGO": f"mongodb://anna:{CANARY}@h1,h2/x",
    "SLASHES": f"postgres://anna:a/b@{CANARY}@host/x",
    "LOGIN": f"anna:{CANARY}@db.example.org:5432/x",
    "ADDRESS": f"rsync --delete anna:{CANARY}@10.0.0.1:/x .",
    "OPTIONS": f"--user anna --db-password={CANARY} --verbose",
    "WORDS": f"--password {CANARY}",
    "QUOTED": f'--secret "{CANARY} {CANARY}"',
    "JSON": f'{{"user": "anna", "password": "{CANARY}"}}',
    "STATEMENT": f"PGPASSWORD={CANARY} psql",
    **dict.fromkeys(("SSHPASS", "DB_PW", "CREDS"), CANARY),
    "BODY": f'{{"token": "{CANARY}"}}',
}
OPTIONS = [word for name, value in SECRETS.items() for word in ("--env", f"{name}={value}")]
NOTIFY = ["--notify", f"https://hooks.example.org/{CANARY}"]
PLAIN = {
    "NCCL_DEBUG": "INFO",
    "NO_PROXY": "localhost",
    "PASSIVE": "1",
    "PATTERN": "x",
    "REPO": "ssh://git@host/x",
    "URL": "http://host/x?part=1",
    "PORT": "http://host:8080/x@y",
    "PWD": "/work",
    "OLDPWD": "/work",
    "PYTHONPATH": "/opt/gcc@12/lib:/opt/a:b@2",
    "MODULES": "cuda:openmpi@4.1",
    "DIGEST": "registry.example.org:5000/pytorch:24.06@sha256:0123456789abcdef",
    "TAG": "pytorch:24.06@sha256:0123456789abcdef",
    "IMAGE": "docker://pytorch:24.06@sha256:0123456789abcdef",
    "MAIL": "mailto:anna@example.org, ben@example.org",
    "CLONE": "git@example.org:project/x.git",
    "HOSTS": "anna@n1:4,anna@n2:4",
    "COPY": "host:/data@snapshot",
    "TOKENIZERS_PARALLELISM": "false",
    "XAUTHORITY": "/home/anna/.Xauthority",
    "DB_PASSWORD_FILE": "/run/secrets/db",
    "COUNTS": '{"tokens": 5}',
    "ARGS": "--tokenizer /x --max-tokens 5 --passes 2 --pwd /x",
}


def test_names_and_values_of_secrets() -> None:
    assert run_metadata.redact({**SECRETS, **PLAIN}) == {**dict.fromkeys(SECRETS, run_metadata.REDACTED), **PLAIN}


def test_secrets_of_arguments() -> None:
    words = ["run", "bert", "--set", "token_bucket=4", "--set=key_value_heads=8", "--image=x:1@sha256:01", "--env=A=b"]
    words += ["--password", CANARY, f"--db-password={CANARY}", f"--env=MY_KEY={CANARY}", f"PGPASSWORD={CANARY}"]
    redacted = [word.replace(CANARY, run_metadata.REDACTED) for word in words]
    assert run_metadata.redact_arguments(words) == redacted


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize("command", [["run", "ncf", "2"], ["submit", "ncf", "--nodes", "1"]])
def test_dry_run_has_no_secrets(command: list[str], as_json: list[str], tmp_path: Path) -> None:
    results = ["--results", str(tmp_path), "--dry-run", *as_json]
    done = run_encore(*command, *OPTIONS, f"--env=MY_KEY={CANARY}", *NOTIFY, *results)
    assert done.exit_code == 0 and "HF_TOKEN" in done.output and CANARY not in done.output, done.output


def test_secrets_reach_a_job_through_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = Mock(return_value=SimpleNamespace(returncode=0, stdout="12", stderr=""))
    monkeypatch.setattr(submission.commands, "require", lambda: None)
    monkeypatch.setattr(submission, "checks", lambda prepared: [])
    monkeypatch.setattr(submission, "subprocess", SimpleNamespace(run=sbatch))
    command = ["submit", "ncf", "--nodes", "1", *OPTIONS, *NOTIFY, "--env", "NCCL_DEBUG=INFO"]
    output_of(*command, "--results", tmp_path)
    ((_, call),) = sbatch.call_args_list
    assert CANARY not in call["input"] and {**SECRETS, run_metadata.NOTIFY: NOTIFY[1]}.items() <= call["env"].items()
    *checks, last = call["input"].splitlines()[-len(SECRETS) - 2 :]
    words = shlex.split(last)
    assert [words[n + 1] for n, word in enumerate(words) if word == "--env"] == [*SECRETS, "NCCL_DEBUG=INFO"]
    script = ["bash", "-c", "\n".join(["set -eu", *checks])]
    for variables, is_complete in ((call["env"], True), ({"PATH": os.environ["PATH"]}, False)):
        ended = subprocess.run(script, env=variables, capture_output=True, text=True, check=False)
        assert (ended.returncode == 0) is is_complete and CANARY not in ended.stderr


def test_run_folder_and_bundle_have_no_secrets(
    toy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = ("--set", "epochs=1000", "--set", "quality_target=1.0")
    started = Started.run(toy("ncf"), tmp_path, *endless, *OPTIONS, "--notify", f"true {CANARY}", name="ncf")
    experiment = started.wait_for_step(3)
    for rank in started.ranks(experiment):
        assert SECRETS.items() <= rank.environ().items()
    started.process.terminate()
    assert CANARY not in started.ended(130)
    run = experiment.parent
    bundle.write_bundle(run, tmp_path / "run.tar.gz")
    shutil.unpack_archive(tmp_path / "run.tar.gz", tmp_path / "bundle")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any((tmp_path / "bundle").iterdir())
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]
    for name in {*SECRETS} & {*os.environ}:
        monkeypatch.delenv(name)
    error = error_of("run", "--resume", run)
    assert "HF_TOKEN, GITHUB_PAT" in error.found and "set it again" in error.hint
