"""Command lines of the container runtimes: equal where they must be equal, and pinned word for word."""

import getpass
import os
import pwd
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encore import catalogue
from encore.containers import renderers
from encore.containers.renderers import INSIDE
from encore.job import PASSED_ON, Command, Job
from tests.containers import samples
from tests.containers.samples import RENDERERS

BENCHMARKS = sorted(catalogue.choices())


def options(command: Command, name: str) -> list[str]:
    # Values of an option that may be given several times
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
    # What the ranks see of the variables that Encore hands over
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
    on_host = renderers.host(job, Path("/env/bin/python"), samples.CALLER)
    assert on_host.argv == job.argv
    mounts = {(str(mount.source), mount.target, mount.read_only) for mount in job.mounts}
    # The host has no mounts: it sees the same only where a folder is its own target.
    assert all(source == target for source, target, _ in mounts)
    for runtime, render in RENDERERS.items():
        command = render(job, samples.container(runtime))
        image = samples.container(runtime).image
        assert command.argv[command.argv.index(image) + 1 :] == job.argv and MOUNTS[runtime](command) == mounts
        assert without_own(environment(runtime, command)) == without_own(dict(on_host.environment))
    pod = samples.pod(job)
    (node,) = pod["containers"]
    assert tuple(node["args"][node["args"].index("--") + 1 :]) == job.argv
    assert pod_mounts(pod) == mounts
    assert without_own({each["name"]: each["value"] for each in node["env"] if "value" in each}) == without_own(
        dict(on_host.environment)
    )
    assert node["resources"]["limits"].get("nvidia.com/gpu", "0") == str(job.gpus)
    assert str(renderers.STACK_BYTES) in node["args"] and ("--pinned" in node["args"]) == bool(job.gpus)
    assert (node["workingDir"], pod["securityContext"]["runAsUser"]) == (renderers.CODE, 1000)


def pod_mounts(pod: dict[str, Any]) -> set[tuple[str, str, bool]]:
    # Each folder of the node that a pod's container sees, but for its memory
    roots = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
    return {
        (str(Path(roots[each["name"]], each.get("subPath", ""))), each["mountPath"], each.get("readOnly", False))
        for each in pod["containers"][0]["volumeMounts"]
        if each["name"] in roots
    }


@pytest.mark.parametrize("runtime", ["host", *RENDERERS])
@pytest.mark.parametrize("caller", [{}, {"USER": "anna"}])
def test_ranks_find_a_name_without_a_passwd_entry(
    runtime: str, caller: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch 2.8 to 2.12 call getpass.getuser() for the folder of torch.compile (pytorch#140765)
    job = samples.job(0, catalogue.choose("ncf"))
    if runtime == "host":
        given = dict(renderers.host(job, Path("/env/bin/python"), caller).environment)
    else:
        given = environment(runtime, RENDERERS[runtime](job, samples.container(runtime, caller=caller)))
        assert given["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/torchinductor_1000"
        assert given["TRITON_CACHE_DIR"] == "/tmp/triton_1000"

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert getpass.getuser() == caller.get("USER", "encore")


@pytest.mark.parametrize("gpus", [1, 4, 8, 16])
@pytest.mark.parametrize("runtime", RENDERERS)
def test_command_line_is_as_recorded(runtime: str, gpus: int, recorded: Callable[[str, Any], None]) -> None:
    text = shlex.join(samples.rendered(runtime, gpus).argv).replace(" --", " \\\n  --")
    recorded(f"{runtime}_{gpus}.txt", text)


DEVICES = ("/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0")


@pytest.mark.parametrize(
    ("runtime", "gpus", "facts", "options"),
    [
        ("docker", 2, {"rootless": True}, "--ipc host --ulimit stack=67108864 --user 0:0 --gpus all"),
        ("docker", 0, {}, "--shm-size 1g --ulimit stack=67108864 --user 1000:1000"),
        ("docker", 0, {"rootless": True}, "--shm-size 1g --ulimit stack=67108864 --user 0:0"),
        ("docker", 8, {"rootless": True}, "--ipc host --ulimit stack=67108864 --user 0:0 --gpus all"),
        (
            "docker",
            8,
            {"infiniband": DEVICES, "gpu_access": "cdi"},
            "--ipc host --ulimit stack=67108864 --ulimit memlock=-1 --device /dev/infiniband/rdma_cm "
            "--device /dev/infiniband/uverbs0 --user 1000:1000 --device nvidia.com/gpu=all",
        ),
        (
            "docker",
            0,
            {"infiniband": DEVICES[:1]},
            "--shm-size 1g --ulimit stack=67108864 --ulimit memlock=-1 --device /dev/infiniband/rdma_cm "
            "--user 1000:1000",
        ),
        (
            "podman",
            0,
            {"rootless": True, "limits": {"nofile": 7}},
            "--shm-size 1g --ulimit stack=67108864 --user 1000:1000 --security-opt label=disable --userns keep-id "
            "--ulimit nofile=7:7",
        ),
    ],
)
def test_options_of_this_machine(runtime: str, gpus: int, facts: dict[str, Any], options: str) -> None:
    command = samples.rendered(runtime, gpus, **facts)
    named = ("--ipc", "--shm-size", "--ulimit", "--device", "--user", "--userns", "--security-opt", "--gpus")
    pairs = zip(command.argv, command.argv[1:], strict=False)
    assert " ".join(word for pair in pairs if pair[0] in named for word in pair) == options
    assert command.cleanup == (runtime, "rm", "--force", "--volumes", "encore-run-0-0123abcd")
    assert not {"--tty", "-t", "-it", "--interactive"} & set(command.argv)


@pytest.mark.parametrize("runtime", RENDERERS)
def test_what_the_ranks_see_of_the_callers_variables(runtime: str) -> None:
    # His choice of GPUs and no secret; a name and caches that are the job's own win; no value is for all to read
    own = {"USER": "model", "TRITON_CACHE_DIR": "/scratch"}
    job = replace(samples.job(1), environment=own)
    container = samples.container(runtime, caller={**samples.CALLER, "CUDA_VISIBLE_DEVICES": "2,3"})
    command = RENDERERS[runtime](job, container)
    seen = environment(runtime, command)
    assert {name: seen[name] for name in (*own, "CUDA_VISIBLE_DEVICES")} == {**own, "CUDA_VISIBLE_DEVICES": "2,3"}
    kept = {name: value for name, value in samples.CALLER.items() if command.environment.get(name) == value}
    assert kept == {name: samples.CALLER[name] for name in ("HOME", "PATH")} and "model" not in " ".join(command.argv)
