"""Build MLPerf submission trees from runs for mlperf-logging's package checker.

    SUBMITTER/
        results/SYSTEM/BENCHMARK/result_0.txt ...
        systems/SYSTEM.json
        benchmarks/BENCHMARK/implementations/SYSTEM/    run.json, config.json and the code that was run

Logs are copied unchanged (gzip is unpacked). The package checker of the round is used; rounds that it does not
support are packed without a verdict.
"""

import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from encore import files, paths
from encore.errors import EncoreError
from encore.machine.node import cores
from encore.results.compare.run_set import RunSet, load_run_sets
from encore.results.compliance import official
from encore.results.findings import ComplianceReport, Finding, Severity
from encore.results.format import count_of
from encore.results.logs.run_log import read_run, submitter_of
from encore.results.published.systems import DESCRIPTION_FIELDS
from encore.results.rules import canonical, is_before
from encore.results.scores.score import SCALING_FILE, read_scaling

_PLAIN_NAME = re.compile(r"[^A-Za-z0-9._+-]+")
_CHECKED_SINCE = "v0.6"
_AVAILABILITY_SINCE = "v4.0"
# System description values by the submission_status in a log (mlperf-logging, system_desc_checker.py)
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
# System description fields and the corresponding names in Encore
_FIELDS = {
    "number_of_nodes": "nodes",
    "host_processors_per_node": "cpus_per_node",
    "host_processor_core_count": "cores_per_cpu",
    "accelerators_per_node": "accelerators_per_node",
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


@dataclass(frozen=True)
class Package:
    """Submitter tree for a round, and the verdict of the package checker."""

    folder: Path
    round: str
    sets: int = 0
    logs: int = 0
    accepted: bool | None = None  # None if the checker does not support the round
    summary: str = ""
    errors: tuple[str, ...] = ()


def write_archive(runs: Sequence[Path], output: Path, submitter: str | None = None) -> list[Package]:
    """Pack every set of runs at or below ``runs`` into ``output``; one package per round and submitter."""
    sets = _sets([run_set for path in runs for run_set in load_run_sets(path)], submitter)
    rounds = {round_ for round_, *_ in sets}
    packages: dict[Path, Package] = {}
    for (round_, org, system, benchmark), sides in sets.items():
        folder = (output / round_ if len(rounds) > 1 else output) / org
        results = folder / "results" / system / benchmark
        if results.exists():
            raise EncoreError(f"{results} already exists", hint="choose a new folder, or remove the old archive")
        results.mkdir(parents=True)
        logs = [run.path for run_set in sides for run in run_set.logs]
        for number, log in enumerate(logs):
            _copy_log(log, results / f"result_{number}.txt")
        (folder / "systems").mkdir(exist_ok=True)
        described = {**_system_description(sides[0], round_), "submitter": org, "system_name": system}
        text = json.dumps(described, indent=2, ensure_ascii=False)
        (folder / "systems" / f"{system}.json").write_text(text + "\n", encoding="utf-8")
        _copy_runs(sides, benchmark, folder / "benchmarks" / benchmark / "implementations" / system)
        package = packages.get(folder, Package(folder, round_))
        packages[folder] = replace(package, sets=package.sets + 1, logs=package.logs + len(logs))
    return list(packages.values())


def check_package(package: Package) -> Package:
    """Return the package with the verdict of mlperf-logging's package checker, which MLCommons uses for submissions."""
    logs = count_of(package.logs, "log")
    if package.round < _CHECKED_SINCE:
        return replace(package, summary=f"packed {logs}; no package checker in mlperf-logging for {package.round}")
    ruleset = f"{package.round.removeprefix('v')}.0"
    accepted, errors = run_checker("package_checker", package.folder, ruleset)
    verdict = "accepts it" if accepted else "does not accept it"
    summary = f"packed {logs} in {count_of(package.sets, 'set')}; the package checker, {ruleset}, {verdict}"
    return replace(package, accepted=accepted, summary=summary, errors=() if accepted else errors)


def run_checker(name: str, folder: Path, ruleset: str) -> tuple[bool, tuple[str, ...]]:
    """Run mlperf-logging's ``package_checker`` or ``repo_checker``; return the verdict and the errors.

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


def _sets(sides: Sequence[RunSet], submitter: str | None) -> dict[tuple[str, str, str, str], list[RunSet]]:
    # By round, submitter, system and benchmark: a set may span multiple run folders
    groups: dict[tuple[str, str, str, str], list[RunSet]] = {}
    for run in sides:
        if run.round is None or run.benchmark is None:
            lacking = "round" if run.benchmark else "benchmark"
            raise EncoreError(
                f"the {lacking} of {run.folder} is not known",
                expected="logs with round and benchmark",
                hint="archive the folders of the other logs separately",
            )
        org = submitter or submitter_of(run.logs) or "unknown"
        key = (run.round, _plain(org), _plain(_system_name(run)), run.benchmark)
        groups.setdefault(key, []).append(run)
    return groups


def _plain(name: str) -> str:
    # Safe folder name: no separators or leading dots
    return _PLAIN_NAME.sub("_", name.strip()).lstrip(".") or "unknown"


def _system_name(run: RunSet) -> str:
    # For Encore runs, host, ranks and framework; for submissions, the parent of the benchmark folder
    if run.passport:
        node = run.passport.get("node")
        host = (node.get("hostname") if isinstance(node, dict) else None) or "host"
        image = run.passport.get("implementation") or run.hardware.framework or ""
        return f"{host}_{run.passport.get('system', '')}_n{run.passport.get('nodes', 1)}_{image}"
    folder = (run.folder or Path()).absolute()
    return (folder.parent if folder.name.lower() in (run.benchmark, "mask", "results") else folder).name


def _copy_log(source: Path, target: Path) -> None:
    with source.open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
    if not compressed:
        shutil.copyfile(source, target)
        return
    with files.archive_errors(source), gzip.open(source, "rb") as packed, target.open("wb") as plain:
        shutil.copyfileobj(files.Bounded(packed, files.max_unpacked(source)), plain)


def _copy_runs(sides: Sequence[RunSet], benchmark: str, target: Path) -> None:
    # Copy the run records and the benchmark code of this checkout; run.json records later changes
    of_runs = [run for run in sides if run.passport]
    for number, run in enumerate(of_runs):
        destination = target / f"run_{number}"
        destination.mkdir(parents=True)
        for name in ("run.json", "config.json", "system.json"):
            source = (run.folder or Path()) / name
            if source.is_file():
                shutil.copyfile(source, destination / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for source in (paths.benchmark_folder(benchmark), paths.BENCHMARKS / "common"):
        if of_runs and source.is_dir():
            shutil.copytree(source, target / "code" / source.name, ignore=ignored)


def _system_description(run_set: RunSet, round_: str) -> dict[str, Any]:
    # MLPerf system description: from the run if present, otherwise converted from system data
    path = (run_set.folder or Path()) / "system.json"
    description = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    system = run_set.hardware
    values = {name: getattr(system, field) for name, field in _FIELDS.items()}
    described: dict[str, Any] = {
        **dict.fromkeys(DESCRIPTION_FIELDS, ""),
        "status": system.status or "onprem",
        **{name: "" if value is None else str(value) for name, value in values.items()},
        "other_software_stack": dict(system.software),
        "division": "closed",
        **description,
    }
    if not is_before(round_, _AVAILABILITY_SINCE):
        described["status"] = _AVAILABILITY.get(described["status"], described["status"])
    division = next((run.division for run in run_set.logs if run.division), None)
    return {**described, "division": division or described["division"]}


_RESULT = re.compile(r"result_(\d+)\.txt")
_EXPECTED = "SUBMITTER/results/SYSTEM/BENCHMARK/result_0.txt and SUBMITTER/systems/SYSTEM.json"
_RULES = "submission rules of MLPerf Training, directory structure"
_KNOWN_FILES = frozenset({SCALING_FILE, "package_checker_params"})
_NO_POINTS_BEFORE = "2.1.0"
_NO_REPOSITORY_CHECK_BEFORE = "2.0.0"
_LARGEST_DESCRIPTION = 1 << 20
_SAME_FACTOR = 1e-6


def check_trees(root: Path, ruleset: str | None = None) -> list[ComplianceReport]:
    """Return a report per submitter tree at or directly below ``root``."""
    # The checkers are separate processes; threads suffice to use all cores.
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(partial(_check_tree, round_override=ruleset), submission_trees(root)))


def submission_trees(root: Path) -> list[Path]:
    """Return the submitter trees at or directly below ``root``; raises if none."""
    trees = [folder for folder in (root, *_folders(root)) if (folder / "results").is_dir()]
    if not trees:
        raise EncoreError(f"no submission tree in {root}", expected=_EXPECTED, hint="pass the submitter's folder")
    return trees


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError as error:
        raise EncoreError(f"cannot read {folder}: {error.strerror}", hint="check the path") from error


def _check_tree(folder: Path, round_override: str | None) -> ComplianceReport:
    sets = [of_benchmark for of_system in _folders(folder / "results") for of_benchmark in _folders(of_system)]
    ruleset, how = (round_override, "as asked for") if round_override else _detect_ruleset(sets)
    findings = [*_check_systems(folder, sets), *_check_code(folder, sets)]
    findings += [finding for result_set in sets for finding in _check_set(result_set, ruleset)]
    if not sets:
        findings.append(_finding("no folder results/SYSTEM/BENCHMARK", _EXPECTED, "put the logs there"))
    if ruleset in official.rulesets():
        findings += _run_official_checkers(folder, sets, ruleset)
    return ComplianceReport(
        path=folder,
        ruleset=ruleset,
        ruleset_found=how,
        checker=f"{official.version()}, package_checker and repo_checker, and Encore's rules",
        findings=tuple(findings),
    )


def _finding(problem: str, expected: str, hint: str, severity: Severity = "error", rule: str = _RULES) -> Finding:
    return Finding(line=None, rule=rule, expected=expected, found=problem, hint=hint, severity=severity)


def _detect_ruleset(sets: list[Path]) -> tuple[str | None, str]:
    # Most common ruleset of the first logs of the sets
    firsts = [file for result_set in sets for file in sorted(result_set.glob("result*.txt"))[:1]]
    rounds = Counter(round_ for file in firsts if (round_ := read_run(file).round))
    for round_, _ in rounds.most_common(1):
        return f"{round_.removeprefix('v')}.0", "from the logs"
    return None, "the round is not in any log of the tree"


def _check_systems(folder: Path, sets: list[Path]) -> Iterator[Finding]:
    for system in dict.fromkeys(result_set.parent.name for result_set in sets):
        expected = f"systems/{system}.json with the system's description, division closed or open"
        description, reason = _read_description(folder, system)
        if description is None:
            yield _finding(
                f"systems/{system}.json: {reason}", expected, "describe the system; see mlcommons/submissions"
            )
        elif description.get("division") not in ("closed", "open"):
            problem = f"systems/{system}.json: division {str(description.get('division'))[:40]!r}"
            yield _finding(problem, expected, "write closed or open")


def _check_code(folder: Path, sets: list[Path]) -> Iterator[Finding]:
    for benchmark in dict.fromkeys(result_set.name for result_set in sets):
        if not (folder / "benchmarks" / benchmark).is_dir():
            expected = f"benchmarks/{benchmark} with the code that was run and its README"
            yield _finding(f"no folder benchmarks/{benchmark}", expected, "add the code", "warning")


def _read_description(folder: Path, system: str) -> tuple[dict[str, object] | None, str]:
    path = folder / "systems" / f"{system}.json"
    try:
        if path.stat().st_size > _LARGEST_DESCRIPTION:
            return None, "larger than 1 MiB"
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None, "not there"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"not readable as JSON: {str(error)[:80]}"
    return (content, "") if isinstance(content, dict) else (None, "not a JSON object")


def _check_set(result_set: Path, ruleset: str | None) -> Iterator[Finding]:
    location = f"results/{result_set.parent.name}/{result_set.name}"
    from mlperf_logging.benchmark_meta import get_allowed_benchmarks, get_result_file_counts

    allowed: frozenset[str] = frozenset()
    with suppress(ValueError):
        allowed = frozenset(get_allowed_benchmarks("training", ruleset or ""))
    if allowed and result_set.name not in allowed:
        expected = f"a benchmark of {ruleset}: {', '.join(sorted(allowed))}"
        meant = canonical(result_set.name)
        hint = f"rename it to {meant}" if meant in allowed else "remove it, or set the round with --ruleset"
        # The package checker skips such a folder without a word of error.
        yield _finding(f"{location}: not checked by the package checker", expected, hint)
    names = [entry.name for entry in result_set.iterdir() if entry.is_file()]
    numbers = sorted(int(match[1]) for name in names if (match := _RESULT.fullmatch(name)))
    first = 1 if numbers[:1] == [1] else 0  # Some submitters number from 1
    count = get_result_file_counts("training").get(result_set.name)
    if count and len(numbers) != count:
        expected = f"exactly {count}, result_0.txt to result_{count - 1}.txt"
        yield _finding(
            f"{location}: {count_of(len(numbers), 'result file')}",
            expected,
            "submit the number of runs that the round requires",
        )
    elif numbers != list(range(first, first + len(numbers))):
        expected = f"result_0.txt to result_{len(numbers) - 1}.txt"
        yield _finding(f"{location}: the numbers of the files have gaps", expected, "number them from 0", "warning")
    unexpected = [name for name in names if not _RESULT.fullmatch(name) and name not in _KNOWN_FILES]
    if unexpected:
        problem = f"{location}: {count_of(len(unexpected), 'other file')}, such as {min(unexpected)[:60]}"
        yield _finding(problem, "result_N.txt, scaling.json and power/ only", "remove or rename them", "warning")


def _run_official_checkers(folder: Path, sets: list[Path], ruleset: str) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as scratch:
        copy = _link_tree(folder, sets, Path(scratch) / folder.name)
        accepted, errors = run_checker("package_checker", copy, ruleset)
        if not accepted:
            expected, hint = "a tree that the package checker accepts", "see the findings of `encore check`"
            rule = f"{official.version()}, package_checker {ruleset}"
            yield from (
                _finding(message.replace(str(copy), folder.name), expected, hint, rule=rule) for message in errors
            )
        if _version(ruleset) >= _version(_NO_POINTS_BEFORE):
            for result_set in sets:
                yield from _check_scaling(result_set, read_scaling(copy / result_set.relative_to(folder)).factor)
    if _version(ruleset) >= _version(_NO_REPOSITORY_CHECK_BEFORE):
        for error in run_checker("repo_checker", folder, ruleset)[1]:
            rule = f"{official.version()}, repo_checker {ruleset}"
            # The checker treats all relative links as broken.
            severity: Severity = "warning" if "symbolic link" in error else "error"
            yield _finding(error, "files that fit a Git repository", "rename, remove or shorten them", severity, rule)


def _check_scaling(result_set: Path, computed: float | None) -> Iterator[Finding]:
    factor = read_scaling(result_set).factor
    if abs((factor or 1.0) - (computed or 1.0)) <= _SAME_FACTOR:
        return
    yield _finding(
        f"results/{result_set.parent.name}/{result_set.name}: {SCALING_FILE} "
        + (f"has {factor:.6f}" if factor else "is not there"),
        f"a factor of {computed:.6f}" if computed else f"no {SCALING_FILE}",
        "let the package checker write it",
        rule=f"{official.version()}, rcp_checker: the factor by the reference convergence points",
    )


def _version(ruleset: str) -> tuple[int, ...]:
    return tuple(int(part) for part in ruleset.split("."))


def _link_tree(folder: Path, sets: list[Path], copy: Path) -> Path:
    # Tree of links to the files of ``folder``, without scaling.json and undescribed systems. The package checker stops
    # at the first system without a description, which is already reported as a finding.
    (copy / "results").mkdir(parents=True)
    if (folder / "systems").is_dir():
        (copy / "systems").symlink_to((folder / "systems").resolve(), target_is_directory=True)
    for result_set in sets:
        if _read_description(folder, result_set.parent.name)[0] is None:
            continue
        target = copy / result_set.relative_to(folder)
        target.mkdir(parents=True)
        for entry in result_set.iterdir():
            if entry.name != SCALING_FILE:
                (target / entry.name).symlink_to(entry.resolve(), target_is_directory=entry.is_dir())
        parameters = result_set.parent / "package_checker_params"
        if parameters.is_file() and not (target.parent / parameters.name).exists():
            (target.parent / parameters.name).symlink_to(parameters.resolve())
    return copy
