"""Framework environments: made in steps that resume, one builder at a time, and every obstacle reported."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import fields, replace
from pathlib import Path

import pytest

from encore import environment, paths
from encore.catalogue import Horovod
from encore.environment import Environment
from encore.errors import EncoreError


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment with no packages in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    requirements = tmp_path / "small.txt"
    requirements.write_text("# nothing\n", encoding="utf-8")
    return Environment(
        framework="small",
        requirements=requirements,
        interpreter=sys.executable,
        horovod=None,
        mpi=False,
        disk_gib=0.01,
        check="print('works')",
    )


def make(wanted: Environment, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make ``wanted``; returns what was reported."""
    lines: list[str] = []
    monkeypatch.setattr(environment, "describe", lambda framework: wanted)
    environment.ensure_environment(wanted.framework, lines.append)
    return lines


def test_second_time_nothing_is_done(small: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(make(small, monkeypatch)) == 3
    assert small.is_ready
    assert make(small, monkeypatch) == []


def test_failed_set_up_resumes_where_it_stopped(
    small: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "flag"
    broken = replace(small, check=f"open({str(flag)!r})")
    with pytest.raises(EncoreError) as caught:
        make(broken, monkeypatch)
    assert "could not be made" in str(caught.value)
    assert str(broken.folder.with_suffix(".log")) in str(caught.value)
    flag.touch()
    (only,) = make(broken, monkeypatch)
    assert "step 3 of 3" in only


def test_two_builders_do_not_meet(small: Environment, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from encore import environment
wanted = environment.Environment(
    framework="small", requirements=Path({str(small.requirements)!r}), interpreter=sys.executable,
    horovod=None, mpi=False, disk_gib=0.01, check="1",
)
environment.describe = lambda framework: wanted
environment.ensure_environment("small", lambda text: print(text, flush=True))
"""
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(output.count("making a virtual environment") for output in outputs) == 1


def test_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(EncoreError) as caught:
        environment.ensure_environment("mxnet")
    assert "no g++ and no make" in str(caught.value)
    assert "apt-get install g++ make" in str(caught.value)


def test_unsuitable_python_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EncoreError) as caught:
        environment._find_interpreter("mxnet", ["3.7"])
    assert "Python 3.7 on PATH" in str(caught.value)


def test_no_network_is_reported(small: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    # A port of this machine on which nobody listens.
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    small.requirements.write_text("wheel==0.48.0\n", encoding="utf-8")
    with pytest.raises(EncoreError) as caught:
        make(small, monkeypatch)
    assert "the package index cannot be reached" in str(caught.value)


def test_full_disk_is_reported_before_the_start(small: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EncoreError) as caught:
        make(replace(small, disk_gib=1e6), monkeypatch)
    assert "GiB free" in str(caught.value)
    assert "XDG_CACHE_HOME" in str(caught.value)


def test_unknown_framework_offers_the_nearest() -> None:
    with pytest.raises(EncoreError) as caught:
        environment.describe("mxnett")
    assert "did you mean 'mxnet'?" in str(caught.value)


def test_mpi_is_used_where_there_is_a_compiler_for_it() -> None:
    horovod = Horovod(**{"version": "0", "with": "MXNET", "without": ("PYTORCH",)})
    without = environment.build_switches(horovod, mpi=False)
    assert without == dict.fromkeys(
        ("HOROVOD_WITH_MXNET", "HOROVOD_WITHOUT_PYTORCH", "HOROVOD_WITH_GLOO", "HOROVOD_WITHOUT_MPI"), "1"
    )
    assert "HOROVOD_WITH_MPI" in environment.build_switches(horovod, mpi=True)


# A source package that builds its wheel with the standard library, and notes each time that it does.
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


@pytest.fixture
def with_horovod(small: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment with a Horovod that pip builds from a source package in the standard library alone."""
    source = tmp_path / "horovod-0.1"
    source.mkdir()
    (source / "backend.py").write_text(BACKEND, encoding="utf-8")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.1\n", encoding="utf-8")
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (source / "pyproject.toml").write_text(system, encoding="utf-8")
    with tarfile.open(tmp_path / "horovod-0.1.tar.gz", "w:gz") as archive:
        archive.add(source, "horovod-0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("BUILDS", str(tmp_path / "builds"))
    horovod = Horovod(**{"version": "0.1", "with": "MXNET", "without": ()})
    return replace(small, framework="mxnet", horovod=horovod, check="import horovod")


def test_horovod_is_compiled_once_for_environments_that_differ_elsewhere(
    with_horovod: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert any("compiling Horovod" in line for line in make(with_horovod, monkeypatch))
    changed = tmp_path / "changed.txt"
    changed.write_text("# another pure Python package\n", encoding="utf-8")
    second = replace(with_horovod, requirements=changed)
    assert second.folder != with_horovod.folder
    assert not any("compiling" in line for line in make(second, monkeypatch))
    assert second.is_ready
    cores = len(os.sched_getaffinity(0))
    assert (tmp_path / "builds").read_text(encoding="utf-8") == f"1-j{cores}", "once, as many compilers as cores"


def test_the_key_of_a_wheel_has_all_that_compiled_code_depends_on(
    with_horovod: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert with_horovod.horovod is not None

    def key(text: str, switches: dict[str, str], **facts: str) -> Path:
        requirements = tmp_path / "requirements.txt"
        requirements.write_text(text, encoding="utf-8")
        here = replace(environment.this_platform("3.11", mpi=False), **facts)
        assert with_horovod.horovod is not None
        return environment.wheel_folder("mxnet", requirements, with_horovod.horovod, here, switches)

    first = key("mxnet==1.9.1\nidna==3.20\n", {})
    assert key("mxnet==1.9.1\nidna==3.21\n", {}) == first
    others = {
        key("mxnet==1.9.2\nidna==3.20\n", {}),
        key("mxnet==1.9.1\nidna==3.20\n", {"HOROVOD_GPU_OPERATIONS": "NCCL"}),
        *(key("mxnet==1.9.1\n", {}, **{field.name: "other"}) for field in fields(environment.Platform)),
    }
    assert len(others - {first}) == 2 + len(fields(environment.Platform))


def test_versions_are_named_as_in_a_system_description(mxnet_python: Path) -> None:
    on_host = environment.software("mxnet", environment.packages(mxnet_python))
    assert on_host["mxnet_version"] == "1.9.1"
    assert on_host["horovod_version"] and on_host["dali_version"] and on_host["numpy_version"]
    # The host's MXNet is built for CPUs.
    assert on_host["nccl_version"] == ""


def test_every_requirement_is_pinned() -> None:
    for path in paths.REQUIREMENTS.glob("*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line and not line.lstrip().startswith(("#", "--hash=")):
                assert "==" in line, f"{path.name}: {line}"
