"""Compatibility of images with this machine, checked before 20 GB are pulled, from the catalogue and the GPUs."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from encore import catalogue, files
from encore import configuration as configurations
from encore.catalogue import Benchmark, Choice, Implementation, Strict
from encore.configuration import Configuration
from encore.containers import images
from encore.containers.images import Release
from encore.machine import interpreters
from encore.machine.node import Gpu
from encore.machine.preflight import Check, Level, memory_gib

# GPU families with their lowest compute capability (NVIDIA, "CUDA GPU Compute Capability")
ARCHITECTURES = (
    ("Pascal", (6, 0)),
    ("Volta", (7, 0)),
    ("Turing", (7, 5)),
    ("Ampere", (8, 0)),
    ("Ada Lovelace", (8, 9)),
    ("Hopper", (9, 0)),
    ("Blackwell", (10, 0)),
)

# Name parts of workstation GPUs, which older driver branches do not support with newer CUDA
WORKSTATION = ("GeForce", "RTX", "Quadro", "TITAN")


def version(text: str) -> tuple[int, ...]:
    """Parse ``535.104.05`` into comparable numbers; empty if not a version."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def architecture(gpu: Gpu) -> str:
    """Return a GPU's family; empty if the driver is too old to report it."""
    capability = version(gpu.compute_capability or "")
    names = [name for name, least in ARCHITECTURES if capability and least <= capability]
    return names[-1] if names else ""


def check_architecture(release: Release, gpu: Gpu) -> Check:
    """Check the GPU's family against the families supported by the image."""
    family = architecture(gpu)
    message = f"{gpu.name} is {family or 'of unknown family'} ({gpu.compute_capability or 'unknown'})"
    if not family or not release.architectures:
        unknown = f"{message}; it is not documented whether {release.reference} supports it"
        return Check("WARN", "compute capability", unknown, "try it, or choose a release with documented support")
    least = version(release.compute_capability)
    too_old = bool(least) and version(gpu.compute_capability or "") < least
    # Binaries run on later compute capabilities with the same major version (CUDA C++ Programming Guide, "Binary
    # Compatibility").
    majors = {first for name, (first, _) in ARCHITECTURES if name in release.architectures}
    if version(gpu.compute_capability or "")[0] in majors and not too_old:
        return Check("OK", "compute capability", message)
    supported = ", ".join(release.architectures)
    return Check(
        "FAIL",
        "compute capability",
        f"{message}; {release.reference} runs on {supported}",
        "choose a newer release: encore images list",
    )


def check_driver(release: Release, gpu: Gpu) -> Check:
    """Check the driver against the image's least one, and the branches that data center GPUs may have instead."""
    driver = version(gpu.driver)
    if not release.driver:
        return Check("WARN", "driver", f"{gpu.driver}; the driver requirement of {release.reference} is not documented")
    if driver[:1] >= version(release.driver)[:1]:
        return Check("OK", "driver", f"{gpu.driver}, {release.driver} or later needed")
    branches = [] if any(word in gpu.name for word in WORKSTATION) else release.data_center_drivers
    for branch in map(version, branches):
        if driver[:1] == branch[:1] and driver >= branch:
            return Check("OK", "driver", f"{gpu.driver}, which data center GPUs may have")
    allowed = f"{release.driver} or later" + (f", or {', '.join(branches)} or later" if branches else "")
    return Check("FAIL", "driver", f"{gpu.driver}; {release.reference} needs {allowed}", "install a newer driver")


ACCUMULATION = "accumulation_steps"  # Key of implementations with gradient accumulation
# A run is rejected if tensors exceed the memory by this factor. The tolerance is needed because the size is estimated.
CLEARLY = 1.1
NEARLY = 0.95  # Fraction of the memory at which a warning is reported


