"""Compile the engine for the current version of its sources: ``python -m benchmarks.minigo.engine.build FOLDER``."""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List, Optional, Tuple

from benchmarks.common.data.problem import FAILED, Problem

SOURCES = Path(__file__).resolve().parent
# -ffp-contract=off: the same visits on every machine, whether or not it can multiply and add in one instruction
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
# Instruction sets; ``plain`` runs on all machines of the architecture
VARIANTS = {"avx2": ("-mavx2", "-mbmi2", "-mpopcnt"), "plain": ()}
FOLDER = "ENCORE_MINIGO_ENGINE"  # Environment variable: a folder with libraries that were built before, as in an image


def library() -> Path:
    """Return the compiled engine for this machine, and compile it first if it is nowhere.

    Looked for in the folder of ``ENCORE_MINIGO_ENGINE``, then in ``$XDG_CACHE_HOME/encore/engine``.

    Raises:
        Problem: no compiler, or it failed.
    """
    variant_name = variant()
    built = os.environ.get(FOLDER)
    if built:
        for name in (variant_name, "plain"):
            if (Path(built) / file_name(name)).exists():
                return Path(built) / file_name(name)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")) / "encore" / "engine"
    path = folder / file_name(variant_name)
    return path if path.exists() else build(folder, variant_name)


def variant() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return "plain"
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "avx2" if {"avx2", "bmi2", "popcnt"} <= set(flags) else "plain"


def file_name(name: str) -> str:
    """Return a variant's file name: with a hash of the sources and of the flags."""
    digest = hashlib.sha256(" ".join((*FLAGS, *VARIANTS[name])).encode())
    for source in sorted((*SOURCES.glob("*.cc"), *SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"minigo-{name}-{os.uname().machine}-{digest.hexdigest()[:12]}.so"


def build(folder: Path, name: str) -> Path:
    """Compile a variant in a folder, atomically, and only on one of several ranks that start together."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file_name(name)
        with (folder / ".lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(path, (*FLAGS, *VARIANTS[name]))
    except OSError as error:
        expected, hint = "a folder for the compiled engine", "set XDG_CACHE_HOME to a folder that you may write to"
        raise Problem(f"{folder}: {error.strerror or error}", expected, hint) from error
    return path


def _compile(path: Path, flags: Tuple[str, ...]) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Problem(
            "no C++ compiler: neither g++ nor clang++ is on the PATH",
            "a compiler for Minigo's engine",
            "install it (Debian and Ubuntu: apt-get install g++), or set CXX to its path",
        )
    temporary = path.with_suffix(f".{os.getpid()}")
    command = [compiler, *flags, str(SOURCES / "api.cc"), "-o", str(temporary)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        temporary.unlink(missing_ok=True)
        last = done.stdout.decode(errors="replace").strip().splitlines()[-5:]
        raise Problem(
            "the engine of Minigo does not compile: " + " | ".join(last),
            "g++ 7 or newer, or clang++ 5 or newer (C++17)",
            "set CXX to a newer compiler; the command was: " + " ".join(command),
            FAILED,
        )
    temporary.replace(path)


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    names = list(VARIANTS) if os.uname().machine == "x86_64" else ["plain"]
    try:
        for name in names:
            print(build(folder, name))
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
