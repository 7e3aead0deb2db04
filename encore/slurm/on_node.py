"""Runs once on every node of a job: say what is there, or drop the file caches. Prints one line of JSON.

    $ srun --ntasks-per-node=1 python -m encore.slurm.on_node check '{"readable": ["/data/resnet"]}'

Standard library only, so that it starts in a moment.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SECONDS = 20.0


def check(wanted: dict[str, Any]) -> dict[str, Any]:
    """Facts of this node and what of ``wanted`` (readable, writable, programs, image) it lacks."""
    missing = [
        f"{path} cannot be read" for path in wanted.get("readable", []) if not os.access(path, os.R_OK)
    ]
    missing += [f"{path} cannot be written" for path in wanted.get("writable", []) if not _is_writable(path)]
    missing += [f"{name} is not on PATH" for name in wanted.get("programs", []) if not shutil.which(name)]
    if not missing and wanted.get("image"):
        missing += _image_problems(wanted["image"])
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if wanted.get("gpus", 0) > len(gpus):
        missing.append(f"{len(gpus)} GPUs, {wanted['gpus']} wanted")
    return {"missing": missing, "gpus": len(gpus), **_facts()}


def _is_writable(folder: str) -> bool:
    """By writing: a mount that is read-only, or an identity that the server does not know, shows only so."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _image_problems(command: list[str]) -> list[str]:
    """Whether the engine has the image; the command ends with 0 if so."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command[0]}: {error}"]
    said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return [] if done.returncode == 0 else [f"{command[0]}: {said}"]


def _facts() -> dict[str, Any]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
    }


def drop_caches(wanted: dict[str, Any]) -> dict[str, Any]:
    """Drop this node's file caches; ``dropped`` is False where this user may not."""
    from encore.machine import page_cache

    return {"dropped": page_cache.drop()}


def remove_containers(wanted: dict[str, Any]) -> dict[str, Any]:
    """Remove the containers of an experiment that their client, killed by Slurm, has left behind."""
    engine = wanted["engine"]
    listing = [engine, "ps", "--all", "--quiet", "--filter", f"label={wanted['label']}"]
    found = subprocess.run(
        listing, capture_output=True, text=True, timeout=SECONDS, check=False
    ).stdout.split()
    if found:
        command = [engine, "rm", "--force", "--volumes", *found]
        subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    return {"removed": found}


ACTIONS = {"check": check, "drop-caches": drop_caches, "remove-containers": remove_containers}


def main() -> int:
    action, wanted = sys.argv[1], json.loads(sys.argv[2])
    node = os.environ.get("SLURMD_NODENAME") or platform.node()
    print(json.dumps({"node": node, **ACTIONS[action](wanted)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
