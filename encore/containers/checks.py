"""Additional checks for runs in an image or in the user's Python."""

import re
import resource
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from encore import catalogue, environment, launchers, paths
from encore.catalogue import Choice
from encore.configuration import Configuration
from encore.containers import building, compatibility, engines, images, runtimes
from encore.containers.engines import Engine, Image
from encore.containers.runtimes import Target
from encore.errors import EncoreError
from encore.files import text_of
from encore.machine.interpreters import PythonInfo
from encore.machine.node import Node
from encore.machine.preflight import Check, refuse_failed

CAP_SYS_RESOURCE = 24
UNMOUNTABLE = re.compile(r"[,:\"\n]")  # Separators in engines' mount options


def check(target: Target, configuration: Configuration, machine: Node, folders: list[Path]) -> list[Check]:
    differences = check_as_submitted(target, configuration)
    if target.runtime == "host":
        with_gpus = configuration.get("device") == "gpu" and target.python is not None
        memory = [compatibility.check_memory(configuration, gpu) for gpu in machine.gpus[:1] if with_gpus]
        return [check_host(target, configuration), *memory, *differences]
    if target.problem is not None:
        return [Check.of(target.problem, target.runtime), *differences]
    checks = [Check("OK", "runtime", f"{target.runtime}: {target.reason}, {target.image}")]
    checks += check_folders(folders)
    if target.image_info is not None:
        checks.append(check_code(target.image_info, configuration.choice))
    checks += _check_software(target, configuration.choice)
    if target.python_info is not None and target.python_info.problems:
        hint = f"build it on another release: make build-{configuration.choice.name} BASE=RELEASE; encore images list"
        checks.append(
            Check("FAIL", "image", _cannot_import(target.image, target.python_info, configuration.choice), hint)
        )
    if configuration.get("device") == "gpu":
        checks += _check_gpu_run(target, configuration, machine)
    return [*checks, *differences]


def check_as_submitted(target: Target, configuration: Configuration) -> list[Check]:
    """Report differences from the submission that no setting can change; empty on CPUs."""
    if configuration.get("device") == "cpu":
        return []
    used = target.as_json()
    base = (used and used["base"]) or ""
    here = str(target.python or "the host's Python") if target.runtime == "host" else base
    return [
        Check("WARN", difference.what, f"not as submitted, {difference.submitted}, but {difference.here}")
        for difference in images.differences(configuration.choice, configuration.system, here)
    ]


def _check_software(target: Target, choice: Choice) -> list[Check]:
    # Check the versions reported by a Python, else the versions in the image's base release
    release = _release_of(target.image_info.labels if target.image_info else {}, choice)
    stated = [compatibility.check_software(release, choice)] if release is not None else []
    versions = {}
    if target.python_info:
        stack = environment.software(choice.implementation.framework, target.python_info.packages)
        versions = {
            "python": target.python_info.python,
            **{name.removesuffix("_version"): version for name, version in stack.items()},
        }
    too_old = compatibility.lacks(versions, choice.implementation)
    if any(check.level == "FAIL" for check in stated) or not too_old:
        return stated
    location = target.python or target.image
    message = f"{location} is too old for {choice.name}: {compatibility.describe(too_old, choice.implementation)}"
    return [Check("FAIL", "software", message, "use a newer release (docs/support.md) or another Python")]


def _cannot_import(location: object, info: PythonInfo, choice: Choice) -> str:
    message = "; ".join(f"{name} ({error})" for name, error in info.problems.items())
    return f"{location} cannot import {message} (expected: all that {choice.name} imports)"


