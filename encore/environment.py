"""Framework environments of the `host` runtime, built by uv, one process at a time.

Environments are in the user's cache. The key is a hash of all inputs: changed requirements create a new environment,
and checkouts share environments. Interrupted builds start over from uv's cache. Horovod, which takes a minute to
compile, is cached as a wheel; its key only contains dependencies of the compiled code.
"""

import contextlib
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from filelock import FileLock, Timeout

from encore import catalogue, installer, paths
from encore.catalogue import Horovod
from encore.errors import EncoreError, ExitCode

# CMake toolchain file that compiles Horovod in fewer translation units.
TOOLCHAIN = paths.REQUIREMENTS / "horovod.cmake"
HOROVOD_SOURCE = paths.REQUIREMENTS / "horovod.txt"

HASH = re.compile(r" \\\n +--hash=\S+")
OnStep = Callable[[str], None]  # Called with a short step description
PROGRESS_SECONDS = 5.0  # Interval between progress reports on a running command
MINOR_VERSION = re.compile(r"3\.\d+")


def this_platform(python: str, mpi: bool) -> dict[str, str]:
    # Dependencies of compiled code in addition to sources and framework; ``python`` is such as 3.11.
    release = {}
    with contextlib.suppress(OSError):
        release = platform.freedesktop_os_release()
    return {
        "python": python,
        "mpi": _mpi_version() if mpi else "",
        "distribution": f"{release.get('ID', '')} {release.get('VERSION_ID', '')}",
        "glibc": platform.libc_ver()[1],
        "machine": platform.machine(),
    }


@dataclass(frozen=True, kw_only=True)
class Environment:
    framework: str
    requirements: Path
    interpreter: str  # Path, or a version such as 3.11 that uv finds or downloads
    horovod: Horovod | None
    mpi: bool
    disk_gib: float
    check: str

    @property
    def folder(self) -> Path:
        # Without hashes: all files for the same version create the same environment
        pins = HASH.sub("", self.requirements.read_text(encoding="utf-8"))
        horovod = self.horovod.model_dump(by_alias=True) if self.horovod else {}
        content = [pins, _version(self.interpreter), self.check, json.dumps(horovod, sort_keys=True)]
        content += [str(self.mpi), TOOLCHAIN.read_text(encoding="utf-8")] if self.horovod else []
        key = hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]
        return paths.cache_folder() / "environments" / f"{self.framework}-{key}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def is_ready(self) -> bool:
        return (self.folder / "check.done").exists()


@cache
def _version(interpreter: str) -> str:
    # ``3.11``; empty if the interpreter does not run. uv installs an interpreter that is given as a version.
    if MINOR_VERSION.fullmatch(interpreter):
        return interpreter
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


@cache
def _mpi_version() -> str:
    # Version reported by the MPI compiler: Open MPI's option first, then MPICH's.
    for option in ("--showme:version", "-v"):
        done = subprocess.run(["mpicc", option], capture_output=True, text=True, check=False)
        match = re.search(r"(Open MPI|MPICH version) [\w.]+", done.stdout)
        if match:
            return match[0]
    return "unknown"


def mpi_problem() -> str:
    """Return the reason why Horovod cannot be built with MPI here, or an empty string; compiles a one-line program."""
    compiler = shutil.which("mpicc")
    return _probe_mpi(compiler) if compiler else "mpicc is not installed"


@cache
def _probe_mpi(compiler: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text("#include <mpi.h>\nint main(void) { return MPI_VERSION == 0; }\n", encoding="ascii")
        command = [compiler, str(source), "-o", str(source.with_suffix(""))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0].replace(f"{source}:", "")
    return f"mpicc cannot compile an MPI program ({message})"


def _find_interpreter(supported: Sequence[str]) -> str:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if running in supported:
        return sys.executable
    candidates = {version: shutil.which(f"python{version}") for version in supported}
    # A version manager's shim has every name; it may not run.
    working = (path for version, path in candidates.items() if path and _version(path) == version)
    return next(working, supported[0])


def describe(framework: str, beside: str | None = None) -> Environment:
    """Return the environment of ``framework`` on this machine.

    Packages that are added to those of another framework, ``beside``, need its version of Python.
    """
    entry = catalogue.framework(framework)
    return Environment(
        framework=framework,
        requirements=paths.REQUIREMENTS / entry.requirements,
        interpreter=_find_interpreter(entry.python if beside is None else catalogue.framework(beside).python),
        horovod=entry.horovod,
        mpi=entry.horovod is not None and not mpi_problem(),
        disk_gib=entry.disk_gib,
        check=entry.check,
    )


def ensure_environment(framework: str, on_step: OnStep | None = None, beside: str | None = None) -> Path:
    """Return the Python interpreter of the framework's environment; build it if required. ``beside``: see `describe`.

    Raises EncoreError with one clear line for a missing compiler, an unsuitable Python, no network, a full disk.
    """
    environment = describe(framework, beside)
    if environment.is_ready:
        return environment.python
    report = on_step or (lambda text: None)
    environment.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(environment.folder.with_suffix(".lock")))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"another process is making the {framework} environment; waiting for it")
        lock.acquire()
    try:
        if not environment.is_ready:
            _make(environment, report)
    finally:
        lock.release()
    return environment.python