def check_memory(configuration: Configuration, gpu: Gpu) -> Check:
    """Check the GPU's memory against the benchmark's memory model, else against the GPU of the submission."""
    model = configurations.memory_model(configuration.choice.folder)
    if not gpu.memory_gib:
        return Check("OK", "GPU memory", f"the driver does not report that of {gpu.name}")
    if model is None:
        return _check_submitted_memory(configuration, gpu)
    need = _needed(model, configuration, {})
    message = f"about {sum(need) / 2**30:.1f} GiB needed by the model, {gpu.name} has {gpu.memory_gib:g} GiB"
    if sum(need) <= NEARLY * gpu.memory_gib * 2**30:
        return Check("OK", "GPU memory", message)
    level: Level = "FAIL" if need.tensors > CLEARLY * gpu.memory_gib * 2**30 else "WARN"
    return Check(level, "GPU memory", message, smaller_batch(model, configuration, gpu))


def _needed(model: Any, configuration: Configuration, changes: dict[str, int]) -> Any:
    # The model's answer; ValueError where the changed configuration is impossible
    config = configurations.config_class(configuration.choice.folder)(**{**configuration.plain(), **changes})
    return model.needed(config, configuration.choice.implementation.framework)


def smaller_batch(model: Any, configuration: Configuration, gpu: Gpu) -> str:
    """Return a setting that reduces memory: accumulation (same global batch size), else a smaller batch."""
    batch = configuration.get("batch_size")
    divisors = [n for n in range(2, batch + 1) if batch % n == 0]
    accumulated = [{ACCUMULATION: n} for n in divisors if ACCUMULATION in configuration.values]
    for changes in (*accumulated, *({"batch_size": size} for size in range(batch - 1, 0, -1))):
        try:
            fits = sum(_needed(model, configuration, changes)) <= NEARLY * gpu.memory_gib * 2**30
        except ValueError:
            continue
        if fits:
            ((name, value),) = changes.items()
            effect = "which keeps the global batch" if name == ACCUMULATION else "another global batch"
            return f"--set {name}={value}, {effect}"
    return "use a GPU with more memory"


def _check_submitted_memory(configuration: Configuration, gpu: Gpu) -> Check:
    # Compare the GPU's memory with the memory of the submission's GPU
    submitted = memory_gib(configuration.system.accelerator)
    if not submitted:
        return Check("OK", "GPU memory", f"{gpu.memory_gib:g} GiB")
    # A 40 GB GPU reports a little less than 40 GiB.
    if gpu.memory_gib >= 0.9 * submitted:
        return Check("OK", "GPU memory", f"{gpu.memory_gib:g} GiB, submitted with {submitted:g} GB")
    smaller = max(1, int(configuration.get("batch_size") * gpu.memory_gib / submitted))
    message = f"{gpu.memory_gib:g} GiB, the configuration was submitted with {submitted:g} GB"
    return Check("WARN", "GPU memory", message, f"if it does not fit: --set batch_size={smaller}")


def alternatives(benchmark: Benchmark, releases: Sequence[Release], gpu: Gpu) -> str:
    """Suggest implementations or images that support a GPU."""
    able = [r for r in releases if check_architecture(r, gpu).level == "OK"]
    frameworks = {release.framework for release in able}
    for choice in catalogue.choices().values():
        same = choice.benchmark.name == benchmark.name
        if same and choice.implementation.framework in frameworks:
            release = [r.release for r in able if r.framework == choice.implementation.framework][-1]
            return f"use {choice.name} on release {release}, which runs on {architecture(gpu)}"
    references = ", ".join(release.reference for release in able) or "none"
    return (
        f"no implementation of {benchmark.name} runs on {architecture(gpu)} yet "
        f"(images stated to run on it: {references}); use an older GPU, or --system cpu"
    )


def check_gpus(release: Release, gpus: tuple[Gpu, ...], benchmark: Benchmark) -> list[Check]:
    """Check all kinds of GPUs against the image; one row per kind."""
    kinds = {(gpu.name, gpu.compute_capability, gpu.driver): gpu for gpu in gpus}
    checks = []
    for gpu in kinds.values():
        fits = check_architecture(release, gpu)
        if fits.level == "FAIL":
            is_old = version(gpu.compute_capability or "") < version(release.compute_capability)
            newest = "" if is_old else f": {release.framework} images end at {release.architectures[-1]}"
            others = alternatives(benchmark, images.catalogue().release, gpu)
            fits = Check("FAIL", fits.name, f"{fits.found}{newest}", others)
        checks += [fits, check_driver(release, gpu)]
    return checks


