"""The NGC catalogue (containers/images.toml), and the digests that builds are held to (images.lock)."""

import json
from functools import cache
from pathlib import Path

from pydantic import Field
from typing_extensions import TypedDict

from encore import files, paths
from encore.catalogue import Choice, Difference, Strict, System, parse
from encore.errors import EncoreError, unknown_name

CONTAINERS = paths.ROOT / "containers"
CATALOGUE = CONTAINERS / "images.toml"
LOCK = CONTAINERS / "images.lock"
STANDIN = "standin"  # Name of the CPU base in place of a release


class Release(Strict):
    """An NGC image; fields without a published source are empty."""

    framework: str
    release: str
    tag: str
    framework_version: str = ""
    python: str = ""
    cuda: str = ""
    dali: str = ""
    horovod: str = ""
    nccl: str = ""
    driver: str = ""
    data_center_drivers: tuple[str, ...] = ()
    compute_capability: str = ""
    architectures: tuple[str, ...] = ()
    pip_constraint: str = ""
    sources: tuple[str, ...] = Field(min_length=1)
    note: str = ""

    @property
    def reference(self) -> str:
        """Reference to pull: ``nvcr.io/nvidia/mxnet:24.06-py3``."""
        return f"nvcr.io/nvidia/{self.framework}:{self.tag}"


class Server(Strict):
    """Release of Triton Inference Server, with the formats of `encore export` that it serves."""

    release: str
    tag: str
    backends: dict[str, str]  # Backend by format
    platforms: dict[str, str] = Field(default_factory=dict)  # Platform by format, for backends with several platforms
    lacks: dict[str, str] = Field(default_factory=dict)  # Missing requirements of the model, by format
    sources: tuple[str, ...] = Field(min_length=1)
    note: str = ""

    @property
    def reference(self) -> str:
        """Reference to pull: ``nvcr.io/nvidia/tritonserver:26.04-py3``."""
        return f"nvcr.io/nvidia/tritonserver:{self.tag}"


class Row(Strict):
    title: str
    requirements: str
    imports: str = ""
    compiles: str = ""  # Module that compiles the benchmark's C++ code into the folder in its argument
    compiled: str = ""  # Environment variable with the path of that folder


class StandIn(Strict):
    """Packages of a framework's CPU stand-in, in addition to the common ones."""

    packages: dict[str, str] = Field(default_factory=dict)


class Submitted(Strict):
    """Base of a round's submission, and why the current base differs."""

    round: str
    benchmark: str
    framework: str
    release: str
    source: str
    why: str


class Images(Strict):
    default: dict[str, str]
    image: dict[str, Row]
    standin: dict[str, StandIn]
    release: tuple[Release, ...]
    server: tuple[Server, ...]
    submitted: tuple[Submitted, ...]


@cache
def catalogue() -> Images:
    return parse(Images, CATALOGUE)


def find_row(choice: Choice) -> Row:
    """Return the entry for a benchmark's image; EncoreError if missing."""
    rows = catalogue().image
    if choice.name not in rows:
        hint = f"add [image.{choice.name}] to {CATALOGUE}, then make docs"
        raise EncoreError(f"{choice.name} has no image", hint=hint)
    return rows[choice.name]


def find_release(framework: str, name: str | None = None) -> Release:
    """Find a release by name (``24.06``) or tag (``24.06-py3``); by default the framework's default."""
    images = catalogue()
    reference = name or images.default.get(framework, "")
    of_framework = [release for release in images.release if release.framework == framework]
    for release in of_framework:
        if reference in (release.release, release.tag):
            return release
    raise unknown_name(f"{framework} release", reference, [*(r.release for r in of_framework), STANDIN])


REFERENCE = "MLCommons"  # Submitter of systems that are the reference's


def differences(choice: Choice, system: System, here: str = "") -> list[Difference]:
    """Return differences from the submission or reference that no setting can change.

    ``here`` is a run's image or an equivalent; by default the current base.
    """
    if system.kind != "submitted" and system.submitter != REFERENCE:
        return []
    stated = [entry for entry in choice.benchmark.differences if not entry.rounds or system.round in entry.rounds]
    framework = choice.implementation.framework
    if system.framework not in ("", framework):
        return stated
    key = (system.round, choice.benchmark.name, framework)
    for entry in catalogue().submitted:
        submitted = find_release(entry.framework, entry.release).reference
        base = here or find_release(framework).reference
        if (entry.round, entry.benchmark, entry.framework) == key and submitted != base:
            stated.append(Difference(what="image", rounds=(entry.round,), submitted=submitted, here=base))
    return stated


class LockedDigest(TypedDict):
    digest: str
    recorded: str  # UTC


class Lock(TypedDict):
    """The digests that builds are held to."""

    images: dict[str, LockedDigest]  # By reference


def read_lock(lock: Path = LOCK) -> dict[str, LockedDigest]:
    """Return the recorded digests by reference; none before the first pull."""
    if not lock.exists():
        return {}
    try:
        entries = json.loads(lock.read_text(encoding="utf-8"))["images"].items()
        return {name: LockedDigest(digest=entry["digest"], recorded=entry["recorded"]) for name, entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EncoreError(
            f"{lock} is damaged",
            hint="restore it from git, or remove it: the next pull writes it",
        ) from error


def record(reference: str, digest: str, lock: Path = LOCK) -> None:
    """Write a digest to the lock file, replacing an existing one."""
    entries = {**read_lock(lock), reference: LockedDigest(digest=digest, recorded=files.utc_now())}
    files.write_json(lock, Lock(images=dict(sorted(entries.items()))))


def check_lock(reference: str, digest: str, lock: Path = LOCK) -> None:
    """Record the digest at the first pull; later reject different ones."""
    locked = read_lock(lock).get(reference)
    if locked is None:
        record(reference, digest, lock)
    elif locked["digest"] != digest:
        raise EncoreError(
            f"{reference} has a different digest than images.lock: {digest}",
            expected=f"{locked['digest']}, recorded {locked['recorded']}",
            hint="pull the recorded digest, or accept the new one: encore images build --accept",
        )