def packages(python: Path) -> dict[str, str]:
    folders = [str(folder) for folder in python.parent.parent.glob("lib/python*/site-packages")]
    return {
        distribution.metadata["Name"]: distribution.version
        for distribution in importlib.metadata.distributions(path=folders)
    }


def software(framework: str, installed: Mapping[str, str]) -> dict[str, str]:
    """Return the versions in a system description, with MLPerf's names such as dali_version; empty if unknown.

    ``installed`` are the packages in an environment or image, by name.
    """
    matches = {
        name: [package for pattern in patterns for package in fnmatch.filter(installed, pattern)]
        for name, patterns in catalogue.framework(framework).software.items()
    }
    return {f"{name}_version": installed[packages[0]] if packages else "" for name, packages in matches.items()}


# -- Horovod -----------------------------------------------------------------------------------------


def build_switches(horovod: Horovod, mpi: bool) -> dict[str, str]:
    without = (f"WITHOUT_{name}" for name in horovod.without)
    names = (f"WITH_{horovod.with_}", *without, "WITH_GLOO", "WITH_MPI" if mpi else "WITHOUT_MPI")
    return {f"HOROVOD_{name}": "1" for name in names}


def wheel_folder(
    framework: str, requirements: Path, horovod: Horovod, built_on: Mapping[str, str], switches: Mapping[str, str]
) -> Path:
    patterns = catalogue.framework(framework).software[framework]
    pins = re.findall(r"^[\w.-]+==\S+", requirements.read_text(encoding="utf-8"), re.MULTILINE)
    compiled_against = [pin for pin in pins if any(fnmatch.fnmatch(pin.split("==")[0], p) for p in patterns)]
    toolchain = TOOLCHAIN.read_text(encoding="utf-8")
    content = [compiled_against, horovod.version, dict(built_on), dict(switches), toolchain]
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return paths.cache_folder() / "wheels" / f"horovod-{framework}-{key}"


def _wheels(environment: Environment, horovod: Horovod) -> Path:
    # User settings, such as HOROVOD_GPU_OPERATIONS, also affect the build.
    user_variables = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    switches = {**user_variables, **build_switches(horovod, environment.mpi)}
    here = this_platform(_version(environment.interpreter), environment.mpi)
    return wheel_folder(environment.framework, environment.requirements, horovod, here, switches)


def _compile(environment: Environment, horovod: Horovod, folder: Path, run: Callable[[Sequence[str]], None]) -> None:
    writing = folder.with_suffix(".writing")
    shutil.rmtree(writing, ignore_errors=True)
    # Disable pip's cache: wheels compiled for other frameworks or MPIs have the same name.
    options = ["--no-cache-dir", "--no-binary", "horovod", "--no-build-isolation", "--no-deps", "--require-hashes"]
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python), "wheel", *options]
    run([*pip, "--wheel-dir", str(writing), "--requirement", str(HOROVOD_SOURCE)])
    writing.rename(folder)


# -- steps -------------------------------------------------------------------------------------------


def check_compiler(environment: Environment) -> None:
    """Raise EncoreError if Horovod must be compiled and g++ or make is missing."""
    if not environment.horovod or _wheels(environment, environment.horovod).is_dir():
        return
    missing = [name for name in ("g++", "make") if shutil.which(name) is None]
    if missing:
        raise EncoreError(
            f"no {' and no '.join(missing)} on PATH",
            expected="a C++ compiler and make, to compile Horovod",
            hint="apt-get install g++ make (Debian, Ubuntu) and try again",
        )