TRIED = images.CONTAINERS / "tried.json"


class Tried(Strict):
    """Record of a training: versions, device, date, and result."""

    implementation: str  # Name on the command line
    # cpu: in a Python on the host; stand-in: in its image on the CPU base; gpu: on a GPU
    where: Literal["cpu", "stand-in", "gpu"]
    versions: dict[str, str]
    problem: str = ""  # Empty: it trained
    date: str
    note: str = ""


def tried(file: Path = TRIED) -> list[Tried]:
    return [Tried.model_validate(entry) for entry in json.loads(file.read_text(encoding="utf-8"))]


def add(trial: Tried, file: Path = TRIED) -> None:
    """Add a record, replacing an earlier one for the same combination."""
    same = (trial.implementation, trial.where, trial.versions)
    rest = [entry for entry in tried(file) if (entry.implementation, entry.where, entry.versions) != same]
    ordered = sorted([*rest, trial], key=lambda entry: (entry.implementation, entry.where, str(entry.versions)))
    files.write_json(file, [entry.model_dump(exclude_defaults=True) for entry in ordered])


def lacks(versions: Mapping[str, str], implementation: Implementation) -> dict[str, str]:
    """Return the ``versions`` that are too old, by name; unknown versions are accepted."""
    lowest = needs(implementation)
    return {
        name: versions[name]
        for name in lowest
        if versions.get(name) and version(versions[name]) < version(lowest[name])
    }


def describe(old: Mapping[str, str], implementation: Implementation) -> str:
    lowest = needs(implementation)
    return "; ".join(f"{title(name)} {installed}, {lowest[name]} needed" for name, installed in old.items())


def needs(implementation: Implementation) -> dict[str, str]:
    """Return an implementation's minimum versions, by their names in a system description."""
    return {"python": interpreters.OLDEST, **implementation.needs}


def title(name: str) -> str:
    return {"python": "Python", "dali": "DALI", "nccl": "NCCL", "numpy": "numpy", "horovod": "Horovod"}.get(
        name
    ) or catalogue.framework(name).title


def software(release: Release) -> dict[str, str]:
    """Return the versions that a release's sources state, by the names of ``needs``."""
    return {"python": release.python, release.framework: release.framework_version, "dali": release.dali}


def too_old(release: Release, choice: Choice) -> tuple[Release, dict[str, str]] | None:
    """Return the release, or a later one in its series, with its outdated versions; None if all are recent enough."""
    for candidate in images.catalogue().release:
        if candidate.framework == release.framework and candidate.release >= release.release:
            outdated = lacks(software(candidate), choice.implementation)
            if outdated and _series(candidate) in (_series(release), ""):
                return candidate, outdated
    return None


def _series(release: Release) -> str:
    # ``tf2`` of ``25.02-tf2``: releases of different series are not ordered
    return release.release.partition("-")[2]


def check_software(release: Release, choice: Choice) -> Check:
    outdated = too_old(release, choice)
    if outdated is None:
        return Check("OK", "software", f"all known versions are recent enough for {choice.name}")
    prefix = "" if outdated[0] == release else f"{outdated[0].release} is later and has "
    same = [candidate for candidate in images.catalogue().release if candidate.framework == release.framework]
    later = [
        candidate for candidate in same if candidate.release > release.release and too_old(candidate, choice) is None
    ]
    # Releases without published versions cannot be checked.
    names = [candidate.release for candidate in sorted(later, key=lambda candidate: not candidate.framework_version)]
    hint = (
        f"use release {names[0]}: make build-{choice.name} BASE={names[0]}" if names else "use another implementation"
    )
    message = f"{prefix}{describe(outdated[1], choice.implementation)}"
    return Check("FAIL", "software", f"{release.reference} is too old for {choice.name}: {message}", hint)
