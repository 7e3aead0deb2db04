"""Checks before a run: OK, WARN or FAIL, with a hint."""

import math
import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from typing_extensions import NotRequired, TypedDict

from encore import hub
from encore.catalogue import Weights
from encore.configuration import Configuration
from encore.data import PASSPORT, DataPassport, check_data
from encore.errors import EncoreError
from encore.files import existing, file_digest, read_json
from encore.job import Mount
from encore.machine import safetensors_files
from encore.machine.node import Node


def weight_files(configuration: Configuration, data: Path) -> dict[str, Path]:
    """Return the paths of weight files by configuration key. Names without a folder are relative to the data folder."""
    paths = {key: str(configuration.get(key)) for key in configuration.choice.benchmark.weights}
    return {key: data / name for key, name in paths.items() if name}


def _absence(path: Path) -> str:
    return "is a folder, not a file" if path.is_dir() else "does not exist"


class WeightsShard(TypedDict):
    """A file of an index."""

    file: str
    bytes: int
    sha256: str  # Of the Hugging Face Hub's list; empty if another program downloaded it


class WeightsFile(TypedDict):
    file: str
    bytes: int
    sha256: str
    shards: NotRequired[list[WeightsShard]]  # Of an index
    revision: NotRequired[str]  # Commit on the Hugging Face Hub, if downloaded by encore data get


def weights_json(files: dict[str, Path]) -> dict[str, WeightsFile]:
    """Return path, size, SHA-256 and shards per file, for run.json."""
    return {key: _weights_file(path) for key, path in files.items()}


def _weights_file(path: Path) -> WeightsFile:
    record: WeightsFile = {
        "file": str(path),
        "bytes": path.stat().st_size,
        "sha256": file_digest(path, "sha256"),
    }
    if path.name.endswith(safetensors_files.INDEX):
        revision, downloaded = hub.read_manifest(path.parent)
        record["shards"] = [_weights_shard(shard, downloaded) for shard in safetensors_files.shards(path)]
        if revision:
            record["revision"] = revision
    return record


def _weights_shard(path: Path, downloaded: Mapping[str, Mapping[str, Any]]) -> WeightsShard:
    size, listed = path.stat().st_size if path.is_file() else 0, downloaded.get(path.name, {})
    return {"file": path.name, "bytes": size, "sha256": listed.get("sha256", "") if listed.get("bytes") == size else ""}


def weight_mounts(files: dict[str, Path], data: Path) -> tuple[Mount, ...]:
    """Return mounts for weight files outside the data folder, including files in the same folder with their tensors.

    TensorFlow stores tensors in files with the prefix of the ``.index``, Hugging Face in ``.safetensors`` shards.
    """
    outside = [path for path in files.values() if data not in path.parents]
    parts = [part for path in outside if path.suffix == ".index" for part in path.parent.glob(f"{path.stem}.data-*")]
    parts += [part for path in outside for part in safetensors_files.shards(path) if part != path]
    return tuple(Mount(path, str(path), True) for path in (*outside, *sorted(parts)))


def refuse_other_weights(files: dict[str, Path], recorded: Mapping[str, Any]) -> None:
    """Reject files that differ from run.json. A missing file is accepted: its weights may be in a checkpoint."""
    there = weights_json({key: path for key, path in files.items() if path.is_file()})
    for key, current in there.items():
        if key not in recorded:
            continue
        before, restore = recorded[key], "restore it, or start a new run"
        if current["sha256"] != before["sha256"]:
            raise EncoreError(
                f"{current['file']} is not the file of {key} that the run started with",
                expected=f"SHA-256 {before['sha256'][:12]}",
                hint=restore,
            )
        sizes = {shard["file"]: shard["bytes"] for shard in current.get("shards", [])}
        for shard in before.get("shards", []):
            if sizes.get(shard["file"]) != shard["bytes"]:
                raise EncoreError(
                    f"{shard['file']} of {current['file']} has changed since the run started",
                    expected=f"{shard['bytes']:,} bytes",
                    hint=restore,
                )


