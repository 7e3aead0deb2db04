"""Build the CPU stand-ins of NGC's images, for machines that reach no registry."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from encore import catalogue, names, paths
from encore.containers import building, engines, images
from encore.containers.building import OnLine
from encore.containers.engines import Engine
from encore.errors import EncoreError

ROOT_IMAGE = f"{building.PREFIX}/debian:bookworm"
"""The bare Debian that the stand-ins are built on."""
PYTHON = "3.11"
"""Of Debian bookworm: what is downloaded for the image must fit its Python, not this machine's."""
STANDINS = ("mxnet", "pytorch", "tensorflow")
"""Frameworks whose NGC image has a CPU stand-in."""
DOWNLOADED = ("pytorch", "tensorflow")
"""Stand-ins whose Python packages come from this machine; MXNet's build asks the package index itself."""


def build(engine: Engine, framework: str, on_line: OnLine) -> str:
    """Build the CPU stand-in of a framework's NGC image; returns its name."""
    if framework not in STANDINS:
        raise names.unknown("stand-in", framework, STANDINS)
    file = images.CONTAINERS / "standin" / framework / "Dockerfile"
    building.check_space(engine, building.BUILD_GIB)
    if engines.inspect(engine, ROOT_IMAGE) is None:
        import_debian(engine, ROOT_IMAGE, on_line)
    program, environment = building.builder(engine)
    if framework in DOWNLOADED:
        download(framework, on_line)
    arguments = {"ROOT": ROOT_IMAGE}
    horovod = _horovod(framework)
    if horovod:
        arguments["HOROVOD_VERSION"] = horovod
    name = building.standin_name(framework)
    with building.build_secrets() as secrets:
        command = building.build_command(program, engine.name, file, [name], arguments, secrets)
        building.must(command, environment, on_line, "the stand-in could not be built")
    return name


def _horovod(framework: str) -> str:
    """The version of Horovod in a framework's environment; empty where there is none."""
    entry = catalogue.read_toml(paths.REQUIREMENTS / "environments.toml")[framework]
    return str(entry.get("horovod", {}).get("version", ""))


def wheels(framework: str) -> Path:
    """Where the packages for a stand-in lie; its Dockerfile mounts the folder."""
    return paths.ROOT / "build" / "wheels" / framework


def download_commands(framework: str) -> list[list[str]]:
    """The commands that fetch what a framework's environment pins, with this machine's settings of pip."""
    folder = str(wheels(framework))
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    requirements = str(paths.REQUIREMENTS / f"{framework}.txt")
    for_image = ["--python-version", PYTHON, "--only-binary", ":all:"]
    commands = [[*pip, *for_image, "--dest", folder, "--requirement", requirements]]
    horovod = _horovod(framework)
    if horovod:
        # Its source: it is compiled in the image, against the image's framework and MPI.
        commands.append([*pip, "--no-binary", "horovod", "--dest", folder, f"horovod=={horovod}"])
    return commands


def download(framework: str, on_line: OnLine) -> None:
    """Fetch a stand-in's packages anew: an older build of the same version must not stay beside them."""
    shutil.rmtree(wheels(framework), ignore_errors=True)
    for command in download_commands(framework):
        code, _ = building.stream(command, {}, on_line)
        if code != 0:
            raise EncoreError(
                f"the packages of {framework}'s stand-in could not be downloaded",
                remedy="check the network and pip's settings (pip config list); pip's own words are above",
            )


def import_debian(engine: Engine, name: str, on_line: OnLine) -> None:
    """Make a bare Debian with debootstrap, from whatever mirror it chooses, and give it to the engine."""
    if shutil.which("debootstrap") is None:
        raise EncoreError("no debootstrap on PATH", remedy="apt-get install debootstrap")
    if os.geteuid() != 0:
        raise EncoreError("debootstrap needs root", remedy="make the stand-in as root: sudo make standin")
    with tempfile.TemporaryDirectory(prefix="encore-debian-") as temporary:
        folder = Path(temporary) / "root"
        command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(folder)]
        building.must(command, {}, on_line, "the bare Debian could not be made")
        archive = Path(temporary) / "root.tar"
        building.must(["tar", "-C", str(folder), "-cf", str(archive), "."], {}, on_line, "tar")
        imported = [engine.program, "import", str(archive), name]
        building.must(imported, {}, on_line, "the bare Debian was not imported")
