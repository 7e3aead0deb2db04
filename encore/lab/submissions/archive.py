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
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from encore import files, paths
from encore.errors import EncoreError
from encore.machine.node import cores
from encore.results.compare.run_set import RunSet, load_run_sets
from encore.results.compliance import official
from encore.results.findings import ComplianceReport, Finding, Severity
from encore.results.format import count_of
from encore.results.logs.run_log import read_run, submitter_of
from encore.results.published.published import System
from encore.results.published.systems import DESCRIPTION_FIELDS
from encore.results.rules import canonical, is_before
from encore.results.scores.score import SCALING_FILE, read_scaling

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
# The fields of a system description, and what they are called here
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
    """One submitter's tree of one round."""

    folder: Path
    round: str
    sets: int
    logs: int


class PackageJson(TypedDict):
    """One submitter's tree of one round, and what the package checker says of it."""

    folder: str
    round: str
    sets: int
    logs: int
    accepted: bool | None  # Null where the checker knows nothing of the round
    summary: str
    errors: tuple[str, ...]


@dataclass(frozen=True)
class PackageVerdict:
    """What the package checker says; ``accepted`` is None where it knows nothing of the round."""

    package: Package
    accepted: bool | None
    summary: str
    errors: tuple[str, ...] = ()

    def as_json(self) -> PackageJson:
        package = self.package
        return {
            "folder": str(package.folder), "round": package.round, "sets": package.sets, "logs": package.logs,
            "accepted": self.accepted, "summary": self.summary, "errors": self.errors,
        }  # fmt: skip


def write_archive(runs: Sequence[Path], output: Path, submitter: str | None = None) -> list[Package]:
    """Pack every set of runs at or below ``runs`` into ``output``; one package per round and submitter."""
    sets = _sets([side for path in runs for side in load_run_sets(path)], submitter)
    rounds = {round_ for round_, *_ in sets}
    packages: dict[Path, Package] = {}
    for (round_, org, system, benchmark), sides in sets.items():
        folder = (output / round_ if len(rounds) > 1 else output) / org
        results = folder / "results" / system / benchmark
        if results.exists():
            raise EncoreError(f"{results} is there already", hint="give a new folder, or remove the old archive")
        results.mkdir(parents=True)
        logs = [run.path for side in sides for run in side.logs]
        for number, log in enumerate(logs):
            _copy_log(log, results / f"result_{number}.txt")
        (folder / "systems").mkdir(exist_ok=True)
        described = {**_system_of(sides[0], round_), "submitter": org, "system_name": system}
        text = json.dumps(described, indent=2, ensure_ascii=False)
        (folder / "systems" / f"{system}.json").write_text(text + "\n", encoding="utf-8")
        _copy_runs(sides, benchmark, folder / "benchmarks" / benchmark / "implementations" / system)
        known = packages.get(folder, Package(folder=folder, round=round_, sets=0, logs=0))
        packages[folder] = replace(known, sets=known.sets + 1, logs=known.logs + len(logs))
    return list(packages.values())


def check_package(package: Package) -> PackageVerdict:
    """Let mlperf-logging's package checker judge the tree, as MLCommons does with a submission."""
    logs = count_of(package.logs, "log")
    if package.round < _CHECKED_SINCE:
        summary = f"packed {logs}; mlperf-logging has no package checker for {package.round}"
        return PackageVerdict(package, None, summary)
    ruleset = f"{package.round.removeprefix('v')}.0"
    accepted, errors = run_checker("package_checker", package.folder, ruleset)
    found = "accepts it" if accepted else "does not accept it"
    summary = f"packed {logs} in {count_of(package.sets, 'set')}; the package checker, {ruleset}, {found}"
    return PackageVerdict(package, accepted, summary, () if accepted else errors)


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


