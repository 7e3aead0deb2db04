"""Where a run takes place: on the host or in an image of one of the container runtimes, and why there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore import data, files, names, paths
from encore.catalogue import Choice
from encore.configuration import Configuration
from encore.containers import building, compatibility, engines, images
from encore.containers.engines import Engine, Image
from encore.containers.renderers import apptainer, docker, enroot, podman, pyxis
from encore.containers.renderers.container import Container
from encore.errors import EncoreError
from encore.job import Command, Job, Mount
from encore.machine.node import Node
from encore.machine.preflight import Check

RENDERERS = {
    "pyxis": pyxis.render,
    "docker": docker.render,
    "podman": podman.render,
    "apptainer": apptainer.render,
    "enroot": enroot.render,
}
RUNTIMES = ("auto", "host", *RENDERERS)
UNMOUNTABLE = re.compile(r"[,:\"\n]")
"""Characters that divide the parts of a mount on engines' command lines."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A runtime with all that was found out about it."""

    runtime: str = "host"
    why: str = "asked for"
    engine: Engine | None = None
    image: str = ""
    """Name or file of the image."""
    found: Image | None = None
    problem: EncoreError | None = None
    """Why nothing can be started there; a dry run shows the command all the same."""

    def as_json(self) -> dict[str, Any] | None:
        """Return what the run passport says about the image."""
        if self.runtime == "host":
            return None
        labels = dict(self.found.labels) if self.found else {}
        return {
            "name": self.image,
            "id": self.found.id if self.found else None,
            "digests": list(self.found.digests) if self.found else [],
            "base": labels.get("org.opencontainers.image.base.name"),
            "revision": labels.get("org.opencontainers.image.revision"),
            "code": labels.get("encore.code"),
        }


ON_HOST = Target()


def choose(
    runtime: str, choice: Choice, machine: Node, device: str, image: str | None = None, in_slurm: bool = False
) -> Target:
    """Return the runtime that was asked for, or with ``auto`` the first that has an image of the benchmark."""
    if runtime not in RUNTIMES:
        raise names.unknown("runtime", runtime, RUNTIMES)
    if runtime != "auto":
        return _look(runtime, choice, "asked for", image)
    here = [name for name in RENDERERS if _is_here(name, in_slurm)]
    tried = [_look(name, choice, f"{name} has the image", image) for name in here]
    for target in tried:
        if target.problem is None:
            return target
    if tried and machine.gpus and device == "gpu":
        return tried[0]
    return Target(runtime="host", why=f"no container engine has an image of {choice.name}")


def _is_here(name: str, in_slurm: bool) -> bool:
    if name == "pyxis":
        with contextlib.suppress(EncoreError):
            return in_slurm and bool(engines.connect(name))
        return False
    return bool(engines.programs(name))


def _look(runtime: str, choice: Choice, why: str, image: str | None) -> Target:
    """Return what there is of one runtime; never raises, so that a dry run can show the command anywhere."""
    if runtime == "host":
        return Target(runtime="host", why=why)
    built = runtime in engines.BUILDERS
    reference = image or (building.image_name(choice) if built else str(building.image_file(choice, runtime)))
    engine = found = problem = None
    try:
        engine = engines.connect(runtime)
        found = engines.inspect(engine, reference) if built else None
        if built and found is None:
            problem = building.not_built(choice, runtime)
        elif not built and not _is_in_registry(runtime, reference) and not Path(reference).exists():
            remedy = f"encore images convert {choice.name} --to {'enroot' if runtime == 'pyxis' else runtime}"
            problem = EncoreError(f"no image file {reference}", remedy=remedy)
    except EncoreError as error:
        problem = error
    return Target(runtime=runtime, why=why, engine=engine, image=reference, found=found, problem=problem)


def _is_in_registry(runtime: str, reference: str) -> bool:
    """Return whether Pyxis imports the image itself: ``nvcr.io#nvidia/mxnet:24.06-py3``; a file is an absolute path."""
    return runtime == "pyxis" and not reference.startswith(("/", "."))


