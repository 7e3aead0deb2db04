"""Framework environments: created once, by one process at a time, with the settings of pip; errors are reported."""

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from encore import catalogue, environment, installer, paths
from encore.environment import Environment
from encore.errors import EncoreError
from tests.machine.machines import write_program
from tests.results.result_logs import write_files


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    # An environment without packages, in a temporary cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "PROGRESS_SECONDS", 0.01)
    return Environment(
        framework="small",
        requirements=write_files(tmp_path, {"small.txt": "# nothing\n"}) / "small.txt",
        interpreter=sys.executable,
        horovod=None,
        mpi=False,
        disk_gib=0.01,
        check="1",
    )


def ensure(small: Environment, monkeypatch: pytest.MonkeyPatch, lines: list[str] | None = None) -> list[str]:
    lines = [] if lines is None else lines
    monkeypatch.setattr(environment, "describe", lambda framework, beside: small)
    assert environment.ensure_environment(small.framework, lines.append) == small.python
    return [line for line in lines if not re.fullmatch(r"  \d+ s", line)]  # progress on a busy machine


def test_added_packages_have_the_python_of_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_find_interpreter", list)
    added = [environment.describe("export", framework).interpreter for framework in ("mxnet", "pytorch")]
    assert added == [["3.11", "3.10"], ["3.11", "3.12", "3.13"]]


def test_settings_of_pip_become_variables_of_uv() -> None:
    settings = """
:env:.index-url='https://own/simple'
global.cert='/certificates.crt'
global.extra-index-url='file:///one\\nfile:///two'
global.find-links='/wheels /more'
global.index-url='https://other/simple'
install.no-deps='1'
global.proxy="http://it's@proxy"
"""
    assert installer.variables(settings) == {
        "UV_DEFAULT_INDEX": "https://own/simple",
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/certificates.crt",
        "ALL_PROXY": "http://it's@proxy",
        "UV_INDEX_STRATEGY": "first-index",
        "UV_NO_PROGRESS": "1",
    }
    # Without an index of its own, torch comes from PyTorch's CPU index
    assert installer.variables("global.timeout='60'")["UV_TORCH_BACKEND"] == "cpu"


@pytest.mark.slow
def test_failed_environment_is_created_again_and_a_complete_one_is_not(
    small: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "flag"
    broken = replace(small, check=f"open({str(flag)!r})")
    message = f"(?s)the small environment could not be made: FileNotFoundError.*{broken.folder.with_suffix('.log')}"
    with pytest.raises(EncoreError, match=message):
        ensure(broken, monkeypatch)
    flag.touch()
    printed = [ensure(broken, monkeypatch) for _ in range(2)]
    assert printed == [["making the small environment: small.txt"], []] and broken.is_ready


@pytest.mark.slow
def test_two_processes_create_an_environment_once(small: Environment) -> None:
    program = f"""
import sys
from pathlib import Path
from encore import environment
small = environment.Environment(
    framework="small", requirements=Path({str(small.requirements)!r}), interpreter=sys.executable,
    horovod=None, mpi=False, disk_gib=0.01, check="1",
)
environment.describe = lambda *arguments: small
environment.ensure_environment("small", lambda text: print(text, flush=True))
"""
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(output.splitlines().count("making the small environment: small.txt") for output in outputs) == 1


@pytest.mark.parametrize(
    ("disk_gib", "no_index", "message"),
    [
        (1e6, "0", "(?s)GiB free.*XDG_CACHE_HOME"),
        (0.01, "0", "the package index cannot be reached"),
        (0.01, "1", "the package index does not have what is pinned"),
    ],
)
def test_errors_of_the_installation_are_reported(
    small: Environment, monkeypatch: pytest.MonkeyPatch, disk_gib: float, no_index: str, message: str
) -> None:
    # The socket is bound and does not listen: connections are refused.
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        settings = {"UV_DEFAULT_INDEX": f"http://127.0.0.1:{unused.getsockname()[1]}/", "UV_HTTP_RETRIES": "0"}
        monkeypatch.setattr(installer, "environment", lambda: {**os.environ, **settings})
        monkeypatch.setenv("PIP_NO_INDEX", no_index)
        small.requirements.write_text(f"wheel==0.48.77 --hash=sha256:{'0' * 64}\n", encoding="utf-8")
        with pytest.raises(EncoreError, match=message):
            ensure(replace(small, disk_gib=disk_gib), monkeypatch)


def test_missing_programs_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EncoreError, match="did you mean 'mxnet'"):
        environment.describe("mxnett")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(EncoreError, match=r"(?s)no g\+\+ and no make.*apt-get install g\+\+ make"):
        environment.ensure_environment("mxnet")


