"""Which images an implementation can run in: what it needs, what an image has, and what was tried where."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from encore import catalogue, files
from encore.catalogue import Choice, Implementation, Strict
from encore.containers import images
from encore.containers.compatibility import version
from encore.containers.images import Release
from encore.machine import pythons
from encore.machine.preflight import Check

TRIED = images.CONTAINERS / "tried.json"


class Tried(Strict):
    """One training that was tried: with which versions, where and when, and what came of it."""

    implementation: str  # Its name on the command line
    # cpu: in a Python on the host; stand-in: in its image on the CPU base; gpu: on a GPU
    where: Literal["cpu", "stand-in", "gpu"]
    versions: dict[str, str]
    problem: str = ""  # Empty: it trained
    date: str
    note: str = ""


def tried(file: Path = TRIED) -> list[Tried]:
    """Return all that was tried."""
    return [Tried.model_validate(each) for each in json.loads(file.read_text(encoding="utf-8"))]


def add(found: Tried, file: Path = TRIED) -> None:
    """Write down what was tried, in place of an earlier trial of the same."""
    same = (found.implementation, found.where, found.versions)
    others = [each for each in tried(file) if (each.implementation, each.where, each.versions) != same]
    ordered = sorted([*others, found], key=lambda each: (each.implementation, each.where, str(each.versions)))
    files.write_json(file, [each.model_dump(exclude_defaults=True) for each in ordered])


def lacks(known: Mapping[str, str], implementation: Implementation) -> dict[str, str]:
    """Return what of ``known`` versions, by name, is too old; a version that is not known is not."""
    lowest = needs(implementation)
    return {name: known[name] for name in lowest if known.get(name) and version(known[name]) < version(lowest[name])}


def describe(old: Mapping[str, str], implementation: Implementation) -> str:
    """Return what is too old, and what is needed."""
    lowest = needs(implementation)
    return "; ".join(f"{title(name)} {each}, {lowest[name]} needed" for name, each in old.items())


def needs(implementation: Implementation) -> dict[str, str]:
    """Return the lowest versions that an implementation needs, by their names in a system description."""
    return {"python": pythons.OLDEST, **implementation.needs}


def title(name: str) -> str:
    """Return the usual spelling of a name in a system description."""
    return {"python": "Python", "dali": "DALI", "nccl": "NCCL", "numpy": "numpy", "horovod": "Horovod"}.get(
        name
    ) or catalogue.framework(name).title


def software(release: Release) -> dict[str, str]:
    """Return the versions that a release's sources state, by the names of ``needs``."""
    return {"python": release.python, release.framework: release.framework_version, "dali": release.dali}


def too_old(release: Release, choice: Choice) -> tuple[Release, dict[str, str]] | None:
    """Return what of a release, or of a later one, is too old for an implementation; None if nothing is."""
    for each in images.catalogue().release:
        if each.framework == release.framework and each.release >= release.release:
            found = lacks(software(each), choice.implementation)
            if found and _series(each) in (_series(release), ""):
                return each, found
    return None


def _series(release: Release) -> str:
    # ``tf2`` of ``25.02-tf2``: releases of two series have no order
    return release.release.partition("-")[2]


def check(release: Release, choice: Choice) -> Check:
    """Check a release's software against what the implementation needs."""
    found = too_old(release, choice)
    if found is None:
        return Check("OK", "software", f"nothing that {choice.name} needs is known to be too old")
    where = "" if found[0] == release else f"{found[0].release} is later and has "
    same = [each for each in images.catalogue().release if each.framework == release.framework]
    later = [each.release for each in same if each.release > release.release and too_old(each, choice) is None]
    hint = (
        f"use release {later[0]}: make build-{choice.name} BASE={later[0]}" if later else "use another implementation"
    )
    why = f"{where}{describe(found[1], choice.implementation)}"
    return Check("FAIL", "software", f"{release.reference} is too old for {choice.name}: {why}", hint)