def _sets(sides: Sequence[RunSet], submitter: str | None) -> dict[tuple[str, str, str, str], list[RunSet]]:
    # By round, submitter, system and benchmark: a set's runs may be in several run folders
    found: dict[tuple[str, str, str, str], list[RunSet]] = {}
    for side in sides:
        if side.round is None or side.benchmark is None:
            lacking = "round" if side.benchmark else "benchmark"
            raise EncoreError(
                f"the {lacking} of {side.folder} is not known",
                expected="logs that say what they are of",
                hint="archive the folders of other logs without it",
            )
        org = submitter or submitter_of(side.logs) or "unknown"
        key = (side.round, _plain(org), _plain(_system_name(side)), side.benchmark)
        found.setdefault(key, []).append(side)
    return found


def _plain(name: str) -> str:
    # A name that is a folder's and nothing else: no separators, no leading dots
    return _PLAIN_NAME.sub("_", name.strip()).lstrip(".") or "unknown"


def _system_name(side: RunSet) -> str:
    # The host, ranks and framework of a run of Encore; the folder above the benchmark's of a submission
    if side.passport:
        node = side.passport.get("node")
        host = (node.get("hostname") if isinstance(node, dict) else None) or "host"
        image = side.passport.get("implementation") or side.hardware.framework or ""
        return f"{host}_{side.passport.get('system', '')}_n{side.passport.get('nodes', 1)}_{image}"
    folder = (side.folder or Path()).absolute()
    named_after_benchmark = folder.name.lower() in (side.benchmark, "mask", "results")
    return folder.parent.name if named_after_benchmark else folder.name


def _copy_log(source: Path, target: Path) -> None:
    with source.open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
    if not compressed:
        shutil.copyfile(source, target)
        return
    with files.archive_errors(source), gzip.open(source, "rb") as packed, target.open("wb") as plain:
        shutil.copyfileobj(files.Bounded(packed, files.max_unpacked(source)), plain)


def _copy_runs(sides: Sequence[RunSet], benchmark: str, target: Path) -> None:
    # The records of the runs, and the benchmark's code as it is in this checkout: run.json says what has changed since
    of_runs = [side for side in sides if side.passport]
    if not of_runs:
        return
    for number, side in enumerate(of_runs):
        kept = target / f"run_{number}"
        kept.mkdir(parents=True)
        for name in ("run.json", "config.json", "system.json"):
            source = (side.folder or Path()) / name
            if source.is_file():
                shutil.copyfile(source, kept / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for source in (paths.benchmark_folder(benchmark), paths.BENCHMARKS / "common"):
        if source.is_dir():
            shutil.copytree(source, target / "code" / source.name, ignore=ignored)


def _system_of(side: RunSet, round_: str) -> dict[str, Any]:
    # MLPerf's system description: the run's own, else what is known of the system, in its form
    own = (side.folder or Path()) / "system.json"
    known = json.loads(own.read_text("utf-8")) if own.is_file() else {}
    described: dict[str, Any] = {**_of_system(side.hardware), **known}
    if not is_before(round_, _AVAILABILITY_SINCE):
        described["status"] = _AVAILABILITY.get(described["status"], described["status"])
    division = next((run.division for run in side.logs if run.division), None) or described.get("division", "closed")
    return {**described, "division": division}


def _of_system(system: System) -> dict[str, Any]:
    described: dict[str, Any] = dict.fromkeys(DESCRIPTION_FIELDS, "")
    described |= {"division": "closed", "status": system.status or "onprem"}
    values = {name: getattr(system, field) for name, field in _FIELDS.items()}
    described |= {name: "" if value is None else str(value) for name, value in values.items()}
    return {**described, "other_software_stack": dict(system.software)}


_RESULT = re.compile(r"result_(\d+)\.txt")
_EXPECTED = "SUBMITTER/results/SYSTEM/BENCHMARK/result_0.txt and SUBMITTER/systems/SYSTEM.json"
_RULES = "submission rules of MLPerf Training, directory structure"
_KNOWN_FILES = frozenset({SCALING_FILE, "package_checker_params"})
_NO_POINTS_BEFORE = "2.1.0"
_NO_REPOSITORY_CHECK_BEFORE = "2.0.0"
_LARGEST_DESCRIPTION = 1 << 20
_SAME_FACTOR = 1e-6


def check_trees(root: Path, ruleset: str | None = None) -> list[ComplianceReport]:
    """Return a report on each submitter's tree at or directly below ``root``."""
    # The checkers are processes of their own, so that threads are enough to use every core.
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(partial(_check_tree, asked=ruleset), submission_trees(root)))