Level = Literal["OK", "WARN", "FAIL"]

# Space for checkpoints and logs: ResNet-50 needs about 0.2 GiB for a checkpoint with momentum, twice while the next one
# is written
RESULTS_GIB = 1.0


@dataclass(frozen=True)
class Check:
    level: Level
    name: str
    found: str
    hint: str = ""

    @classmethod
    def of(cls, error: EncoreError, name: str, level: Level = "FAIL") -> "Check":
        expected = f" (expected: {error.expected})" if error.expected else ""
        return cls(level, name, error.found + expected, error.hint)


def check_devices(configuration: Configuration, machine: Node) -> list[Check]:
    """Check the GPUs or cores of this machine against the configuration."""
    needed = configuration.ranks_per_node
    if configuration.get("device") == "cpu":
        if needed > machine.cores:
            hint = f"request at most {machine.cores} to go faster"
            return [Check("WARN", "cores", f"{needed} ranks share {machine.cores} cores", hint)]
        return [Check("OK", "cores", f"{needed} ranks on {machine.cores} cores")]
    if not machine.gpus:
        hint = "use --system cpu, which runs the same code on the toy data set"
        return [Check("FAIL", "GPUs", f"{needed} GPUs requested, none found on {machine.hostname}", hint)]
    if needed > len(machine.gpus):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        message = f"{len(machine.gpus)} found" + ("" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}")
        return [Check("FAIL", "GPUs", f"{needed} GPUs requested, {message}", f"request at most {len(machine.gpus)}")]
    kinds = {gpu.name for gpu in machine.gpus[:needed]}
    if len(kinds) > 1:
        message = f"the GPUs differ: {', '.join(sorted(kinds))}"
        return [Check("WARN", "GPUs", message, "the slowest sets the pace; choose with CUDA_VISIBLE_DEVICES")]
    return [Check("OK", "GPUs", f"{needed} of {len(machine.gpus)} x {machine.gpus[0].name}")]


def check_data_sets(folders: Mapping[str, Path]) -> list[Check]:
    """Check prepared data sets, one row each; an additional row lists the benchmarks without a data set."""
    checks, missing = [], []
    for name, folder in folders.items():
        try:
            checks.append(Check("OK", f"{name} data", f"{check_data(folder, name).name} in {folder}"))
        except EncoreError as error:
            if (folder / PASSPORT).exists():
                checks.append(Check("WARN", f"{name} data", error.found, error.hint))
            else:
                missing.append(name)
    if missing:
        hint = "encore data prepare BENCHMARK SOURCE -o DIR; the first run on CPUs creates the toy data set"
        checks.append(Check("WARN", "data sets", f"not prepared: {', '.join(missing)}", hint))
    return checks


def check_data_set(
    configuration: Configuration, data: Path, machine: Node | None = None
) -> tuple[Check, DataPassport | None]:
    """Check the data set's manifest against the benchmark and the configuration; with ``machine`` also the memory."""
    try:
        manifest = check_data(data, configuration.choice.benchmark.name)
        mismatches = configuration.mismatches(read_json(data / PASSPORT), _rank_memory(configuration, machine))
    except EncoreError as error:
        expected = f"; expected {error.expected}" if error.expected else ""
        return Check("FAIL", "data set", error.found + expected, error.hint), None
    except KeyError as error:
        return Check("FAIL", "data set", f"{data / PASSPORT} lacks {error}", "prepare the data set again"), None
    for problem, expected, hint in mismatches:
        # The message names the mismatch: data set, ranks, or memory.
        return Check("FAIL", "fit", f"with {manifest.name} in {data}: {problem}; expected {expected}", hint), manifest
    if manifest.unearned:
        problem = f"{data} is called {manifest.name} and is not: {manifest.unearned}"
        return Check("WARN", "data set", problem, "use the published data set, or continue with own data"), manifest
    return Check("OK", "data set", f"{manifest.name} in {data}"), manifest