def check_horovod(target: Target, configuration: Configuration, needed: str = "") -> list[Check]:
    """Check the communication of Horovod. ``needed`` is the controller for a launcher over several hosts.

    Horovod built by Encore always has Gloo.
    """
    framework, info = configuration.choice.implementation.framework, target.python_info
    if not launchers.by_horovod(framework) or (target.runtime == "host" and info is None):
        return []
    build = launchers.parse_check_build(info.check_build) if info else None
    location = target.python or target.image
    if info is None or build is None:
        message = f"{location} did not report the build options of Horovod; assuming Gloo"
        unknown = Check("WARN", "Horovod", message, "check it: horovodrun --check-build")
        return [] if info and info.problems else [unknown]
    controller = launchers.controller(build, info.mpirun, configuration.ranks)
    if needed not in ("", *build.controllers) or controller is None:
        mpirun = "" if info.mpirun else ", and no mpirun on PATH"
        message = f"Horovod {info.packages.get('horovod', '')} in {location} was built with {build}{mpirun}"
        expected = needed or "Gloo, or MPI with mpirun"
        hint = "use another image or Python, or build Horovod there with HOROVOD_WITH_GLOO=1"
        return [Check("FAIL", "Horovod", f"{message} (expected: {expected})", hint)]
    if configuration.get("device") == "gpu" and configuration.ranks > 1 and "NCCL" not in build.operations:
        hint = "use one that was built with HOROVOD_GPU_OPERATIONS=NCCL"
        return [Check("WARN", "Horovod", f"{build}: no NCCL, gradients travel through the host's memory", hint)]
    return [Check("OK", "Horovod", f"{needed or controller}: {build}")]


def check_preparation(target: Target, choice: Choice) -> list[Check]:
    """Check that the user's Python has the packages for preparing the toy data set."""
    if target.python_info is None or target.python is None:
        return []
    requirements = paths.REQUIREMENTS / images.find_row(choice).requirements
    packages = re.findall(r"^([\w.-]+)==", requirements.read_text(encoding="utf-8"), re.MULTILINE)
    has = {re.sub(r"[-_.]+", "-", name).lower() for name in target.python_info.packages}
    missing = [name for name in dict.fromkeys(packages) if name not in has]
    if not missing:
        return []
    # By this Python's pip: an environment of uv's has none.
    install = f"{sys.executable} -m pip --python {target.python} install --no-deps -r {requirements}"
    hint = f"{install}, or make it first: encore data prepare"
    message = f"{target.python} has no {', '.join(missing)}, which the toy data set needs"
    return [Check("FAIL", "data set", message, f"{hint} {choice.benchmark.name}")]


def check_host(target: Target, configuration: Configuration) -> Check:
    """Check the GPUs: environments of the host runtime use packages from PyPI, which are CPU builds."""
    if target.python is not None:
        return check_python(target, configuration)
    if configuration.get("device") != "gpu":
        return Check("OK", "runtime", f"host: {target.reason}")
    choice = configuration.choice
    message = f"the host runtime's {choice.implementation.framework} is built for CPUs ({target.reason})"
    hint = f"make build-{choice.name}, then run with --runtime docker; or name a Python with CUDA: --python FILE"
    return Check("FAIL", "runtime", message, hint)


def check_python(target: Target, configuration: Configuration) -> Check:
    choice, info = configuration.choice, target.python_info
    title = catalogue.framework(choice.implementation.framework).title
    if target.problem is not None or info is None:
        return Check.of(target.problem or EncoreError(f"{target.python} was not queried"), "runtime")
    if info.problems:
        install = f"{sys.executable} -m pip --python {target.python} install"
        hint = f"install it there, such as with {install}, or use a different Python"
        return Check("FAIL", "runtime", _cannot_import(target.python, info, choice), hint)
    too_old = [check for check in _check_software(target, choice) if check.level == "FAIL"]
    if too_old:
        return too_old[0]
    gpus = configuration.ranks_per_node if configuration.get("device") == "gpu" else 0
    if gpus and not info.cuda:
        message = f"{title} in {target.python} is built for CPUs (expected: with CUDA)"
        return Check("FAIL", "runtime", message, "use a Python whose framework has CUDA, or use --system cpu")
    if info.gpus < gpus:
        message = f"{title} in {target.python} sees {info.gpus} GPUs, {gpus} needed"
        return Check(
            "FAIL", "runtime", message, "compare its CUDA with the driver (nvidia-smi), see CUDA_VISIBLE_DEVICES"
        )
    cuda = f"CUDA {info.cuda}" if info.cuda else "no CUDA"
    return Check("OK", "runtime", f"host: {target.python}, Python {info.python}, {title} with {cuda}")


