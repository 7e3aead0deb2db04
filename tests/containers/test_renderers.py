"""Command lines of the container runtimes: equivalent to each other, and equal to the golden files."""

import getpass
import os
import pwd
import re
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encore import catalogue
from encore.containers import renderers
from encore.errors import EncoreError
from encore.job import PASSED_ON, Command, Mount
from tests.containers import samples
from tests.containers.samples import RENDERERS

Mounts = set[tuple[str, str, bool]]  # Source, target, read-only
MOUNT_OPTIONS = {"docker": "--mount", "podman": "--mount", "apptainer": "--bind", "enroot": "--mount"}


def option_values(command: Command, name: str) -> list[str]:
    return [value for option, value in zip(command.argv, command.argv[1:], strict=False) if option == name]


def mounts_of(runtime: str, command: Command) -> Mounts:
    # type=bind,source=SOURCE,target=TARGET[,readonly], or SOURCE:TARGET:FLAGS
    texts = [re.sub("type=bind,|source=|target=", "", text) for text in option_values(command, MOUNT_OPTIONS[runtime])]
    mounts = [re.split("[:,]", text) for text in texts]
    return {(source, target, bool({"ro", "readonly"} & set(flags))) for source, target, *flags in mounts}


def pod_mounts(pod: dict[str, Any]) -> Mounts:
    # Folders of the node, without volumes in memory
    roots = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    return {
        (str(Path(roots[mount["name"]], mount.get("subPath", ""))), mount["mountPath"], mount.get("readOnly", False))
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["name"] in roots
    }


def environment(runtime: str, command: Command) -> dict[str, str]:
    # Variables of the ranks
    if runtime == "apptainer":
        prefix = "APPTAINERENV_"
        return {n.removeprefix(prefix): v for n, v in command.environment.items() if n.startswith(prefix)}
    words = [word.partition("=") for word in option_values(command, "--env")]
    return {name: value if separator else command.environment[name] for name, separator, value in words}


def job_variables(variables: dict[str, str]) -> dict[str, str]:
    # Variables of the job, without those of a runtime
    runtime = {
        *renderers.INSIDE,
        *PASSED_ON,
        "PATH",
        "NVIDIA_VISIBLE_DEVICES",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
    }
    return {name: value for name, value in variables.items() if name not in runtime}


@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("benchmark", sorted(catalogue.choices()))
def test_all_runtimes_start_the_same(benchmark: str, gpus: int) -> None:
    job = samples.job(gpus, catalogue.choose(benchmark))
    on_host = renderers.host(job, Path("/env/bin/python"), samples.CALLER)
    # The host has no mounts: every folder is mounted at its own path.
    mounts = {(str(mount.source), str(mount.source), mount.read_only) for mount in job.mounts}
    expected = (job.argv, mounts, job_variables(dict(on_host.environment)))
    assert on_host.argv == job.argv
    for runtime, render in RENDERERS.items():
        command = render(job, container := samples.container(runtime))
        argv = command.argv[command.argv.index(container.image) + 1 :]
        assert (argv, mounts_of(runtime, command), job_variables(environment(runtime, command))) == expected
    pod = samples.pod(job)
    (rank,) = pod["containers"]
    argv = tuple(rank["args"][rank["args"].index("--") + 1 :])
    variables = {entry["name"]: entry["value"] for entry in rank["env"] if "value" in entry}
    assert (argv, pod_mounts(pod), job_variables(variables)) == expected
    assert rank["resources"]["limits"].get("nvidia.com/gpu", "0") == str(job.gpus)
    assert str(renderers.STACK_BYTES) in rank["args"] and ("--pinned" in rank["args"]) == bool(job.gpus)
    assert (rank["workingDir"], pod["securityContext"]["runAsUser"]) == (renderers.CODE, 1000)


@pytest.mark.parametrize("runtime", ["host", *RENDERERS])
@pytest.mark.parametrize("caller", [{}, {"USER": "anna"}])
def test_user_has_a_name_without_a_passwd_entry(
    runtime: str, caller: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch 2.8 to 2.12 call getpass.getuser() for the folder of torch.compile (pytorch#140765)
    job = samples.job(0, catalogue.choose("ncf"))
    if runtime == "host":
        variables = dict(renderers.host(job, Path("/env/bin/python"), caller).environment)
    else:
        variables = environment(runtime, RENDERERS[runtime](job, samples.container(runtime, caller=caller)))
        folders = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_1000", "TRITON_CACHE_DIR": "/tmp/triton_1000"}
        assert folders.items() <= variables.items()
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert getpass.getuser() == caller.get("USER", "encore")


@pytest.mark.parametrize("runtime", RENDERERS)
def test_command_line_on_eight_gpus(runtime: str, recorded: Callable[[str, Any], None]) -> None:
    recorded(f"{runtime}_8.txt", shlex.join(samples.render(runtime, 8).argv).replace(" --", " \\\n  --"))


DEVICES = ("/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0")


@pytest.mark.parametrize(
    ("runtime", "gpus", "fields", "options"),
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
def test_options_for_the_machine(runtime: str, gpus: int, fields: dict[str, Any], options: str) -> None:
    command = samples.render(runtime, gpus, **fields)
    names = ("--ipc", "--shm-size", "--ulimit", "--device", "--user", "--userns", "--security-opt", "--gpus")
    pairs = zip(command.argv, command.argv[1:], strict=False)
    assert " ".join(word for pair in pairs if pair[0] in names for word in pair) == options
    assert command.cleanup == (runtime, "rm", "--force", "--volumes", "encore-run-0-0123abcd")
    assert not {"--tty", "-t", "-it", "--interactive"} & set(command.argv)


@pytest.mark.parametrize("runtime", [*RENDERERS, "pyxis"])
@pytest.mark.parametrize("name", ["a,b", "a:b", 'a"b', "a\nb"])
def test_path_that_ends_the_mount_option_is_rejected(runtime: str, name: str) -> None:
    job = replace(samples.job(1), mounts=(Mount(Path("/data", name), f"/data/{name}", True),))
    separators = {"docker": ',"', "podman": ',"', "enroot": ":"}.get(runtime, ",:") + "\n"
    with pytest.raises(EncoreError, match="cannot be mounted") if set(name) & set(separators) else nullcontext():
        {**RENDERERS, "pyxis": renderers.pyxis}[runtime](job, samples.container(runtime))


@pytest.mark.parametrize("runtime", RENDERERS)
def test_variables_of_the_caller_in_a_container(runtime: str) -> None:
    # The ranks see CUDA_VISIBLE_DEVICES and the variables of the job, whose values are not on the command line
    variables = {"USER": "model", "TRITON_CACHE_DIR": "/scratch"}
    job = replace(samples.job(1), environment=variables)
    container = samples.container(runtime, caller={**samples.CALLER, "CUDA_VISIBLE_DEVICES": "2,3"})
    command = RENDERERS[runtime](job, container)
    assert environment(runtime, command).items() >= {**variables, "CUDA_VISIBLE_DEVICES": "2,3"}.items()
    passed = {name for name, value in samples.CALLER.items() if command.environment.get(name) == value}
    assert passed == {"HOME", "PATH"} and "model" not in " ".join(command.argv)
