"""Build images of benchmarks and the CPU stand-ins of their base images, render Dockerfiles, convert images."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from encore import catalogue, environment, installer, paths, release
from encore.catalogue import Choice
from encore.containers import compatibility, engines, images
from encore.containers.engines import Engine
from encore.environment import build_switches
from encore.errors import EncoreError, ExitCode, unknown_name
from encore.machine import node

OnLine = Callable[[str], None]  # Called with each output line of an engine

PREFIX = "localhost/encore"  # Prefix of all images built by Encore: no engine looks for such a name in a registry
PULL_GIB = 40.0  # Free space for a pull: an NGC image is about 20 GB, plus its compressed layers during extraction
BUILD_GIB = 8.0
TAIL_LINES = 40


def image_name(choice: Choice, tag: str = "latest") -> str:
    """Return ``localhost/encore/resnet:latest``: the image that was built last."""
    return f"{PREFIX}/{choice.name}:{tag}"


def standin_name(framework: str) -> str:
    """Return ``localhost/encore/standin-mxnet:latest``."""
    return f"{PREFIX}/standin-{framework}:latest"


def image_file(choice: Choice, runtime: str) -> Path:
    suffix = {"apptainer": "sif", "enroot": "sqsh", "pyxis": "sqsh"}[runtime]
    return paths.build_folder() / "images" / f"{choice.name}.{suffix}"


def code_id() -> str:
    """Return the hash of the training code, which an image carries as a label."""
    return release.digest(paths.BENCHMARKS)[:16]


# -- commands ----------------------------------------------------------------------------------------


def builder(engine: Engine) -> tuple[str, dict[str, str]]:
    """Return the client that builds with BuildKit, and its environment variables."""
    if engine.name == "podman":
        return engine.program, {}
    # A newer docker without the buildx plugin may hide the distribution's docker.
    for program in engines.programs("docker"):
        if engines.ask([program, "buildx", "version"]).returncode == 0:
            return program, {"DOCKER_BUILDKIT": "1"}
        version = re.search(r"version (\d+)", engines.ask([program, "--version"]).stdout)
        if version and 18 <= int(version.group(1)) < 23:
            return program, {"DOCKER_BUILDKIT": "1"}
    raise EncoreError(
        "docker: this client cannot use BuildKit", hint="install docker-buildx-plugin, or use ENGINE=podman"
    )


PROXIES = ("http_proxy", "https_proxy", "no_proxy")


def build_command(
    program: str, engine: str, file: Path, tags: Sequence[str], arguments: Mapping[str, str], secrets: Path
) -> list[str]:
    """Return the command that builds one Dockerfile; settings of this machine go in as secrets."""
    # By name: the value is taken from the environment, so engines keep it out of the image.
    proxies = [name for variable in PROXIES for name in (variable, variable.upper()) if name in os.environ]
    options = {
        "--tag": tags,
        "--build-arg": [*(f"{name}={value}" for name, value in arguments.items()), *proxies],
        "--secret": [f"id={secret.name},src={secret}" for secret in sorted(secrets.iterdir())],
    }
    # Podman's default format does not store the SHELL of Dockerfiles.
    command = [program, "build", *(["--format", "docker"] if engine == "podman" else ["--progress", "plain"])]
    command += [word for option, values in options.items() for value in values for word in (option, value)]
    return [*command, "--file", str(file), str(paths.ROOT)]


@contextmanager
def build_secrets() -> Iterator[Path]:
    """Yield a folder with pip settings and certificates of this machine for a build."""
    with tempfile.TemporaryDirectory(prefix="encore-build-") as temporary:
        folder = Path(temporary)
        settings = pip_settings()
        certificates = settings.pop("cert", "")
        if certificates and Path(certificates).is_file():
            shutil.copyfile(certificates, folder / "ca.pem")
            settings["cert"] = "/run/secrets/ca.pem"
        lines = ["[global]", *(f"{name} = {value}" for name, value in settings.items())]
        (folder / "pip.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
        yield folder


KEPT_SETTINGS = ("cert", "extra-index-url", "index-url", "proxy", "timeout", "trusted-host")


def pip_settings() -> dict[str, str]:
    """Return pip settings of this machine that are valid in a build; paths on this machine are not."""
    listed = installer.settings(engines.ask([sys.executable, "-m", "pip", "config", "list"]).stdout)
    settings = {name: [word for word in listed.get(name, ()) if not word.startswith("file:")] for name in KEPT_SETTINGS}
    settings["cert"] = settings["cert"] or os.environ.get("SSL_CERT_FILE", "").split()
    return {name: " ".join(values) for name, values in settings.items() if values}


def stream(command: Sequence[str], on_line: OnLine, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command and forward its output; return its exit code and its last lines."""
    tail: list[str] = []
    with subprocess.Popen(
        list(command),
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        for line in child.stdout or ():
            on_line(line.rstrip())
            tail = [*tail[-TAIL_LINES:], line]
    return child.returncode, "".join(tail)


def must(command: Sequence[str], on_line: OnLine, doing: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a command; EncoreError explains why it failed."""
    code, tail = stream(command, on_line, environment)
    if code != 0:
        error = engines.explain(tail, doing)
        error.exit_code = ExitCode.FAILED
        raise error


def run_build(engine: Engine, file: Path, tags: Sequence[str], arguments: Mapping[str, str], on_line: OnLine) -> None:
    """Build a Dockerfile with the settings of this machine; EncoreError explains why it failed."""
    check_space(engine, BUILD_GIB)
    program, environment = builder(engine)
    with build_secrets() as secrets:
        command = build_command(program, engine.name, file, tags, arguments, secrets)
        must(command, on_line, f"{tags[0]} could not be built", environment)


# -- bases -------------------------------------------------------------------------------------------


def check_space(engine: Engine, wanted_gib: float) -> None:
    if engine.data is None or not engine.data.is_dir():
        return
    free = shutil.disk_usage(engine.data).free / 2**30
    if free < wanted_gib:
        raise EncoreError(
            f"{engine.name}: {free:.1f} GiB free in {engine.data}",
            expected=f"{wanted_gib:g} GiB",
            hint=f"free some space ({engine.name} system prune), or move this folder to another disk",
        )


def check_release(choice: Choice, release: images.Release, force: bool) -> None:
    """Reject a release that is too old for the benchmark or, unless ``force``, for this machine's GPUs.

    Runs before the pull.
    """
    software = compatibility.check_software(release, choice)
    if software.level == "FAIL":
        raise EncoreError(software.found, hint=software.hint)
    if force:
        return
    for check in compatibility.check_gpus(release, node.this_node().gpus, choice.benchmark):
        if check.level == "FAIL":
            raise EncoreError(
                f"{check.name}: {check.found}",
                hint=f"{check.hint}; to build for another machine: --force",
            )


def ensure_base(choice: Choice, engine: Engine, name: str | None, force: bool, on_line: OnLine) -> tuple[str, str]:
    """Return the reference and tag of the base called ``name``, pulled if need be and held to images.lock."""
    framework = choice.implementation.framework
    if name == images.STANDIN:
        reference = standin_name(framework)
        if engines.inspect(engine, reference) is None:
            raise EncoreError(f"the CPU base {reference} is not built", hint=f"make standin FRAMEWORK={framework}")
        return reference, images.STANDIN
    release = images.find_release(framework, name)
    check_release(choice, release, force)
    digest = pull(engine, release, on_line)
    return f"{release.reference.rsplit(':', 1)[0]}@{digest}", release.release


def pull(engine: Engine, release: images.Release, on_line: OnLine, accept: bool = False) -> str:
    """Pull a release if missing. Return its digest, which must match images.lock unless ``accept`` is set."""
    reference = release.reference
    image = engines.inspect(engine, reference)
    if image is None:
        check_space(engine, PULL_GIB)
        must([engine.program, "pull", reference], on_line, f"{reference} could not be pulled")
        image = engines.inspect(engine, reference)
    digests = [entry.rsplit("@", 1)[1] for entry in (image.digests if image else ()) if "@" in entry]
    if not digests:
        raise EncoreError(
            f"{reference} has no digest: it did not come from a registry",
            hint=f"remove it ({engine.name} rmi {reference}) and pull it again",
        )
    if accept:
        images.record(reference, digests[0])
    images.check_lock(reference, digests[0])
    return digests[0]


def build(choice: Choice, engine: Engine, base_name: str | None, force: bool, on_line: OnLine) -> str:
    images.find_row(choice)
    base, tag = ensure_base(choice, engine, base_name, force, on_line)
    tags = [image_name(choice), image_name(choice, tag)]
    # The commit of the checkout, marked where files differ from it
    state = release.code_state()
    commit = (state["commit"] or "unknown") + ("-changed" if state["uncommitted_sha256"] else "")
    run_build(engine, dockerfile(choice.name), tags, {"BASE": base, "CODE": code_id(), "COMMIT": commit}, on_line)
    return tags[0]


# -- afterwards --------------------------------------------------------------------------------------


def convert_command(choice: Choice, runtime: str, program: str) -> list[str]:
    """Return the command that makes the image file which Apptainer or Enroot runs, from Docker's image."""
    file, name = str(image_file(choice, runtime)), image_name(choice)
    if runtime == "apptainer":
        return [program, "build", "--force", file, f"docker-daemon://{name}"]
    return [program, "import", "--output", file, f"dockerd://{name}"]


def not_built(choice: Choice, engine: str) -> EncoreError:
    return EncoreError(
        f"{engine} has no image {image_name(choice)}",
        hint=f"make build-{choice.name}" + (" ENGINE=podman" if engine == "podman" else ""),
    )


def dockerfile(name: str) -> Path:
    """Return a benchmark's Dockerfile; ``standin/NAME`` for a framework's CPU stand-in."""
    return images.CONTAINERS / name / "Dockerfile"


def dockerfiles() -> dict[Path, str]:
    """Render all Dockerfiles; return their content by path."""
    image_catalogue, choices = images.catalogue(), catalogue.choices()
    texts = {}
    for name, row in image_catalogue.image.items():
        framework = choices[name].implementation.framework
        release = images.find_release(framework)
        texts[dockerfile(name)] = _render("Dockerfile.j2", framework, name=name, row=row, release=release)
    for framework, standin in image_catalogue.standin.items():
        horovod = catalogue.framework(framework).horovod
        texts[dockerfile(f"standin/{framework}")] = _render(
            "standin/Dockerfile.j2",
            framework,
            name=framework,
            row=standin,
            benchmark=next(n for n, choice in choices.items() if choice.implementation.framework == framework),
            switches=build_switches(horovod, mpi=True) if horovod else {},
        )
    return texts


def _render(template: str, framework: str, **variables: object) -> str:
    # Imported here because most commands import this module, but only the documentation renders Dockerfiles.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    jinja = Environment(
        loader=FileSystemLoader(images.CONTAINERS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return jinja.get_template(template).render(framework=catalogue.framework(framework), **variables)


ROOT_IMAGE = f"{PREFIX}/debian:bookworm"  # Minimal Debian, base of the stand-ins
# Debian bookworm: downloads must match the Python of the image, not of this machine
PLATFORM = {
    "python": "3.11",
    "mpi": "Open MPI 4.1.4",
    "distribution": "debian 12",
    "glibc": "2.36",
    "machine": platform.machine(),
}


def build_standin(engine: Engine, framework: str | None, on_line: OnLine) -> str:
    """Build the CPU stand-in for a framework's NGC image, by default for the first framework; return its name."""
    standins = images.catalogue().standin
    framework = framework or next(iter(standins))
    if framework not in standins:
        raise unknown_name("stand-in", framework, standins)
    if engines.inspect(engine, ROOT_IMAGE) is None:
        import_debian(engine, ROOT_IMAGE, on_line)
    download(framework, on_line)
    name = standin_name(framework)
    file, arguments = dockerfile(f"standin/{framework}"), {"ROOT": ROOT_IMAGE}
    run_build(engine, file, [name], arguments, on_line)
    return name


def wheels(framework: str) -> Path:
    """Return the folder with packages for a stand-in, which its Dockerfile mounts."""
    return paths.ROOT / "build" / "wheels" / framework


def compiled_horovod(framework: str) -> Path | None:
    """Return a compatible Horovod wheel compiled for an environment of this machine, if any."""
    entry = catalogue.framework(framework)
    if entry.horovod is None:
        return None
    requirements = paths.REQUIREMENTS / entry.requirements
    switches = environment.build_switches(entry.horovod, mpi=True)
    folder = environment.wheel_folder(framework, requirements, entry.horovod, PLATFORM, switches)
    return next(folder.glob("*.whl"), None)


# requirements/pytorch.txt lists no hash of 2.13.0+cpu, PyTorch's CPU build. With hashes, pip selects the CUDA build.
_TORCH = re.compile(rf"^(torch==\S+)(?:{environment.HASH.pattern})*\n", re.MULTILINE)
PINS, HASHED_PINS = "requirements.txt", "hashed.txt"  # In the folder of wheels: installed, and downloaded with hashes


def download_commands(framework: str) -> list[list[str]]:
    """Return commands that download a framework environment's pinned packages with this machine's pip settings."""
    entry, folder = catalogue.framework(framework), wheels(framework)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    pip += ["--dest", str(folder)]
    for_image = [*pip, "--python-version", PLATFORM["python"], "--only-binary", ":all:"]
    commands = [[*for_image, "--require-hashes", "--requirement", str(folder / HASHED_PINS)]]
    torch = _TORCH.search((paths.REQUIREMENTS / entry.requirements).read_text(encoding="utf-8"))
    if torch:
        commands.append([*for_image, torch[1]])
    if entry.horovod and not compiled_horovod(framework):
        # Source distribution: it is compiled in the image, against the image's framework and MPI.
        source = ["--require-hashes", "--requirement", str(environment.HOROVOD_SOURCE)]
        commands.append([*pip, "--no-binary", "horovod", *source])
    return commands


def download(framework: str, on_line: OnLine) -> None:
    """Download a stand-in's packages into an empty folder, so that no older build of the same version remains."""
    folder, requirements = wheels(framework), paths.REQUIREMENTS / catalogue.framework(framework).requirements
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = requirements.read_text(encoding="utf-8")
    (folder / PINS).write_text(environment.HASH.sub("", text), encoding="utf-8")
    (folder / HASHED_PINS).write_text(_TORCH.sub("", text), encoding="utf-8")
    compiled = compiled_horovod(framework)
    if compiled:
        on_line(f"Horovod is already compiled: {compiled}")
        shutil.copy(compiled, folder)
    for command in download_commands(framework):
        code, _ = stream(command, on_line)
        if code != 0:
            raise EncoreError(
                f"the packages of {framework}'s stand-in could not be downloaded",
                hint="check the network and pip's settings (pip config list); the output of pip is above",
            )


def import_debian(engine: Engine, name: str, on_line: OnLine) -> None:
    """Create a minimal Debian with debootstrap and import it into the engine."""
    if shutil.which("debootstrap") is None:
        raise EncoreError("no debootstrap on PATH", hint="apt-get install debootstrap")
    if os.geteuid() != 0:
        raise EncoreError("debootstrap needs root", hint="build the stand-in as root: sudo make standin")
    with tempfile.TemporaryDirectory(prefix="encore-debian-") as temporary:
        folder = Path(temporary) / "root"
        command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(folder)]
        must(command, on_line, "the minimal Debian could not be created")
        archive = Path(temporary) / "root.tar"
        must(["tar", "-C", str(folder), "-cf", str(archive), "."], on_line, "tar")
        must([engine.program, "import", str(archive), name], on_line, "the minimal Debian could not be imported")
