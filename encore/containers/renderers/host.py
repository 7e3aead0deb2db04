"""The `host` runtime: no container; the ranks run in the framework's own environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from encore import paths
from encore.job import PASSED_ON, Command, Job, caller_name

MODULES = {"torchrun": "torch.distributed.run", "horovodrun": "horovod.runner.launch"}
"""Launchers that a Python can start itself, wherever their programs are."""


def render(job: Job, python: Path, caller: Mapping[str, str], given: bool = False) -> Command:
    """Return the job as a command in the environment of ``python``; mounts are the folders themselves.

    ``caller`` is the environment of the user: only PASSED_ON and PATH are taken over from it. A Python that was
    ``given`` by the user may have its programs and packages anywhere: it is named by its file, starts launchers as
    modules, and keeps the caller's PYTHONPATH, by which environment modules work.
    """
    environment = {name: caller[name] for name in PASSED_ON if name in caller} | caller_name(caller)
    environment["PATH"] = os.pathsep.join([str(python.parent), caller.get("PATH", os.defpath)])
    environment["PYTHONPATH"] = str(paths.ROOT)
    words = job.argv
    if given:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(paths.ROOT), caller.get("PYTHONPATH"))))
        modules = {name: (str(python), "-m", module) for name, module in MODULES.items()}
        programs = {**modules, "python": (str(python),)}
        words = tuple(part for word in words for part in programs.get(word, (word,)))
    environment.update(job.environment)
    exported = [word for name in sorted(environment) for word in (*job.export, name)] if job.export else []
    argv = (*job.outer, *exported, *words)
    return Command(argv=argv, environment=environment, working_directory=paths.ROOT)
