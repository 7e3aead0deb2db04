"""The `host` runtime: no container; the ranks run in the framework's own environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from encore import paths
from encore.job import PASSED_ON, Command, Job


def render(job: Job, python: Path, caller: Mapping[str, str]) -> Command:
    """Return the job as a command in the environment of ``python``; mounts are the folders themselves.

    ``caller`` is the environment of the user: only PASSED_ON and PATH are taken over from it.
    """
    environment = {name: caller[name] for name in PASSED_ON if name in caller}
    environment["PATH"] = os.pathsep.join([str(python.parent), caller.get("PATH", os.defpath)])
    environment["PYTHONPATH"] = str(paths.ROOT)
    environment.update(job.environment)
    exported = [word for name in sorted(environment) for word in (*job.export, name)] if job.export else []
    argv = (*job.outer, *exported, *job.argv)
    return Command(argv=argv, environment=environment, working_directory=paths.ROOT)