def _rank_memory(configuration: Configuration, machine: Node | None) -> float:
    # Memory limit per rank in bytes: GPU memory, or an equal part of free host memory
    if machine is not None and configuration.get("device") == "cpu":
        return float(psutil.virtual_memory().available) / configuration.ranks_per_node
    return min((gpu.memory_gib for gpu in machine.gpus if gpu.memory_gib) if machine else (), default=math.inf) * 2**30


def check_results(results: Path, resumes: bool = False) -> Check:
    folder = existing(results)
    if not folder.is_dir():
        return Check("FAIL", "results folder", f"{folder} is not a folder", "choose a different folder: --results DIR")
    if not os.access(folder, os.W_OK | os.X_OK):
        hint = "resume as its owner" if resumes else "choose a different folder: --results DIR"
        return Check("FAIL", "results folder", f"{folder} is not writable", hint)
    free = shutil.disk_usage(folder).free / 2**30
    if free < RESULTS_GIB:
        hint = "free some space" + ("" if resumes else ", or choose a folder on a different disk: --results DIR")
        return Check("FAIL", "disk", f"{free:.2f} GiB free for results, {RESULTS_GIB:g} needed", hint)
    return Check("OK", "disk", f"{free:.0f} GiB free for results")


def check_shared_memory(configuration: Configuration) -> Check:
    """Check /dev/shm, which ranks on a node use to communicate (recommended in NCCL's troubleshooting guide)."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return Check("WARN", "shared memory", "no /dev/shm", "mount it: ranks communicate through it")
    mib = usage.total // 2**20
    if configuration.get("device") == "gpu" and mib < 1024:
        return Check("WARN", "shared memory", f"/dev/shm has {mib} MiB", "increase it to at least 1 GiB (--shm-size)")
    return Check("OK", "shared memory", f"/dev/shm has {mib} MiB")


def check_limits(configuration: Configuration) -> Check:
    """Check the limit on open files, for DALI and the sockets between ranks."""
    soft, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 256 + 64 * configuration.ranks
    short = Check("WARN", "open files", f"limit {soft}, {needed} may be needed", f"ulimit -n {needed}")
    return short if soft < needed else Check("OK", "open files", f"limit {soft}")


def family(accelerator: str) -> str:
    """Return ``V100`` of ``NVIDIA Tesla V100-SXM2-16GB``."""
    return accelerator.replace("NVIDIA ", "").replace("Tesla ", "").split("-")[0]


def memory_gib(accelerator: str) -> float:
    """Return ``16`` of ``NVIDIA Tesla V100-SXM2-16GB``; 0 where the name does not say."""
    last = accelerator.rsplit("-", 1)[-1].removesuffix("GB")
    return float(last) if last.isdigit() else 0.0


def check_accelerator(configuration: Configuration, machine: Node) -> list[Check]:
    """Return whether the GPUs are of the kind that the configuration was submitted on."""
    submitted = configuration.system.accelerator
    if configuration.get("device") == "cpu" or not machine.gpus or family(submitted) in machine.gpus[0].name:
        return []
    message = f"the configuration was submitted on {submitted}, this is {machine.gpus[0].name}"
    hint = "a batch that fits there may not fit here, and the times cannot be compared with each other"
    return [Check("WARN", "accelerator", message, hint)]


def check_submission(configuration: Configuration, manifest: DataPassport | None) -> Check:
    if configuration.get("device") == "cpu":
        return Check("OK", "configuration", "a CPU run: tests the code, not a reproduction")
    if configuration.system.kind == "small":
        return Check("OK", "configuration", "the toy data set: tests the code, not a reproduction")
    if not configuration.is_submitted:
        return Check("WARN", "configuration", f"not a submitted configuration: {configuration.why_not_submitted}")
    full = configuration.choice.benchmark.full_data.name
    if manifest is not None and manifest.unearned:
        return Check("WARN", "configuration", f"submitted with {full}, this is own data: {manifest.unearned}")
    if manifest is not None and manifest.name != full:
        return Check("WARN", "configuration", f"submitted with {full}, this is {manifest.name}")
    return Check("OK", "configuration", f"every value as submitted: {configuration.system.source}")


def check_weights(configuration: Configuration, data: Path, creates_data: bool = False) -> list[Check]:
    """Check the weight files that the configuration names, and the published ones that it needs.

    ``creates_data``: the run prepares the toy data set first, with the weights in its directory.
    """
    hint = "give the full path, or the name of a file in the data directory; empty: start from random weights"
    checks, needed = [], configuration.needed_weights
    for key, path in weight_files(configuration, data).items():
        incomplete = _content_problem(configuration, key, path)
        if incomplete:
            get = f"encore data get {configuration.choice.benchmark.name} DIR --run downloads missing files"
            checks.append(Check("FAIL", key, incomplete, f"{get}; --set {key}=FILE for other weights"))
        elif key not in needed:
            if path.is_file():
                checks.append(Check("OK", key, str(path)))
            elif creates_data and path.parent == data:
                checks.append(Check("OK", key, f"{path} will be created with the toy data set"))
            else:
                checks.append(Check("FAIL", key, f"{path} {_absence(path)}", f"--set {key}=FILE: {hint}"))
        else:
            checks.append(check_published_weights(key, path, needed[key]))
    return checks


def _content_problem(configuration: Configuration, key: str, path: Path) -> str:
    # Files of other formats are only checked for content: TensorFlow's and pickled ones have published checksums.
    published = configuration.choice.benchmark.weights[key]
    if not path.is_file():
        return ""
    if any(weights.file.endswith((safetensors_files.SUFFIX, safetensors_files.INDEX)) for weights in published):
        return safetensors_files.problem(path)
    return "" if path.stat().st_size else f"{path} contains no weights"


def check_published_weights(key: str, path: Path, expected: Weights) -> Check:
    """Verify a submitted configuration's initial weights."""
    instead = f"--set {key}=FILE for a different path; --set {key}= starts from random weights, unlike the submission"
    get = f"put {' and '.join((expected.file, *expected.also))} of {expected.source} into the data folder; {instead}"
    same_form = path.suffix == Path(expected.file).suffix
    for file in (path, *(path.with_name(name) for name in expected.also if same_form)):
        if not file.is_file():
            return Check("FAIL", key, f"{file} {_absence(file)} (expected: {expected.title})", get)
    if not same_form or not expected.checksums:
        unknown = f"no checksum of a {path.suffix} file is published; its names and shapes are checked when it is read"
        return Check("WARN", key, f"{path} for {expected.title}: {unknown}")
    for algorithm, published in expected.checksums.items():
        digest = file_digest(path, algorithm)
        if not digest.startswith(published):
            valid = f"{expected.title}: {' or '.join(published)} ({expected.published})"
            return Check("FAIL", key, f"{path} has the {algorithm.upper()} {digest} (expected: {valid})", get)
    return Check("OK", key, f"{path}: {expected.title}, as published")


def check_run(
    configuration: Configuration, machine: Node, data: Path, results: Path, creates_data: bool = False
) -> list[Check]:
    """Return all checks for a run on the `host` runtime; ``creates_data`` as in ``check_weights``."""
    data_check, manifest = check_data_set(configuration, data, machine)
    return [
        *check_devices(configuration, machine),
        *check_accelerator(configuration, machine),
        data_check,
        *check_weights(configuration, data, creates_data),
        check_results(results),
        check_shared_memory(configuration),
        check_limits(configuration),
        check_submission(configuration, manifest),
    ]


def refuse_failed(checks: list[Check]) -> None:
    for check in checks:
        if check.level == "FAIL":
            raise EncoreError(f"{check.name}: {check.found}", hint=check.hint)
