"""Build the CPU stand-ins of NGC's images, for air-gapped machines."""

import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from encore import catalogue, environment, names, paths
from encore.containers import building, dockerfiles, engines, images
from encore.containers.building import OnLine
from encore.containers.engines import Engine
from encore.errors import EncoreError

ROOT_IMAGE = f"{building.PREFIX}/debian:bookworm"  # The bare Debian that the stand-ins are built on
# Of Debian bookworm: what is downloaded for the image must fit its Python, not this machine's
PLATFORM = {
    "python": "3.11",
    "mpi": "Open MPI 4.1.4",
    "distribution": "debian 12",
    "glibc": "2.36",
    "machine": platform.machine(),
}


def build(engine: Engine, framework: str | None, on_line: OnLine) -> str:
    """Build the CPU stand-in of a framework's NGC image, by default the first; return its name."""
    known = images.catalogue().standin
    framework = framework or next(iter(known))
    if framework not in known:
        raise names.unknown("stand-in", framework, known)
    if engines.inspect(engine, ROOT_IMAGE) is None:
        import_debian(engine, ROOT_IMAGE, on_line)
    download(framework, on_line)
    name = building.standin_name(framework)
    file, arguments = dockerfiles.path_of(f"standin/{framework}"), {"ROOT": ROOT_IMAGE}
    building.run_build(engine, file, [name], arguments, on_line)
    return name


def wheels(framework: str) -> Path:
    """Return where the packages for a stand-in are; its Dockerfile mounts the folder."""
    return paths.ROOT / "build" / "wheels" / framework


def compiled_horovod(framework: str) -> Path | None:
    """Return Horovod's wheel, if an environment of this machine compiled one that fits the stand-in."""
    entry = catalogue.framework(framework)
    if entry.horovod is None:
        return None
    requirements = paths.REQUIREMENTS / entry.requirements
    switches = environment.build_switches(entry.horovod, mpi=True)
    folder = environment.wheel_folder(framework, requirements, entry.horovod, PLATFORM, switches)
    return next(folder.glob("*.whl"), None)


def download_commands(framework: str) -> list[list[str]]:
    """Return the commands that fetch what a framework's environment pins, with this machine's settings of pip."""
    entry = catalogue.framework(framework)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    pip += ["--dest", str(wheels(framework))]
    for_image = ["--python-version", PLATFORM["python"], "--only-binary", ":all:"]
    commands = [[*pip, *for_image, "--requirement", str(paths.REQUIREMENTS / entry.requirements)]]
    if entry.horovod and not compiled_horovod(framework):
        # Its source: it is compiled in the image, against the image's framework and MPI.
        commands.append([*pip, "--no-binary", "horovod", f"horovod=={entry.horovod.version}"])
    return commands


def download(framework: str, on_line: OnLine) -> None:
    """Fetch a stand-in's packages anew: no older build of the same version may be left in the folder."""
    shutil.rmtree(wheels(framework), ignore_errors=True)
    wheels(framework).mkdir(parents=True)
    compiled = compiled_horovod(framework)
    if compiled:
        on_line(f"Horovod is compiled already: {compiled}")
        shutil.copy(compiled, wheels(framework))
    for command in download_commands(framework):
        code, _ = building.stream(command, on_line)
        if code != 0:
            raise EncoreError(
                f"the packages of {framework}'s stand-in could not be downloaded",
                hint="check the network and pip's settings (pip config list); pip's own words are above",
            )


def import_debian(engine: Engine, name: str, on_line: OnLine) -> None:
    """Make a bare Debian with debootstrap, from whatever mirror it chooses, and give it to the engine."""
    if shutil.which("debootstrap") is None:
        raise EncoreError("no debootstrap on PATH", hint="apt-get install debootstrap")
    if os.geteuid() != 0:
        raise EncoreError("debootstrap needs root", hint="make the stand-in as root: sudo make standin")
    with tempfile.TemporaryDirectory(prefix="encore-debian-") as temporary:
        folder = Path(temporary) / "root"
        command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(folder)]
        building.must(command, on_line, "the bare Debian could not be made")
        archive = Path(temporary) / "root.tar"
        building.must(["tar", "-C", str(folder), "-cf", str(archive), "."], on_line, "tar")
        imported = [engine.program, "import", str(archive), name]
        building.must(imported, on_line, "the bare Debian was not imported")
