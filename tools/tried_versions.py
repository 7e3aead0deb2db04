"""Train implementations for one epoch on a CPU with another version of a package, and record the result.

    $ .venv/bin/python -m tools.tried_versions ncf dlrm --package torch==2.0.1 --work build/versions
    $ .venv/bin/python -m tools.tried_versions ssd --package nvidia-dali-cuda120==1.29.0 --no-deps --work build/versions

Without a package, the environment is unchanged. The package is installed in a separate folder that precedes the
environment in the search path; a plain PyTorch build takes about 6 GB with the CUDA libraries. Two ranks train the
toy data set through `encore run --python`. The result is added to containers/tried.json, from which `make docs`
writes docs/support.md; ``needs`` in benchmark.toml follows from it. It downloads gigabytes.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from encore import catalogue, configuration, environment, files
from encore.catalogue import Choice
from encore.containers import compatibility
from encore.errors import ExitCode
from encore.machine import interpreters
from tools import run

RANKS = 2
# `encore` without the version check: the limits are measured here
ENCORE = """
from encore.cli import app
from encore.containers import compatibility
compatibility.lacks = lambda known, implementation: {}
app.main()
"""


def installed(requirement: str, python: Path, work: Path, options: Sequence[str]) -> Path:
    # The folder that has the package, installed if it is not there yet; an empty one without a package
    folder = work / (requirement or "as-it-is")
    if requirement and not (folder / "installed").exists():
        # The environments lack pip.
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--upgrade"]
        command = [*pip, "--target", str(folder), *options]
        subprocess.run([*command, requirement], check=True)
        # As a package it would hide the environment's nvidia.dali.
        (folder / "nvidia" / "__init__.py").unlink(missing_ok=True)
        (folder / "installed").touch()
    return folder


def trained(choice: Choice, python: Path, folder: Path, work: Path) -> compatibility.Tried:
    # Train one epoch of the toy data set; return the result
    variables = {**os.environ, "PYTHONPATH": str(folder)}
    results = work / "results" / f"{folder.name}-{choice.name}"
    # Otherwise the epoch would be warm-up only.
    has_warmup = "warmup_epochs" in configuration.field_types(choice.folder)
    settings = ["epochs=1", *(["warmup_epochs=0"] if has_warmup else [])]
    command = [sys.executable, "-c", ENCORE, "run", choice.name, str(RANKS)]
    command += ["--system", choice.benchmark.small_data.system, "--python", str(python), "--results", str(results)]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    facts = interpreters.ask(python, interpreters.question(choice.implementation.framework, (), 0), variables)
    software = environment.software(choice.implementation.framework, facts.packages)
    versions = {
        "python": facts.python,
        **{name.removesuffix("_version"): version for name, version in software.items()},
    }
    return compatibility.Tried(
        implementation=choice.name,
        where="cpu",
        versions={
            name: versions[name] for name in ("python", choice.implementation.framework, "dali") if versions[name]
        },
        problem="" if done.returncode in (ExitCode.REACHED, ExitCode.NOT_REACHED) else _reason(results, done.stderr),
        date=files.utc_now()[:10],
    )


def _reason(results: Path, errors: str) -> str:
    # The last error message, from a rank or from the command
    ranks = sorted(results.glob("*/experiment_0/ranks/**/stderr*")) + sorted(results.glob("*/experiment_0/ranks/*.txt"))
    messages = [line for file in ranks for line in files.text_of(file).splitlines() if "Error: " in line]
    line = (messages or errors.strip().splitlines() or ["no output"])[0]
    # Without local paths and ranks
    return re.sub(r"/\S+/", "", re.sub(r"^\[rank\d+\]: ", "", line.strip()))


def main(
    names: Annotated[list[str], typer.Argument(help="as encore list has them; of one framework")],
    work: Annotated[Path, typer.Option(help="folder for the packages and the runs", resolve_path=True)],
    package: Annotated[str, typer.Option(help="with its version")] = "",
    no_deps: Annotated[bool, typer.Option("--no-deps", help="without what the package depends on")] = False,
) -> None:
    # Install, train and write down
    choices = [catalogue.choose(name) for name in names]
    python = environment.ensure_environment(choices[0].implementation.framework, print)
    folder = installed(package, python, work, ["--no-deps"] if no_deps else [])
    for choice in choices:
        row = trained(choice, python, folder, work)
        compatibility.add(row)
        print(f"{row.implementation}, {folder.name}: {row.problem or 'trained'}", flush=True)


if __name__ == "__main__":
    run(main, __doc__)