def submission_trees(root: Path) -> list[Path]:
    """Return the submitters' trees at or directly below ``root``, of which there is at least one."""
    found = [folder for folder in (root, *_folders(root)) if (folder / "results").is_dir()]
    if not found:
        raise EncoreError(f"no submission tree in {root}", expected=_EXPECTED, hint="name the submitter's folder")
    return found


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError as error:
        raise EncoreError(f"cannot read {folder}: {error.strerror}", hint="check the path") from error


def _check_tree(folder: Path, asked: str | None) -> ComplianceReport:
    sets = [of_benchmark for of_system in _folders(folder / "results") for of_benchmark in _folders(of_system)]
    ruleset, how = (asked, "as asked for") if asked else _ruleset_of(sets)
    findings = [*_of_systems(folder, sets), *_of_code(folder, sets)]
    findings += [each for one in sets for each in _of_set(one, ruleset)]
    if not sets:
        findings.append(_finding("no folder results/SYSTEM/BENCHMARK", _EXPECTED, "put the logs there"))
    if ruleset in official.rulesets():
        findings += _official(folder, sets, ruleset)
    return ComplianceReport(
        path=folder,
        ruleset=ruleset,
        ruleset_found=how,
        checker=f"{official.version()}, package_checker and repo_checker, and Encore's own rules",
        findings=tuple(findings),
    )


def _finding(found: str, expected: str, hint: str, severity: Severity = "error", rule: str = _RULES) -> Finding:
    return Finding(line=None, rule=rule, expected=expected, found=found, hint=hint, severity=severity)


def _ruleset_of(sets: list[Path]) -> tuple[str | None, str]:
    # The ruleset of most first logs of the sets
    firsts = (next(iter(sorted(each.glob("result*.txt"))), None) for each in sets)
    rounds = Counter(run.round for file in firsts if file and (run := read_run(file)).round)
    if not rounds:
        return None, "no log of the tree shows its round"
    round_ = rounds.most_common(1)[0][0] or ""
    return f"{round_.removeprefix('v')}.0", "from the logs"


def _of_systems(folder: Path, sets: list[Path]) -> Iterator[Finding]:
    for system in dict.fromkeys(each.parent.name for each in sets):
        wanted = f"systems/{system}.json with the system's description, division closed or open"
        description, why = _description(folder, system)
        if description is None:
            yield _finding(f"systems/{system}.json: {why}", wanted, "describe the system; see mlcommons/submissions")
        elif description.get("division") not in ("closed", "open"):
            division = str(description.get("division"))[:40]
            yield _finding(f"systems/{system}.json: division {division!r}", wanted, "write closed or open")


def _of_code(folder: Path, sets: list[Path]) -> Iterator[Finding]:
    for benchmark in dict.fromkeys(each.name for each in sets):
        if not (folder / "benchmarks" / benchmark).is_dir():
            expected = f"benchmarks/{benchmark} with the code that was run and its README"
            yield _finding(f"no folder benchmarks/{benchmark}", expected, "add the code", "warning")


def _description(folder: Path, system: str) -> tuple[dict[str, object] | None, str]:
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


