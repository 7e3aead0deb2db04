"""Command lines of the container runtimes: equal where they must be equal, and pinned word for word."""

from __future__ import annotations

import getpass
import os
import pwd
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from encore import catalogue, paths
from encore.containers.renderers import host
from encore.containers.renderers.container import INSIDE
from encore.job import PASSED_ON, Command, Job
from tests.containers import samples
from tests.containers.samples import RENDERERS

GOLDEN = paths.ROOT / "tests" / "golden" / "containers"
BENCHMARKS = sorted(catalogue.choices())


def options(command: Command, name: str) -> list[str]:
    """Return values of an option that may be given several times."""
    return [value for flag, value in zip(command.argv, command.argv[1:], strict=False) if flag == name]


def bind_mount(text: str) -> tuple[str, str, bool]:
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    return parts["source"], parts["target"], "readonly" in parts


def colon_mount(text: str) -> tuple[str, str, bool]:
    source, target, *flags = text.split(":")
    return source, target, "ro" in flags[-1].split(",")


MOUNTS: dict[str, Callable[[Command], set[tuple[str, str, bool]]]] = {
    "docker": lambda c: {bind_mount(text) for text in options(c, "--mount")},
    "podman": lambda c: {bind_mount(text) for text in options(c, "--mount")},
    "apptainer": lambda c: {colon_mount(text) for text in options(c, "--bind")},
    "enroot": lambda c: {colon_mount(text) for text in options(c, "--mount")},
}


def environment(runtime: str, command: Command) -> dict[str, str]:
    """Return what the ranks see of the variables that Encore hands over."""
    if runtime == "apptainer":
        prefix = "APPTAINERENV_"
        return {n.removeprefix(prefix): v for n, v in command.environment.items() if n.startswith(prefix)}
    seen = {}
    for word in options(command, "--env"):
        name, separator, value = word.partition("=")
        seen[name] = value if separator else command.environment[name]
    return seen


def without_own(variables: dict[str, str]) -> dict[str, str]:
    own = {*INSIDE, *PASSED_ON, "PATH", "NVIDIA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    return {name: value for name, value in variables.items() if name not in own}


@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_all_runtimes_start_the_same(benchmark: str, gpus: int) -> None:
    job: Job = samples.job(gpus, catalogue.choose(benchmark))
    on_host = host.render(job, Path("/env/bin/python"), samples.CALLER)
    assert on_host.argv == job.argv
    mounts = {(str(mount.source), mount.target, mount.read_only) for mount in job.mounts}
    # The host has no mounts: it sees the same only where a folder is its own target.
    assert all(source == target for source, target, _ in mounts)
    for runtime, render in RENDERERS.items():
        command = render(job, samples.container(runtime))
        image = samples.container(runtime).image
        assert command.argv[command.argv.index(image) + 1 :] == job.argv
        assert MOUNTS[runtime](command) == mounts
        assert without_own(environment(runtime, command)) == without_own(dict(on_host.environment))


@pytest.mark.parametrize("runtime", ["host", *RENDERERS])
@pytest.mark.parametrize("caller", [{}, {"USER": "anna"}])
def test_ranks_find_a_name_without_a_passwd_entry(
    runtime: str, caller: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch 2.8 to 2.12 call getpass.getuser() for the folder of torch.compile (pytorch#140765)."""
    job = samples.job(0, catalogue.choose("ncf"))
    if runtime == "host":
        given = dict(host.render(job, Path("/env/bin/python"), caller).environment)
    else:
        given = environment(runtime, RENDERERS[runtime](job, samples.container(runtime, caller=caller)))
        assert given["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/torchinductor_1000"
        assert given["TRITON_CACHE_DIR"] == "/tmp/triton_1000"

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert getpass.getuser() == caller.get("USER", "encore")


def test_given_name_and_caches_win() -> None:
    job = replace(samples.job(0), environment={"USER": "model", "TRITON_CACHE_DIR": "/scratch"})
    for runtime, render in RENDERERS.items():
        given = environment(runtime, render(job, samples.container(runtime)))
        assert (given["USER"], given["TRITON_CACHE_DIR"]) == ("model", "/scratch")


@pytest.mark.parametrize("runtime", RENDERERS)
def test_rendering_is_pure(runtime: str) -> None:
    job, container = samples.job(8), samples.container(runtime)
    assert RENDERERS[runtime](job, container) == RENDERERS[runtime](job, container)


@pytest.mark.parametrize("gpus", [1, 4, 8, 16])
@pytest.mark.parametrize("runtime", RENDERERS)
def test_command_line_is_as_recorded(runtime: str, gpus: int) -> None:
    text = shlex.join(samples.rendered(runtime, gpus).argv).replace(" --", " \\\n  --") + "\n"
    file = GOLDEN / f"{runtime}_{gpus}.txt"
    if os.environ.get("ENCORE_RECORD"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("runtime", RENDERERS)
def test_no_value_of_the_environment_is_on_the_command_line(runtime: str) -> None:
    command = samples.rendered(runtime, 8)
    assert not any("NCCL_DEBUG=" in word for word in command.argv)
    assert "SECRET_TOKEN" not in command.environment


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_containers_are_removed_and_never_have_a_terminal(runtime: str) -> None:
    command = samples.rendered(runtime, 1)
    assert "--rm" in command.argv
    assert command.cleanup == (runtime, "rm", "--force", "--volumes", "encore-run-0-0123abcd")
    assert not {"--tty", "-t", "-it", "--interactive"} & set(command.argv)


def test_rootless_engines_map_the_caller() -> None:
    assert options(samples.rendered("docker", 0, rootless=True), "--user") == ["0:0"]
    rootless = samples.rendered("podman", 0, rootless=True)
    assert options(rootless, "--userns") == ["keep-id"]
    assert options(rootless, "--user") == ["1000:1000"]


def test_memory_is_locked_for_gpus_and_adapters_alone() -> None:
    assert "memlock=-1" not in samples.rendered("docker", 0).argv
    assert "memlock=-1" in samples.rendered("docker", 8).argv
    assert "memlock=-1" in samples.rendered("docker", 0, infiniband=("/dev/infiniband/uverbs0",)).argv


def test_infiniband_devices_are_handed_over() -> None:
    command = samples.rendered("docker", 8, infiniband=("/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"))
    assert options(command, "--device") == ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"]


def test_gpus_by_the_container_device_interface() -> None:
    assert "nvidia.com/gpu=all" in samples.rendered("docker", 8, gpu_access="cdi").argv
    assert "--gpus" in samples.rendered("docker", 8).argv
    assert "nvidia.com/gpu=all" in samples.rendered("podman", 8).argv


def test_the_callers_choice_of_gpus_is_passed_on() -> None:
    caller = {**samples.CALLER, "CUDA_VISIBLE_DEVICES": "2,3"}
    for runtime in RENDERERS:
        command = samples.rendered(runtime, 1, caller=caller)
        assert environment(runtime, command)["CUDA_VISIBLE_DEVICES"] == "2,3"