def render(target: Target, job: Job, name: str, caller: Mapping[str, str]) -> Command:
    """Return the job as a command of the target's container runtime."""
    container = Container(
        image=target.image,
        name=name,
        user=os.getuid(),
        group=os.getgid(),
        caller=caller,
        program=target.engine.program if target.engine else "",
        rootless=target.engine.rootless if target.engine else False,
        gpu_access=(target.engine.gpu_access if target.engine else None) or "gpus",
        infiniband=engines.infiniband() if job.gpus else (),
        limits=_limits(),
    )
    return RENDERERS[target.runtime](job, container)


def preparation(target: Target, benchmark: str, directory: Path, wanted: data.Preparation) -> Command:
    """Return the command that prepares a data set in a container; it sees the raw data and the folder to write."""
    folder = directory.absolute()
    mounts = [Mount(folder, str(folder), False)]
    if wanted.source is not None:
        mounts.append(Mount(wanted.source.absolute(), str(wanted.source.absolute()), True))
    prepare = data.prepare_command("python", benchmark, folder, wanted)
    job = Job(argv=(*prepare, "--progress", "json"), environment={}, mounts=tuple(mounts), ranks=1, gpus=0)
    return render(target, job, container_name(folder), os.environ)


MANIFESTS = ("/opt/encore/python-packages.txt", "/opt/encore/system-packages.txt")
"""Names and versions of all packages in an image: its build writes them."""
IMPORT_SECONDS = 600
"""Pyxis and Enroot may have to unpack an image of 20 GB first."""


def packages(target: Target, outer: tuple[str, ...] = ()) -> dict[str, str]:
    """Return versions of all packages in the image, by name; none if its manifests cannot be read.

    Each image is asked once: its id names the answer. ``outer`` starts the container where Slurm has to.
    """
    known = paths.cache_folder() / "images" / f"{target.found.id}.json" if target.found else None
    if known is not None and known.exists():
        return files.read_json(known)
    job = Job(argv=("cat", *MANIFESTS), environment={}, mounts=(), ranks=1, gpus=0, outer=outer)
    command = render(target, job, container_name(Path(f"packages_{os.getpid()}")), os.environ)
    try:
        found = parse_manifests(engines.ask(command.argv, IMPORT_SECONDS).stdout)
    except EncoreError:
        return {}
    if known is not None and found:
        known.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(known, found)
    return found


def parse_manifests(text: str) -> dict[str, str]:
    """Return versions by package; other lines, such as the image's greeting, are passed over."""
    found = {}
    for name, sign, version in re.findall(r"^([\w.+-]+)(==?)(\S+)$", text, re.MULTILINE):
        # A version of Debian's: epoch, colon, the software's own version, dash, revision.
        found[name] = version if sign == "==" else re.sub(r"^\d+:|-[^-]*$", "", version)
    return found


def _limits() -> dict[str, int]:
    """Return the most open files and processes that a container of the caller's may have."""
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    # Podman itself gives up what it has beyond the kernel's number of processes.
    with contextlib.suppress(OSError, ValueError):
        most = int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii"))
        processes = most if processes == resource.RLIM_INFINITY else min(processes, most)
    return {"nofile": open_files, "nproc": processes}


def container_name(folder: Path) -> str:
    """Return a name that no other container has, and that says which run it belongs to."""
    # Run folders of two results folders may have the same name.
    distinction = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
    words = re.sub(r"[^a-zA-Z0-9_.-]", "-", f"{folder.parent.name}-{folder.name.rsplit('_', 1)[-1]}")
    return f"encore-{words}-{distinction}"


# -- checks ------------------------------------------------------------------------------------------


def check(target: Target, configuration: Configuration, machine: Node, folders: list[Path]) -> list[Check]:
    """Return all checks of a run in a container, in addition to those of any run."""
    if target.runtime == "host":
        return [check_host(target, configuration)]
    if target.problem is not None:
        problem = target.problem
        found = problem.found + (f" (expected: {problem.expected})" if problem.expected else "")
        return [Check("FAIL", target.runtime, found, problem.remedy)]
    checks = [Check("OK", "runtime", f"{target.runtime}: {target.why}, {target.image}")]
    checks += check_folders(folders)
    if target.found is not None:
        checks.append(check_code(target.found, configuration.choice))
    if configuration.get("device") == "gpu":
        checks += _check_gpu_run(target, configuration, machine)
    return checks


