"""Rules on the declarations in logs of v6.0 and later: precision, parallelism and micro-batch.

Logs without declarations are not checked. Declarations are compared with each other, with the system description,
with the declared script, and for runs of Encore with run.json and a profile.
"""

import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from encore.files import text_of
from encore.results.audit.anomalies import Anomaly, Check
from encore.results.audit.kernels import BITS, PROFILES, Precision, read_profile, table
from encore.results.logs.reader import number_of
from encore.results.logs.run_log import RunLog
from encore.results.published.published import System
from encore.results.published.systems import family, nearest_description
from encore.results.rules import passport_of
from encore.results.scores.score import Score

PRECISION = "lowest_numerical_precision_in_"
PARALLELISM = ("tensor_parallelism", "pipeline_parallelism", "context_parallelism", "expert_parallelism")
KEYS = (*(f"{PRECISION}{part}" for part in ("linear", "attn", "comm")), *PARALLELISM, "micro_batch_size")
_FILE = "config_filename"
_ALIASES = {f"{PRECISION}linear": "lowest_numerical_precision_linear"}  # AMD's logs of v6.0
_MAX_PARENTS = 5
_EXPORT = re.compile(
    r"^[ \t]*(?:export[ \t]+)?([A-Z][A-Z0-9_]*)=(?:\$\{\1:-)?[\"']?([\w.-]+)[\"']?\}?[ \t]*(?:#.*)?$", re.MULTILINE
)
_YES, _NO = frozenset({"true", "1"}), frozenset({"false", "0"})


def declared_values(run: RunLog) -> dict[str, object]:
    """Return the keys that a log declares, by the names of the rules."""
    logged = run.hyperparameters
    values = {key: logged.get(key, logged.get(_ALIASES.get(key, ""))) for key in (*KEYS, _FILE)}
    return {key: value for key, value in values.items() if value is not None}


# Decorator: run the check on each log that declares something.
def _for_declaring_logs(check: Callable[[Score, RunLog, dict[str, object]], Iterator[str]]) -> Check:
    def check_set(score: Score) -> Iterator[Anomaly]:
        for run in score.runs:
            if values := declared_values(run):
                yield from (Anomaly(text, run.path) for text in check(score, run, values))

    return check_set


# Declared positive integer; None if missing or invalid
def _positive_int(values: Mapping[str, object], key: str) -> int | None:
    number = number_of(values.get(key))
    return int(number) if number is not None and number >= 1 and number == int(number) else None


def accelerators(score: Score) -> tuple[System | None, int | None]:
    """Return the described system of a set, and its number of accelerators."""
    system = nearest_description(score.folder)
    if system is None or not system.nodes or not system.accelerators_per_node:
        return system, None
    return system, system.nodes * system.accelerators_per_node


@_for_declaring_logs
def declared_parallelism(score: Score, run: RunLog, values: dict[str, object]) -> Iterator[str]:
    for key in (*PARALLELISM, "micro_batch_size"):
        if key in values and _positive_int(values, key) is None:
            yield f"{key} {values[key]}"
    _, count = accelerators(score)
    tensor, pipeline, context, expert = (_positive_int(values, key) or 1 for key in PARALLELISM)
    # Experts are spread over ranks that are data-parallel elsewhere.
    for text, ranks in (
        (f"tensor {tensor} x pipeline {pipeline} x context {context}", tensor * pipeline * context),
        (f"pipeline {pipeline} x expert {expert}", pipeline * expert),
    ):
        if count and count % ranks:
            yield f"{text} of {count} accelerators in the system description"


