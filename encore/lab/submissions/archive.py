"""MLPerf's submission tree from runs, as mlperf-logging's package checker wants it.

    SUBMITTER/
        results/SYSTEM/BENCHMARK/result_0.txt ...
        systems/SYSTEM.json
        benchmarks/BENCHMARK/implementations/SYSTEM/    run.json, config.json and the code that was run

Logs are copied byte for byte (gzip is unpacked). The checker is the one of the round; rounds that it does not
know are packed and not judged.
"""

import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from encore import paths
from encore.errors import EncoreError
from encore.results.compare.sides import Side, load_sides
from encore.results.published.published import System
from encore.results.published.systems import DESCRIPTION_FIELDS
from encore.results.rules import is_before
from encore.results.words import count_of

_PLAIN_NAME = re.compile(r"[^A-Za-z0-9._+-]+")
_CHECKED_SINCE = "v0.6"
_AVAILABILITY_SINCE = "v4.0"
# The words that a system description has for a log's submission_status (mlperf-logging, system_desc_checker.py)
_AVAILABILITY = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "research": "Research, Development, or Internal (RDI)",
    "preview": "Preview",
}
_ERROR = re.compile(r"^(?:ERROR|CRITICAL)\s+-\s*(.*)")
_ACCEPTED = ("FOUND NO ERRORS, SUCCESS", "ALL CHECKS PASSED")
_MOST_ERRORS = 20
_LONGEST_CHECK_S = 1800
_TEXT_FIELDS = {
    "host_processor_model_name": "cpu",
    "host_memory_capacity": "host_memory",
    "host_storage_type": "storage",
    "host_networking": "network",
    "accelerator_model_name": "accelerator",
    "accelerator_memory_capacity": "accelerator_memory",
    "accelerator_interconnect": "accelerator_interconnect",
    "framework": "framework",
    "operating_system": "operating_system",
}
_COUNT_FIELDS = {
    "number_of_nodes": "nodes",
    "host_processors_per_node": "cpus_per_node",
    "host_processor_core_count": "cores_per_cpu",
    "accelerators_per_node": "accelerators_per_node",
}


@dataclass(frozen=True)
class Package:
    """One submitter's tree of one round."""

    folder: Path
    round: str
    sets: int
    logs: int


@dataclass(frozen=True)
class PackageVerdict:
    """What the package checker says; ``accepted`` is None where it knows nothing of the round."""

    package: Package
    accepted: bool | None
    summary: str
    errors: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as plain data."""
        return {
            "folder": str(self.package.folder),
            "round": self.package.round,
            "sets": self.package.sets,
            "logs": self.package.logs,
            "accepted": self.accepted,
            "summary": self.summary,
            "errors": list(self.errors),
        }


@dataclass(frozen=True, kw_only=True)
class _Set:
    # The runs of one benchmark on one system, perhaps from several run folders

    round: str
    submitter: str
    system: str
    benchmark: str
    sides: tuple[Side, ...]


def write_archive(runs: Sequence[Path], output: Path, submitter: str | None = None) -> list[Package]:
    """Pack every set of runs at or below ``runs`` into ``output``; one package per round and submitter."""
    sets = _sets([side for path in runs for side in load_sides(path)], submitter)
    rounds = {each.round for each in sets}
    packages: dict[Path, Package] = {}
    for each in sets:
        root = output / each.round if len(rounds) > 1 else output
        folder = root / each.submitter
        results = folder / "results" / each.system / each.benchmark
        if results.exists():
            raise EncoreError(f"{results} is there already", hint="give a new folder, or remove the old archive")
        logs = _write_set(folder, results, each)
        known = packages.get(folder, Package(folder=folder, round=each.round, sets=0, logs=0))
        packages[folder] = replace(known, sets=known.sets + 1, logs=known.logs + logs)
    return list(packages.values())


def check_package(package: Package) -> PackageVerdict:
    """Let mlperf-logging's package checker judge the tree, as MLCommons does with a submission."""
    logs = count_of(package.logs, "log")
    if package.round < _CHECKED_SINCE:
        summary = f"packed {logs}; mlperf-logging has no package checker for {package.round}"
        return PackageVerdict(package=package, accepted=None, summary=summary)
    ruleset = f"{package.round.removeprefix('v')}.0"
    accepted, errors = run_checker("package_checker", package.folder, ruleset)
    found = "accepts it" if accepted else "does not accept it"
    return PackageVerdict(
        package=package,
        accepted=accepted,
        summary=f"packed {logs} in {count_of(package.sets, 'set')}; the package checker, {ruleset}, {found}",
        errors=() if accepted else errors,
    )