def check_host(target: Target, configuration: Configuration) -> Check:
    """Check the GPUs: the host runtime's environments hold what PyPI has, which is built for CPUs."""
    if configuration.get("device") != "gpu":
        return Check("OK", "runtime", f"host: {target.why}")
    choice = configuration.choice
    found = f"the host runtime's {choice.implementation.framework} is built for CPUs ({target.why})"
    return Check("FAIL", "runtime", found, f"make build-{choice.name}, then run with --runtime docker")


def check_folders(folders: Iterable[Path]) -> list[Check]:
    """Check for folders whose names an engine would take apart."""
    remedy = "give a folder without, or a link to it"
    return [
        Check("FAIL", "mount", f"{folder} has a comma, a colon or a quote in its name", remedy)
        for folder in folders
        if UNMOUNTABLE.search(str(folder))
    ]


def check_code(image: Image, choice: Choice) -> Check:
    """Compare the training code in the image with that of the checkout."""
    if image.labels.get("encore.code") == building.code_id():
        return Check("OK", "image", f"holds the code of this checkout, {image.id[7:19]}")
    remedy = f"make build-{choice.name}, which takes seconds"
    return Check("WARN", "image", "holds other training code than this checkout", remedy)


def check_locked_memory(engine: Engine) -> Check:
    """Check that the engine can lift the limit on locked memory, which GPUs and adapters need."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    may_raise = not engine.rootless and _engine_may_raise_limits()
    if hard == resource.RLIM_INFINITY or may_raise:
        return Check("OK", "locked memory", "unlimited in the container")
    found = f"{engine.name} may not lift the limit of {hard // 1024} KiB"
    return Check("WARN", "locked memory", found, "start the engine with CAP_SYS_RESOURCE and LimitMEMLOCK=infinity")


CAP_SYS_RESOURCE = 24


def _engine_may_raise_limits() -> bool:
    """Return whether processes of this machine can have CAP_SYS_RESOURCE at all."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    bounds = re.search(r"^CapBnd:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bounds is None or bool(int(bounds.group(1), 16) >> CAP_SYS_RESOURCE & 1)


def _check_gpu_run(target: Target, configuration: Configuration, machine: Node) -> list[Check]:
    checks: list[Check] = []
    engine, choice = target.engine, configuration.choice
    labels = target.found.labels if target.found else {}
    if "encore.standin" in labels:
        remedy = f"make build-{choice.name}"
        checks.append(Check("FAIL", "image", f"{target.image} is built on the CPU base", remedy))
    if engine is not None and engine.gpu_access is None:
        found = f"{engine.name} cannot hand GPUs to containers"
        checks.append(Check("FAIL", "GPU toolkit", found, engines.NO_TOOLKIT))
    if engine is not None:
        checks.append(check_locked_memory(engine))
    release = _release_of(labels, choice)
    gpus = machine.gpus[: configuration.ranks_per_node]
    if release is not None:
        checks += compatibility.check_gpus(release, gpus, choice.benchmark)
    return checks + [compatibility.check_memory(configuration, gpu) for gpu in gpus[:1]]


def _release_of(labels: Mapping[str, str], choice: Choice) -> images.Release | None:
    """Return the release that an image was built on: by its label, and for a file that has none, the default."""
    base = labels.get("org.opencontainers.image.base.name", "")
    locked = {entry["digest"]: reference for reference, entry in images.read_lock().items()}
    reference = locked.get(base.rpartition("@")[2], base)
    framework = choice.implementation.framework
    for release in images.catalogue().release:
        if release.framework == framework and release.reference == reference:
            return release
    return None if base else images.find_release(framework)


def refuse_other_image(content: Mapping[str, Any], target: Target) -> None:
    """Check that an experiment resumes in the image that it began in."""
    began = content["image"]["id"] if content["image"] else None
    if began is not None and target.found is not None and target.found.id != began:
        raise EncoreError(
            f"{target.image} is not the image that the run began in",
            expected=f"{began[:19]}, built from commit {content['image']['revision']}",
            remedy="build it from that commit, or start a new run",
        )