@_for_declaring_logs
def declared_batch(score: Score, run: RunLog, values: dict[str, object]) -> Iterator[str]:
    micro, total = _positive_int(values, "micro_batch_size"), run.global_batch
    _, count = accelerators(score)
    ranks = math.prod(_positive_int(values, key) or 1 for key in PARALLELISM[:3])
    if not micro or not total or not count or count % ranks:
        return
    steps = _positive_int(run.hyperparameters, "gradient_accumulation_steps")
    step = micro * (count // ranks)
    if total % step or (steps and total != step * steps):
        times = f" x {steps} accumulation steps" if steps else ""
        yield f"micro-batch {micro} x {count // ranks} data-parallel{times} does not match global batch {total:g}"


@_for_declaring_logs
def declared_hardware(score: Score, run: RunLog, values: dict[str, object]) -> Iterator[str]:
    system, _ = accelerators(score)
    name = family(system.accelerator if system is not None else None)
    lacks = {precision for row in table()["accelerator"] if name in row["families"] for precision in row["lacks"]}
    # Anything can be sent in any type.
    for key in (f"{PRECISION}linear", f"{PRECISION}attn"):
        if isinstance(precision := values.get(key), str) and precision in lacks:
            yield f"{key} {precision}, which {name} lacks"


# -- scripts and run folders -----------------------------------------------------------------------------------------


@_for_declaring_logs
def missing_config(score: Score, run: RunLog, values: dict[str, object]) -> Iterator[str]:
    root, scripts = _scripts(score, values)
    if root is not None and not scripts:
        yield f"{_FILE} {values[_FILE]}, which is not below {root.name}"


@_for_declaring_logs
def declared_script(score: Score, run: RunLog, values: dict[str, object]) -> Iterator[str]:
    _, scripts = _scripts(score, values)
    texts = [(script, list(_contradictions(values, script))) for script in scripts]
    # If several scripts have that name, the one that ran is unknown.
    if texts and all(lines for _, lines in texts):
        yield from (f"{line} in {texts[0][0].name}" for line in texts[0][1])


# Root folder of the declared script and files of that name, restricted to its benchmark and system if possible
def _scripts(score: Score, values: dict[str, object]) -> tuple[Path | None, list[Path]]:
    name = Path(str(values.get(_FILE, ""))).name
    if not name:
        return None, []
    if (score.folder / "run.json").is_file():
        return score.folder, [path for path in score.folder.iterdir() if path.name == name]
    candidates = (parent / "benchmarks" for parent in list(score.folder.absolute().parents)[:_MAX_PARENTS])
    root = next((parent for parent in candidates if any(parent.glob("*/implementations"))), None)
    paths = [path for path in _files(root) if path.name == name] if root is not None else []
    for part in (score.benchmark, score.folder.parent.name):
        paths = [path for path in paths if part in path.parts] or paths
    return root, paths


@functools.cache
def _files(root: Path) -> tuple[Path, ...]:
    return tuple(Path(folder) / name for folder, _, names in os.walk(root) for name in names)


def _contradictions(values: Mapping[str, object], script: Path) -> Iterator[str]:
    # Variables with constant values; the last assignment counts
    variables = dict(_EXPORT.findall(text_of(script)))
    for key, names in table()["variables"].items():
        for name in names:
            if key in values and name in variables and not _is_same(values[key], variables[name]):
                yield f"{key} {values[key]}, {name}={variables[name]}"
    linear = str(values.get(f"{PRECISION}linear"))
    fp8, fp4 = (variables.get(name, "").lower() for name in ("FP8", "FP4"))
    bits = BITS.get(linear, 0)
    if fp4 in _YES and bits > BITS["mxfp4"]:
        yield f"{PRECISION}linear {linear}, FP4={variables['FP4']}"
    elif (fp8 in _YES and bits > BITS["fp8"]) or (fp8 in _NO and fp4 not in _YES and 0 < bits <= BITS["fp8"]):
        yield f"{PRECISION}linear {linear}, FP8={variables['FP8']}"


# Whether a value in a script equals the declared value; only numbers and precisions are compared
def _is_same(logged: object, text: str) -> bool:
    numbers = number_of(logged), number_of(text)
    if None in numbers:
        return not (str(logged) in BITS and text in BITS) or text == logged
    return numbers[0] == numbers[1]


@_for_declaring_logs
def declared_run(score: Score, run: RunLog, values: dict[str, object]) -> Iterator[str]:
    number = re.search(r"\d+", run.path.name)
    evidence = passport_of(score.folder).get("evidence")
    configured = evidence.get(number[0] if number else "") if isinstance(evidence, dict) else None
    for key, value in configured.items() if isinstance(configured, dict) else ():
        if value is not None and key in values and values[key] != value:
            yield f"{key} {values[key]}, {value} by the configuration in run.json"


@_for_declaring_logs
def declared_kernels(score: Score, run: RunLog, values: dict[str, object]) -> Iterator[str]:
    for path, profile in _profiles(score.folder):
        for part, precision in profile.items() if not isinstance(profile, str) else ():
            logged = values.get(f"{PRECISION}{part}")
            if isinstance(logged, str) and precision.contradicts(logged):
                names = " or ".join(sorted(precision.lowest))
                yield f"{PRECISION}{part} {logged}, {names} in {path.name}: {precision.example[:80]}"


# Profiles in a folder, selected by suffix; a text instead of a profile is the reason why it cannot be read
def _profiles(folder: Path) -> Iterator[tuple[Path, dict[str, Precision] | str]]:
    for path in sorted(folder.glob("profile*")):
        if path.name.endswith(PROFILES) and path.is_file():
            yield path, _cached_profile(path, path.stat().st_mtime_ns, path.stat().st_size)


# Profiles have up to millions of events and are compared with every log in a set.
@functools.lru_cache(maxsize=64)
def _cached_profile(path: Path, modified: int, size: int) -> dict[str, Precision] | str:
    try:
        return read_profile(path)
    except ValueError as error:
        return str(error)


def unreadable_profile(score: Score) -> Iterator[Anomaly]:
    if any(map(declared_values, score.runs)):
        yield from (Anomaly(profile, path) for path, profile in _profiles(score.folder) if isinstance(profile, str))