def named_python(file: Path, configuration: Configuration) -> Path:
    """Return the user's Python; EncoreError if requirements of the benchmark are missing."""
    python = file.expanduser().absolute()
    target = runtimes.query_python(Target(python=python), configuration.choice, {})
    refuse_failed([check_python(target, configuration)])
    return python


def check_folders(folders: Iterable[Path]) -> list[Check]:
    """Check for paths that an engine cannot mount."""
    wrong = (folder for folder in folders if UNMOUNTABLE.search(str(folder)))
    message, hint = "contains a comma, a colon or a quote", "use a different folder, or a link to it"
    return [Check("FAIL", "mount", f"{folder} {message}", hint) for folder in wrong]


def check_code(image: Image, choice: Choice) -> Check:
    if image.labels.get("encore.code") == building.code_id():
        return Check("OK", "image", f"contains the code of this checkout, {image.id[7:19]}")
    hint = f"make build-{choice.name}, which takes seconds"
    return Check("WARN", "image", "contains different training code than this checkout", hint)


def check_locked_memory(engine: Engine) -> Check:
    """Check that the engine can lift the limit on locked memory, which GPUs and adapters need."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # Whether processes of this machine can have CAP_SYS_RESOURCE at all
    bounds = re.search(r"^CapBnd:\s*([0-9a-f]+)", text_of("/proc/self/status"), re.MULTILINE)
    may_raise = not engine.rootless and (bounds is None or bool(int(bounds[1], 16) >> CAP_SYS_RESOURCE & 1))
    if hard == resource.RLIM_INFINITY or may_raise:
        return Check("OK", "locked memory", "unlimited in the container")
    message = f"{engine.name} cannot raise the limit of {hard // 1024} KiB"
    return Check("WARN", "locked memory", message, "start the engine with CAP_SYS_RESOURCE and LimitMEMLOCK=infinity")


def _check_gpu_run(target: Target, configuration: Configuration, machine: Node) -> list[Check]:
    checks: list[Check] = []
    engine, choice = target.engine, configuration.choice
    labels = target.image_info.labels if target.image_info else {}
    if "encore.standin" in labels:
        checks.append(Check("FAIL", "image", f"{target.image} is built on the CPU base", f"make build-{choice.name}"))
    if engine is not None:
        wrong = f"{engine.name} cannot pass GPUs to containers"
        checks += [Check("FAIL", "GPU toolkit", wrong, engines.NO_TOOLKIT)] if engine.gpu_access is None else []
        checks.append(check_locked_memory(engine))
    release = _release_of(labels, choice)
    gpus = machine.gpus[: configuration.ranks_per_node]
    if release is not None:
        checks += compatibility.check_gpus(release, gpus, choice.benchmark)
    return checks + [compatibility.check_memory(configuration, gpu) for gpu in gpus[:1]]


def _release_of(labels: Mapping[str, str], choice: Choice) -> images.Release | None:
    # An image's base release, from its label; for an image file the default release
    base = labels.get("org.opencontainers.image.base.name", "")
    locked = {entry["digest"]: reference for reference, entry in images.read_lock().items()}
    reference = locked.get(base.rpartition("@")[2], base)
    framework = choice.implementation.framework
    for release in images.catalogue().release:
        if release.framework == framework and release.reference == reference:
            return release
    return None if base else images.find_release(framework)


def refuse_other_image(content: Mapping[str, Any], target: Target) -> None:
    """Reject resuming an experiment in a different image."""
    began = content["image"]["id"] if content["image"] else None
    if began is not None and target.image_info is not None and target.image_info.id != began:
        raise EncoreError(
            f"{target.image} is not the image that the run started in",
            expected=f"{began[:19]}, built from commit {content['image']['revision']}",
            hint="build it from that commit, or start a new run",
        )