def _make(environment: Environment, report: OnStep) -> None:
    horovod, python = environment.horovod, environment.python
    check_compiler(environment)
    wheels = _wheels(environment, horovod) if horovod else None
    free = shutil.disk_usage(environment.folder.parent).free / 2**30
    if free < environment.disk_gib:
        raise EncoreError(
            f"{free:.1f} GiB free for the environment in {environment.folder.parent}",
            expected=f"{environment.disk_gib} GiB",
            hint="free some space, or set XDG_CACHE_HOME to a folder on another disk",
        )
    report(f"making the {environment.framework} environment: {environment.requirements.name}")
    if MINOR_VERSION.fullmatch(environment.interpreter):
        report(f"no Python {environment.interpreter} on PATH: installing it with uv")
    run = partial(_run, environment, report)
    run(installer.venv_command(environment.interpreter, environment.folder))
    # Not --require-hashes: uv does not find the hash of 2.13.0+cpu, PyTorch's CPU build, for the pinned 2.13.0
    pins = ("--no-deps", "--verify-hashes", "--requirements", str(environment.requirements))
    run(installer.install_command(python, *pins))
    if horovod and wheels:
        wheels.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(wheels.with_suffix(".lock"))):
            if not wheels.is_dir():
                report(f"compiling Horovod {horovod.version}, about a minute on 2 cores")
                if not environment.mpi:
                    report(f"Horovod is built with Gloo only: {mpi_problem()}")
                _compile(environment, horovod, wheels, run)
        run(installer.install_command(python, "--no-deps", *map(str, wheels.glob("*.whl"))))
    run([str(python), "-c", environment.check])
    (environment.folder / "check.done").touch()


def _run(environment: Environment, report: OnStep, command: Sequence[str]) -> None:
    log = environment.folder.with_suffix(".log")
    variables = {
        **installer.environment(),
        **(build_switches(environment.horovod, environment.mpi) if environment.horovod else {}),
        "PATH": f"{environment.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        # Horovod's setup.py always starts eight compilers; flags from a surrounding make do not apply.
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "CMAKE_TOOLCHAIN_FILE": str(TOOLCHAIN),
    }
    with log.open("ab") as file:
        file.write(f"\n$ {' '.join(command)}\n".encode())
        file.flush()
        # New session: Ctrl-C stops this process, which then stops the child and prints how to continue.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        try:
            code = _wait(child, report)
        except KeyboardInterrupt:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise EncoreError(
                f"interrupted while making the {environment.framework} environment",
                hint="run the same command again: finished downloads and builds are kept",
                exit_code=ExitCode.INTERRUPTED,
            ) from None
    if code != 0:
        raise _explain(environment, log)


def _wait(child: subprocess.Popen[bytes], report: OnStep) -> int:
    start = time.monotonic()
    while True:
        try:
            return child.wait(PROGRESS_SECONDS)
        except subprocess.TimeoutExpired:
            report(f"  {time.monotonic() - start:.0f} s")


AGAIN = "check the network and pip's settings (pip config list), and run the same command again"
# Output of uv and pip, meaning and fix; the first match counts.
SYMPTOMS = (
    ("No space left on device", "the disk is full", "free some space and run the same command again"),
    (
        r"[Nn]o interpreter found|Failed to install cpython|python-build-standalone",
        "no supported Python on PATH, and uv cannot download one",
        "install it (python{version} and python{version}-venv), run in a container (make build-BENCHMARK), or use a "
        "benchmark in PyTorch, such as resnet-pytorch",
    ),
    (
        r"ImportError: lib(cu|nv)\w+\.so",
        "torch of this package index needs CUDA's libraries",
        "set UV_TORCH_BACKEND=cpu, or add PyTorch's CPU index to pip's settings, and run the same command again",
    ),
    (
        "Hash mismatch",
        "a package is not the pinned file",
        "check the package index and pip's settings (pip config list)",
    ),
    ("No solution found", "the package index does not have what is pinned", AGAIN),
    (
        "error sending request|dns error|Failed to fetch|new connection",
        "the package index cannot be reached",
        AGAIN,
    ),
)


def _explain(environment: Environment, log: Path) -> EncoreError:
    # Explain the failure from the last command's output.
    output = log.read_text(encoding="utf-8", errors="replace").rsplit("\n$ ", 1)[-1]
    failed = f"the {environment.framework} environment could not be made"
    for pattern, meaning, hint in SYMPTOMS:
        if re.search(pattern, output):
            hint = hint.replace("{version}", _version(environment.interpreter))
            return EncoreError(f"{failed}: {meaning}", hint=f"{hint}; output: {log}")
    last = [line for line in output.splitlines() if line.strip()][-1:]
    return EncoreError(f"{failed}: {' '.join(last)}", hint=f"read {log}, then run the same command again")