def test_interpreter_is_the_first_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, answer in (("3.98", "no such version"), ("3.99", "3.99")):
        write_program(tmp_path / f"python{version}", f"echo {answer}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert environment._find_interpreter(["3.97", "3.98", "3.99"]) == str(tmp_path / "python3.99")


@pytest.mark.slow
def test_uv_installs_a_missing_python(small: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    # No Python has this version: uv looks for it, cannot download it, and the message has the ways out
    assert environment._find_interpreter(["3.99"]) == "3.99"
    missing = replace(small, interpreter="3.99")
    assert missing.folder != small.folder
    lines: list[str] = []
    message = r"(?s)no supported Python on PATH, and uv cannot download one.*python3\.99.*container.*resnet-pytorch"
    with pytest.raises(EncoreError, match=message):
        ensure(missing, monkeypatch, lines)
    assert lines[1] == "no Python 3.99 on PATH: installing it with uv"


# A build backend of the standard library that records each build.
BACKEND = """
import os, zipfile
def build_sdist(folder, settings=None): raise NotImplementedError
def build_wheel(folder, settings=None, metadata=None):
    flags = os.environ["HOROVOD_WITH_GLOO"] + os.environ["MAKEFLAGS"]
    with open(os.environ["BUILDS"], "a") as builds: builds.write(flags)
    name = "horovod-0.1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("horovod.py", "")
        wheel.writestr("horovod-0.1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: horovod\\nVersion: 0.1\\n")
        wheel.writestr("horovod-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("horovod-0.1.dist-info/RECORD", "")
    return name
"""


@pytest.mark.slow
def test_horovod_is_compiled_once_for_environments_with_the_same_framework(
    small: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "horovod-0.1", {
        "backend.py": BACKEND,
        "PKG-INFO": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.1\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    })  # fmt: skip
    shutil.make_archive(str(tmp_path / "horovod-0.1"), "gztar", tmp_path, "horovod-0.1")
    digest = hashlib.sha256((tmp_path / "horovod-0.1.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setattr(environment, "HOROVOD_SOURCE", tmp_path / "horovod.txt")
    (tmp_path / "horovod.txt").write_text(f"horovod==0.1 --hash=sha256:{digest}\n", encoding="utf-8")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("BUILDS", str(tmp_path / "builds"))
    horovod = catalogue.Horovod(**{"version": "0.1", "with": "MXNET", "without": ()})
    first = replace(small, framework="mxnet", horovod=horovod, check="import horovod")
    assert any("compiling Horovod" in line for line in ensure(first, monkeypatch))
    write_files(tmp_path, {"changed.txt": "# another pure Python package\n"})
    second = replace(first, requirements=tmp_path / "changed.txt")
    assert second.folder != first.folder and not any("compiling" in line for line in ensure(second, monkeypatch))
    cores = len(os.sched_getaffinity(0))
    assert (tmp_path / "builds").read_text(encoding="utf-8") == f"1-j{cores}", "compiled once, one process per core"


def test_mpi_without_headers_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = set()
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler = "echo '/tmp/probe.c:1:10: fatal error: mpi.h: No such file or directory' >&2\nexit 1\n"
    for script, problem in ((None, "mpicc is not installed"), (compiler, "mpi.h: No such file"), ("", "")):
        if script is not None:
            write_program(tmp_path / "mpicc", script)
        environment._probe_mpi.cache_clear()
        found = environment.mpi_problem()
        assert (problem in found, bool(found)) == (True, bool(problem))
        assert environment.describe("mxnet").mpi == (not problem)
        folders.add(environment.describe("pytorch").folder)
    assert len(folders) == 1, "without Horovod, an environment does not depend on MPI"


def test_key_of_a_wheel_contains_everything_that_compiled_code_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    horovod, here = (
        catalogue.Horovod(**{"version": "0.1", "with": "MXNET", "without": ()}),
        environment.this_platform("3.11", mpi=False),
    )

    def key(version: str, switches: dict[str, str], **facts: str) -> Path:
        requirements = write_files(tmp_path, {"requirements.txt": f"mxnet=={version}\n"}) / "requirements.txt"
        return environment.wheel_folder("mxnet", requirements, horovod, {**here, **facts}, switches)

    first = key("1.9.1\nidna==3.20", {})
    assert key("1.9.1\nidna==3.21", {}) == first
    others = {
        key("1.9.2\nidna==3.20", {}),
        key("1.9.1\nidna==3.20", {"HOROVOD_GPU_OPERATIONS": "NCCL"}),
        *(key("1.9.1\nidna==3.20", {}, **{name: "other"}) for name in here),
    }
    assert len(others - {first}) == 2 + 5
    write_files(tmp_path, {"other.cmake": "set(CMAKE_UNITY_BUILD OFF)\n"})
    monkeypatch.setattr(environment, "TOOLCHAIN", tmp_path / "other.cmake")
    assert key("1.9.1\nidna==3.20", {}) != first


def test_every_requirement_has_a_version_and_hashes() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in paths.REQUIREMENTS.glob("*.txt")).replace("\\\n", "")
    pin = re.compile(r"#.*|[\w.-]+==[^\s;]+( *;[^\\]*?)?( +--hash=sha256:[0-9a-f]{64})+|")
    assert [line for line in text.splitlines() if not pin.fullmatch(line)] == []


def test_package_with_another_hash_is_rejected(
    small: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    metadata = write_files(tmp_path / "wheel" / "a-1.dist-info", {
        "METADATA": "Metadata-Version: 2.1\nName: a\nVersion: 1\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    })  # fmt: skip
    Path(shutil.make_archive(str(wheel), "zip", metadata.parent)).rename(wheel)
    settings = {**os.environ, "UV_FIND_LINKS": str(tmp_path), "UV_NO_INDEX": "1"}
    monkeypatch.setattr(installer, "environment", lambda: settings)
    for name, digest in {"right": hashlib.sha256(wheel.read_bytes()).hexdigest(), "wrong": "0" * 64}.items():
        small.requirements.write_text(f"a==1 \\\n    --hash=sha256:{digest}\n", encoding="utf-8")
        with nullcontext() if name == "right" else pytest.raises(EncoreError):
            ensure(replace(small, check=f"'{name}'"), monkeypatch)