def _of_set(one: Path, ruleset: str | None) -> Iterator[Finding]:
    where = f"results/{one.parent.name}/{one.name}"
    allowed, required = _known_benchmarks(ruleset)
    if allowed and one.name not in allowed:
        expected = f"a benchmark of {ruleset}: {', '.join(sorted(allowed))}"
        meant = canonical(one.name)
        hint = f"rename it to {meant}" if meant in allowed else "remove it, or name its round with --ruleset"
        # The package checker skips such a folder without a word of error.
        yield _finding(f"{where}: not checked by the package checker", expected, hint)
    names = [entry.name for entry in one.iterdir() if entry.is_file()]
    numbers = sorted(int(match[1]) for name in names if (match := _RESULT.fullmatch(name)))
    count = required.get(one.name)
    if count and len(numbers) != count:
        expected = f"exactly {count}, result_0.txt to result_{count - 1}.txt"
        yield _finding(
            f"{where}: {count_of(len(numbers), 'result file')}", expected, "submit as many runs as the round asks for"
        )
    elif numbers != list(range(len(numbers))):
        expected = f"result_0.txt to result_{len(numbers) - 1}.txt"
        yield _finding(f"{where}: the numbers of the files have gaps", expected, "number them from 0", "warning")
    unexpected = [name for name in names if not _RESULT.fullmatch(name) and name not in _KNOWN_FILES]
    if unexpected:
        found = f"{where}: {count_of(len(unexpected), 'other file')}, such as {min(unexpected)[:60]}"
        yield _finding(found, "result_N.txt, scaling.json and power/ alone", "remove or rename them", "warning")


def _known_benchmarks(ruleset: str | None) -> tuple[frozenset[str], dict[str, int]]:
    from mlperf_logging.benchmark_meta import get_allowed_benchmarks, get_result_file_counts

    try:
        allowed = frozenset(get_allowed_benchmarks("training", ruleset or ""))
    except ValueError:
        allowed = frozenset()
    return allowed, dict(get_result_file_counts("training"))


def _official(folder: Path, sets: list[Path], ruleset: str) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as scratch:
        copy = _copy_of_links(folder, sets, Path(scratch) / folder.name)
        accepted, errors = run_checker("package_checker", copy, ruleset)
        if not accepted:
            expected, hint = "a tree that the package checker accepts", "see the findings of `encore check`"
            rule = f"{official.version()}, package_checker {ruleset}"
            yield from (_finding(each.replace(str(copy), folder.name), expected, hint, rule=rule) for each in errors)
        if _version(ruleset) >= _version(_NO_POINTS_BEFORE):
            for one in sets:
                yield from _of_scaling(one, read_scaling(copy / one.relative_to(folder)).factor)
    if _version(ruleset) >= _version(_NO_REPOSITORY_CHECK_BEFORE):
        for error in run_checker("repo_checker", folder, ruleset)[1]:
            rule = f"{official.version()}, repo_checker {ruleset}"
            # It takes every relative link for a broken one.
            severity: Severity = "warning" if "symbolic link" in error else "error"
            yield _finding(error, "files that a Git repository takes", "rename, remove or shorten them", severity, rule)


def _of_scaling(one: Path, computed: float | None) -> Iterator[Finding]:
    given = read_scaling(one).factor
    if abs((given or 1.0) - (computed or 1.0)) <= _SAME_FACTOR:
        return
    yield _finding(
        f"results/{one.parent.name}/{one.name}: {SCALING_FILE} " + (f"has {given:.6f}" if given else "is not there"),
        f"a factor of {computed:.6f}" if computed else f"no {SCALING_FILE}",
        "let the package checker write it",
        rule=f"{official.version()}, rcp_checker: the factor by the reference convergence points",
    )


def _version(ruleset: str) -> tuple[int, ...]:
    return tuple(int(part) for part in ruleset.split("."))


def _copy_of_links(folder: Path, sets: list[Path], copy: Path) -> Path:
    # A tree of links to the files of ``folder``, without scaling.json and systems that are not described. The package
    # checker ends at the first system without a description; it is a finding already
    (copy / "results").mkdir(parents=True)
    if (folder / "systems").is_dir():
        (copy / "systems").symlink_to((folder / "systems").resolve(), target_is_directory=True)
    for one in sets:
        if _description(folder, one.parent.name)[0] is None:
            continue
        target = copy / one.relative_to(folder)
        target.mkdir(parents=True)
        for entry in one.iterdir():
            if entry.name != SCALING_FILE:
                (target / entry.name).symlink_to(entry.resolve(), target_is_directory=entry.is_dir())
        parameters = one.parent / "package_checker_params"
        if parameters.is_file() and not (target.parent / parameters.name).exists():
            (target.parent / parameters.name).symlink_to(parameters.resolve())
    return copy