def run_checker(name: str, folder: Path, ruleset: str) -> tuple[bool, tuple[str, ...]]:
    """Run mlperf-logging's ``package_checker`` or ``repo_checker``; return whether it accepts, and its errors.

    The package checker writes scaling.json into the folder.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable, "-m", f"mlperf_logging.{name}",
            str(folder.resolve()), "training", ruleset, "--log_output", f"{scratch}/checker.log",
        ]  # fmt: skip
        done = subprocess.run(
            command,
            cwd=scratch,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_LONGEST_CHECK_S,
        )
    accepted = done.returncode == 0 and any(text in done.stderr for text in _ACCEPTED)
    errors = [match[1].strip() for line in done.stderr.splitlines() if (match := _ERROR.match(line))]
    if not accepted and not errors:
        errors = done.stderr.strip().splitlines()[-1:]
    return accepted, tuple(dict.fromkeys(errors))[:_MOST_ERRORS]


def _sets(sides: Sequence[Side], submitter: str | None) -> list[_Set]:
    found: dict[tuple[str, str, str, str], list[Side]] = {}
    for side in sides:
        if side.round is None or side.benchmark is None:
            lacking = "round" if side.benchmark else "benchmark"
            raise EncoreError(
                f"the {lacking} of {side.folder} is not known",
                expected="logs that say what they are of",
                hint="archive the folders of other logs without it",
            )
        org = submitter or next((run.org for run in side.logs if run.org), None) or "unknown"
        key = (side.round, _plain(org), _plain(_system_name(side)), side.benchmark)
        found.setdefault(key, []).append(side)
    return [
        _Set(round=round_, submitter=org, system=system, benchmark=benchmark, sides=tuple(of_key))
        for (round_, org, system, benchmark), of_key in found.items()
    ]


def _plain(name: str) -> str:
    # A name that is a folder's and nothing else: no separators, no leading dots
    return _PLAIN_NAME.sub("_", name.strip()).lstrip(".") or "unknown"


def _system_name(side: Side) -> str:
    # The host, ranks and framework of a run of Encore; the folder above the benchmark's of a submission
    if side.passport:
        node = side.passport.get("node")
        host = (node.get("hostname") if isinstance(node, dict) else None) or "host"
        image = side.passport.get("implementation") or side.hardware.framework or ""
        return f"{host}_{side.passport.get('system', '')}_n{side.passport.get('nodes', 1)}_{image}"
    folder = (side.folder or Path()).absolute()
    named_after_benchmark = folder.name.lower() in (side.benchmark, "mask", "results")
    return folder.parent.name if named_after_benchmark else folder.name


def _write_set(folder: Path, results: Path, each: _Set) -> int:
    results.mkdir(parents=True)
    count = 0
    for side in each.sides:
        for run in side.logs:
            _copy_log(run.path, results / f"result_{count}.txt")
            count += 1
    systems = folder / "systems"
    systems.mkdir(exist_ok=True)
    description = json.dumps(_description(each), indent=2, ensure_ascii=False)
    (systems / f"{each.system}.json").write_text(description + "\n", encoding="utf-8")
    implementation = folder / "benchmarks" / each.benchmark / "implementations" / each.system
    for number, side in enumerate(side for side in each.sides if side.passport):
        kept = implementation / f"run_{number}"
        kept.mkdir(parents=True)
        for name in ("run.json", "config.json", "system.json"):
            source = (side.folder or Path()) / name
            if source.is_file():
                shutil.copyfile(source, kept / name)
    if any(side.passport for side in each.sides):
        _copy_code(each.benchmark, implementation / "code")
    return count


def _copy_log(source: Path, target: Path) -> None:
    with source.open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
    if not compressed:
        shutil.copyfile(source, target)
        return
    with gzip.open(source, "rb") as packed, target.open("wb") as plain:
        shutil.copyfileobj(packed, plain)


def _copy_code(benchmark: str, target: Path) -> None:
    # Copy the code of the benchmark as it is in this checkout; run.json says whether it has changed since
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for source in (paths.benchmark_folder(benchmark), paths.BENCHMARKS / "common"):
        if source.is_dir():
            shutil.copytree(source, target / source.name, ignore=ignored)


def _description(each: _Set) -> dict[str, Any]:
    # MLPerf's system description: the run's own, else what is known of the system, in its form
    side = each.sides[0]
    own = (side.folder or Path()) / "system.json"
    described: dict[str, Any] = {}
    if own.is_file():
        described = json.loads(own.read_text("utf-8"))
    described = {**_of_system(side.hardware), **described}
    if not is_before(each.round, _AVAILABILITY_SINCE):
        described["status"] = _AVAILABILITY.get(described["status"], described["status"])
    return {
        **described,
        "submitter": each.submitter,
        "division": next((run.division for run in side.logs if run.division), None)
        or described.get("division", "closed"),
        "system_name": each.system,
    }


def _of_system(system: System) -> dict[str, Any]:
    described: dict[str, Any] = dict.fromkeys(DESCRIPTION_FIELDS, "")
    described |= {"division": "closed", "status": system.status or "onprem"}
    described |= {name: getattr(system, field) or "" for name, field in _TEXT_FIELDS.items()}
    for name, field in _COUNT_FIELDS.items():
        value = getattr(system, field)
        described[name] = "" if value is None else str(value)
    return {**described, "other_software_stack": dict(system.software)}
