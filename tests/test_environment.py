"""Framework environments: made in steps that resume, one builder at a time, and every obstacle told."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from encore import environment, paths
from encore.environment import Environment
from encore.errors import EncoreError


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment with no packages in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    requirements = tmp_path / "small.txt"
    requirements.write_text("# nothing\n", encoding="utf-8")
    return Environment("small", requirements, sys.executable, {}, False, 0.01, "print('works')")


def make(wanted: Environment, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make ``wanted``; returns what was reported."""
    told: list[str] = []
    monkeypatch.setattr(environment, "describe", lambda framework: wanted)
    environment.ensure_environment(wanted.framework, told.append)
    return told


def test_second_time_nothing_is_done(small: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(make(small, monkeypatch)) == 3
    assert small.is_ready
    assert make(small, monkeypatch) == []


def test_failed_set_up_goes_on_where_it_stopped(
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
wanted = environment.Environment("small", Path({str(small.requirements)!r}), sys.executable, {{}}, False, 0.01, "1")
environment.describe = lambda framework: wanted
environment.ensure_environment("small", lambda text: print(text, flush=True))
"""
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
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


def test_no_network_is_told(small: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_full_disk_is_told_before_the_start(small: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EncoreError) as caught:
        make(replace(small, disk_gib=1e6), monkeypatch)
    assert "GiB free" in str(caught.value)
    assert "XDG_CACHE_HOME" in str(caught.value)


def test_unknown_framework_offers_the_nearest() -> None:
    with pytest.raises(EncoreError) as caught:
        environment.describe("mxnett")
    assert "did you mean 'mxnet'?" in str(caught.value)


def test_mpi_is_used_where_there_is_a_compiler_for_it(small: Environment) -> None:
    with_horovod = replace(small, horovod={"version": "0", "with": "MXNET", "without": ["PYTORCH"]})
    without = environment._build_variables(with_horovod)
    assert (
        without["HOROVOD_WITHOUT_MPI"] == without["HOROVOD_WITH_GLOO"] == without["HOROVOD_WITH_MXNET"] == "1"
    )
    assert environment._build_variables(replace(with_horovod, mpi=True))["HOROVOD_WITH_MPI"] == "1"


def test_every_requirement_is_pinned() -> None:
    for path in paths.REQUIREMENTS.glob("*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line and not line.lstrip().startswith(("#", "--hash=")):
                assert "==" in line, f"{path.name}: {line}"
