"""Framework environments: made once, one builder at a time, with pip's settings, and every obstacle reported."""

import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from encore import catalogue, environment, installer, paths
from encore.environment import Environment
from encore.errors import EncoreError


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    # An environment with no packages in a cache of its own
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
        check="1",
    )


def make(wanted: Environment, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(environment, "describe", lambda framework: wanted)
    assert environment.ensure_environment(wanted.framework, lines.append) == wanted.python
    return lines


def test_pips_settings_are_uvs() -> None:
    listed = """
:env:.index-url='https://own/simple'
global.cert='/certificates.crt'
global.extra-index-url='file:///one\\nfile:///two'
global.find-links='/wheels /more'
global.index-url='https://other/simple'
install.no-deps='1'
global.proxy="http://it's@proxy"
"""
    assert installer.variables(listed) == {
        "UV_DEFAULT_INDEX": "https://own/simple",
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/certificates.crt",
        "ALL_PROXY": "http://it's@proxy",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_NO_PROGRESS": "1",
    }


@pytest.mark.slow
def test_a_failed_environment_is_made_again_and_a_finished_one_is_not(
    small: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "flag"
    broken = replace(small, check=f"open({str(flag)!r})")
    failed = f"(?s)the small environment could not be made: FileNotFoundError.*{broken.folder.with_suffix('.log')}"
    with pytest.raises(EncoreError, match=failed):
        make(broken, monkeypatch)
    flag.touch()
    assert make(broken, monkeypatch) == ["making the small environment: small.txt"] and broken.is_ready
    assert make(broken, monkeypatch) == []


@pytest.mark.slow
def test_two_builders_do_not_meet(small: Environment) -> None:
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
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(output.splitlines().count("making the small environment: small.txt") for output in outputs) == 1


@pytest.mark.parametrize(
    ("disk_gib", "no_index", "found"),
    [
        (1e6, "0", "(?s)GiB free.*XDG_CACHE_HOME"),
        (0.01, "0", "the package index cannot be reached"),
        (0.01, "1", "the package index does not have what is pinned"),
    ],
)
def test_obstacles_are_named(
    small: Environment, monkeypatch: pytest.MonkeyPatch, disk_gib: float, no_index: str, found: str
) -> None:
    # A port of this machine on which nobody listens.
    settings = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}
    monkeypatch.setattr(installer, "environment", lambda: {**os.environ, **settings})
    monkeypatch.setenv("PIP_NO_INDEX", no_index)
    small.requirements.write_text("wheel==0.48.77\n", encoding="utf-8")
    with pytest.raises(EncoreError, match=found):
        make(replace(small, disk_gib=disk_gib), monkeypatch)


def test_what_a_machine_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EncoreError, match="did you mean 'mxnet'"):
        environment.describe("mxnett")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(EncoreError, match=r"(?s)no g\+\+ and no make.*apt-get install g\+\+ make"):
        environment.ensure_environment("mxnet")
    with pytest.raises(EncoreError, match=r"Python 3\.7 on PATH"):
        environment._find_interpreter("mxnet", ["3.7"])


def test_mpi_is_used_where_there_is_a_compiler_for_it() -> None:
    horovod = catalogue.Horovod(**{"version": "0", "with": "MXNET", "without": ("PYTORCH",)})
    names = {mpi: sorted(environment.build_switches(horovod, mpi)) for mpi in (False, True)}
    common = ["HOROVOD_WITHOUT_PYTORCH", "HOROVOD_WITH_GLOO", "HOROVOD_WITH_MXNET"]
    assert names == {
        False: sorted([*common, "HOROVOD_WITHOUT_MPI"]),
        True: sorted([*common, "HOROVOD_WITH_MPI"]),
    }


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


@pytest.mark.slow
def test_horovod_is_compiled_once_for_environments_that_differ_elsewhere(
    small: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    horovod = catalogue.Horovod(**{"version": "0.1", "with": "MXNET", "without": ()})
    first = replace(small, framework="mxnet", horovod=horovod, check="import horovod")
    assert any("compiling Horovod" in line for line in make(first, monkeypatch))
    changed = tmp_path / "changed.txt"
    changed.write_text("# another pure Python package\n", encoding="utf-8")
    second = replace(first, requirements=changed)
    assert second.folder != first.folder and not any("compiling" in line for line in make(second, monkeypatch))
    cores = len(os.sched_getaffinity(0))
    assert (tmp_path / "builds").read_text(encoding="utf-8") == f"1-j{cores}", "once, as many compilers as cores"
    toolchain = tmp_path / "other.cmake"
    toolchain.write_text("set(CMAKE_UNITY_BUILD OFF)\n", encoding="utf-8")
    monkeypatch.setattr(environment, "TOOLCHAIN", toolchain)
    assert any("compiling Horovod" in line for line in make(second, monkeypatch)), "compiled in another way"


def test_the_key_of_a_wheel_has_all_that_compiled_code_depends_on(tmp_path: Path) -> None:
    horovod = catalogue.Horovod(**{"version": "0.1", "with": "MXNET", "without": ()})

    def key(text: str, switches: dict[str, str], **facts: str) -> Path:
        requirements = tmp_path / "requirements.txt"
        requirements.write_text(text, encoding="utf-8")
        here = {**environment.this_platform("3.11", mpi=False), **facts}
        return environment.wheel_folder("mxnet", requirements, horovod, here, switches)

    first = key("mxnet==1.9.1\nidna==3.20\n", {})
    assert key("mxnet==1.9.1\nidna==3.21\n", {}) == first
    others = {
        key("mxnet==1.9.2\nidna==3.20\n", {}),
        key("mxnet==1.9.1\nidna==3.20\n", {"HOROVOD_GPU_OPERATIONS": "NCCL"}),
        *(key("mxnet==1.9.1\n", {}, **{name: "other"}) for name in environment.this_platform("3.11", mpi=False)),
    }
    assert len(others - {first}) == 2 + 5


def test_versions_are_named_as_in_a_system_description(mxnet_python: Path) -> None:
    on_host = environment.software("mxnet", environment.packages(mxnet_python))
    # The host's MXNet is built for CPUs.
    assert (on_host["mxnet_version"], on_host["nccl_version"]) == ("1.9.1", "")
    assert on_host["horovod_version"] and on_host["dali_version"] and on_host["numpy_version"]


def test_every_requirement_is_pinned() -> None:
    lines = [line.lstrip() for path in paths.REQUIREMENTS.glob("*.txt") for line in path.open(encoding="utf-8")]
    assert [line for line in lines if line and not line.startswith(("#", "--hash=")) and "==" not in line] == []
