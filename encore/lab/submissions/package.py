"""Check a submission tree that somebody else made, as MLCommons checks it, and its layout in plain words.

    from encore.lab.submissions.package import check_trees
    for report in check_trees(Path("training_results_v4.1")):
        print(report.path, report.passed)

mlperf-logging's package checker writes and removes ``scaling.json``: it runs on a copy made of links.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from encore.errors import EncoreError
from encore.lab.submissions.archive import run_checker
from encore.machine.node import cores
from encore.results.compliance import official
from encore.results.findings import ComplianceReport, Finding, Severity
from encore.results.logs.run_log import read_run
from encore.results.rules import canonical
from encore.results.scores.score import SCALING_FILE, read_scaling
from encore.results.words import count_of

_RESULT = re.compile(r"result_(\d+)\.txt")
_EXPECTED = "SUBMITTER/results/SYSTEM/BENCHMARK/result_0.txt and SUBMITTER/systems/SYSTEM.json"
_RULES = "submission rules of MLPerf Training, directory structure"
_KNOWN_FILES = frozenset({SCALING_FILE, "package_checker_params"})
_NO_POINTS_BEFORE = "2.1.0"
_NO_REPOSITORY_CHECK_BEFORE = "2.0.0"
_LARGEST_DESCRIPTION = 1 << 20
_SAME_FACTOR = 1e-6


@dataclass(frozen=True)
class _Set:
    folder: Path
    system: str
    benchmark: str


def check_trees(root: Path, ruleset: str | None = None) -> list[ComplianceReport]:
    """Return a report on each submitter's tree at or directly below ``root``."""
    found = [folder for folder in (root, *_folders(root)) if (folder / "results").is_dir()]
    if not found:
        raise EncoreError(f"no submission tree in {root}", expected=_EXPECTED, hint="name the submitter's folder")
    # The checkers are processes of their own, so that threads are enough to use every core.
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(partial(_check_tree, asked=ruleset), found))


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError as error:
        raise EncoreError(f"cannot read {folder}: {error.strerror}", hint="check the path") from error


def _check_tree(folder: Path, asked: str | None) -> ComplianceReport:
    sets = [
        _Set(below, system.name, below.name) for system in _folders(folder / "results") for below in _folders(system)
    ]
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


def _ruleset_of(sets: list[_Set]) -> tuple[str | None, str]:
    # The ruleset of most first logs of the sets
    firsts = (next(iter(sorted(each.folder.glob("result*.txt"))), None) for each in sets)
    rounds = Counter(run.round for file in firsts if file and (run := read_run(file)).round)
    if not rounds:
        return None, "no log of the tree shows its round"
    round_ = rounds.most_common(1)[0][0] or ""
    return f"{round_.removeprefix('v')}.0", "from the logs"


def _of_systems(folder: Path, sets: list[_Set]) -> Iterator[Finding]:
    for system in dict.fromkeys(each.system for each in sets):
        wanted = f"systems/{system}.json with the system's description, division closed or open"
        description, why = _description(folder, system)
        if description is None:
            yield _finding(f"systems/{system}.json: {why}", wanted, "describe the system; see mlcommons/submissions")
        elif description.get("division") not in ("closed", "open"):
            division = str(description.get("division"))[:40]
            yield _finding(f"systems/{system}.json: division {division!r}", wanted, "write closed or open")


def _of_code(folder: Path, sets: list[_Set]) -> Iterator[Finding]:
    for benchmark in dict.fromkeys(each.benchmark for each in sets):
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


def _of_set(one: _Set, ruleset: str | None) -> Iterator[Finding]:
    where = f"results/{one.system}/{one.benchmark}"
    allowed, required = _known_benchmarks(ruleset)
    if allowed and one.benchmark not in allowed:
        expected = f"a benchmark of {ruleset}: {', '.join(sorted(allowed))}"
        meant = canonical(one.benchmark)
        hint = f"rename it to {meant}" if meant in allowed else "remove it, or name its round with --ruleset"
        # The package checker skips such a folder without a word of error.
        yield _finding(f"{where}: not checked by the package checker", expected, hint)
    names = [entry.name for entry in one.folder.iterdir() if entry.is_file()]
    numbers = sorted(int(match[1]) for name in names if (match := _RESULT.fullmatch(name)))
    count = required.get(one.benchmark)
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


def _official(folder: Path, sets: list[_Set], ruleset: str) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as scratch:
        copy = _copy_of_links(folder, sets, Path(scratch) / folder.name)
        accepted, errors = run_checker("package_checker", copy, ruleset)
        for error in errors if not accepted else ():
            found = error.replace(str(copy), folder.name)
            rule = f"{official.version()}, package_checker {ruleset}"
            yield _finding(
                found, "a tree that the package checker accepts", "see the findings of `encore check`", rule=rule
            )
        for one in sets if _version(ruleset) >= _version(_NO_POINTS_BEFORE) else ():
            yield from _of_scaling(one, read_scaling(copy / "results" / one.system / one.benchmark).factor)
    if _version(ruleset) >= _version(_NO_REPOSITORY_CHECK_BEFORE):
        for error in run_checker("repo_checker", folder, ruleset)[1]:
            rule = f"{official.version()}, repo_checker {ruleset}"
            # It takes every relative link for a broken one.
            severity: Severity = "warning" if "symbolic link" in error else "error"
            yield _finding(error, "files that a Git repository takes", "rename, remove or shorten them", severity, rule)


def _of_scaling(one: _Set, computed: float | None) -> Iterator[Finding]:
    given = read_scaling(one.folder).factor
    if abs((given or 1.0) - (computed or 1.0)) <= _SAME_FACTOR:
        return
    yield _finding(
        f"results/{one.system}/{one.benchmark}: {SCALING_FILE} " + (f"has {given:.6f}" if given else "is not there"),
        f"a factor of {computed:.6f}" if computed else f"no {SCALING_FILE}",
        "let the package checker write it",
        rule=f"{official.version()}, rcp_checker: the factor by the reference convergence points",
    )


def _version(ruleset: str) -> tuple[int, ...]:
    return tuple(int(part) for part in ruleset.split("."))


def _copy_of_links(folder: Path, sets: list[_Set], copy: Path) -> Path:
    # A tree of links to the files of ``folder``, without scaling.json and systems that are not described. The package
    # checker ends at the first system without a description; it is a finding already
    (copy / "results").mkdir(parents=True)
    if (folder / "systems").is_dir():
        (copy / "systems").symlink_to((folder / "systems").resolve(), target_is_directory=True)
    for one in sets:
        if _description(folder, one.system)[0] is None:
            continue
        target = copy / "results" / one.system / one.benchmark
        target.mkdir(parents=True)
        for entry in one.folder.iterdir():
            if entry.name != SCALING_FILE:
                (target / entry.name).symlink_to(entry.resolve(), target_is_directory=entry.is_dir())
        parameters = one.folder.parent / "package_checker_params"
        if parameters.is_file() and not (target.parent / parameters.name).exists():
            (target.parent / parameters.name).symlink_to(parameters.resolve())
    return copy
