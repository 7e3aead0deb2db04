"""Mutation testing: change one operator or constant at a time and run the tests.

    $ python -m tools.mutants encore/results --number 20 --seed 1 --tests tests/results
    $ make test ARGS="-m 'not training and not engine and not cluster' --cov . --cov-context test --durations 0" > log
    $ python -m tools.mutants encore --number 100 --seed 7 --coverage .coverage --durations log

A mutant replaces one comparison, arithmetic operator, ``and``/``or`` or ``not``, or increments a number. ``<`` becomes
``<=``, but ``>=`` in comparisons with a division or a float, because measured values do not equal a limit. A mutant is
killed if one of its tests fails; tests that also fail without it do not count. Its tests are those that cover its
line in the coverage data, the fastest first, then framework tests that import the module, directly or not, then the toy
run of an implementation that does; without coverage data, all test files that import it. Mutants are created in a clone
of the checkout, which contains committed files only.

Not mutated, because no test on this machine could or should notice:

- the duration of waits (numbers in ``timeout=`` and ``sleep()``, and constants that are used only there): they limit
  how long a failure takes, and a test that notices depends on the load
- the size of caches (``maxsize=``)
- ``if __name__ == "__main__"``, ``if TYPE_CHECKING`` and comparisons of ``sys.version_info``: tests import modules,
  with one Python
"""

import ast
import contextlib
import functools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, TypeGuard

import pytest
import typer
from coverage import CoverageData

from encore import catalogue, paths
from tools import run

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NEGATIONS = {**SWAPS, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
MOST_TESTS = 100  # Per mutant, if their durations are unknown
MOST_SECONDS = 300.0  # Per mutant, if they are known
HANG_SECONDS = 300.0  # Of all tests of a mutant, which counts as killed then
MOST_FILES = 4  # Framework tests per mutant
MARKS = "not long and not engine and not cluster and not gpu"
TOY_RUN = "tests/benchmarks/test_toy_runs.py::test_toy_run_reaches_its_target_and_passes_the_checker"
NEVER_IN_TESTS = re.compile(r"if (__name__ ==|TYPE_CHECKING)|sys\.version_info [<>]")
# Test processes are forked from one that has imported pytest and packages that do not import Encore.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["pytest", "jsonschema", "pydantic", "typer.testing"])


@dataclass(frozen=True)
class Mutant:
    # A single change, and the tests that were run

    file: str
    line: int
    before: str
    after: str
    tests: list[str]
    killed: bool | None = None  # Whether a test failed; None where no test was found, or one fails without the mutant


def is_load(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def skipped_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    # Yield the roots of the subtrees that are not mutated, see the module's docstring
    waits: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("timeout", "maxsize"):
            waits.append(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep"):
            waits += node.args
        elif isinstance(node, (ast.If, ast.Compare)) and NEVER_IN_TESTS.match(ast.unparse(node)):
            yield node
    loads = Counter(node.id for node in ast.walk(tree) if is_load(node))
    waits_for = Counter(node.id for wait in waits for node in ast.walk(wait) if is_load(node))
    for statement in tree.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Name) and 0 < loads[target.id] == waits_for[target.id]:
            yield statement
    yield from waits


def mutable_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    # Yield the nodes that can be changed
    skipped = {node for root in skipped_nodes(tree) for node in ast.walk(root)}
    for node in ast.walk(tree):
        operator = getattr(node, "op", None) or (getattr(node, "ops", None) or [None])[0]
        number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        if (type(operator) in SWAPS or number or negation) and node not in skipped:
            yield node


def compares_floats(node: ast.Compare) -> bool:
    parts = [*ast.walk(node)]
    has_division = any(isinstance(part, ast.Div) for part in parts)
    return has_division or any(isinstance(part, ast.Constant) and isinstance(part.value, float) for part in parts)


def mutate(node: ast.AST) -> ast.AST:
    # ``node`` with one change
    if isinstance(node, ast.Constant):
        return ast.Constant(node.value + 1)  # type: ignore[operator]
    if isinstance(node, ast.UnaryOp):
        return node.operand
    if isinstance(node, ast.Compare):
        swap = (NEGATIONS if compares_floats(node) else SWAPS)[type(node.ops[0])]
        return ast.Compare(node.left, [swap(), *node.ops[1:]], node.comparators)
    fields = dict(ast.iter_fields(node))
    return type(node)(**{**fields, "op": SWAPS[type(fields["op"])]()})


def draw(root: Path, sources: Sequence[str], number: int, seed: int) -> Iterator[tuple[Mutant, str]]:
    # Yield ``number`` mutants with the file's source; all nodes are equally likely
    listed = subprocess.run(["git", "ls-files", *sources], cwd=root, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.split() if name.endswith(".py")]
    texts = {name: (root / name).read_text(encoding="utf-8") for name in files}
    candidates = [
        (name, index) for name, text in texts.items() for index in range(len([*mutable_nodes(ast.parse(text))]))
    ]
    for name, index in random.Random(seed).sample(candidates, min(number, len(candidates))):
        node = [*mutable_nodes(ast.parse(texts[name]))][index]
        original, after = ast.get_source_segment(texts[name], node), f"({ast.unparse(mutate(node))})"
        lines = texts[name].encode().splitlines(keepends=True)
        start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
        source = texts[name].encode()
        text = (source[:start] + after.encode() + source[end:]).decode()
        yield Mutant(name, node.lineno, original or "", after, []), text


def tests_by_coverage(file: Path, durations: Mapping[str, float]) -> Callable[[Mutant], list[str]]:
    # Return a function for the tests that cover a mutant's line, or the module if the line runs at import.
    # A test that covers few lines is more likely to fail: duration times lines gives the shortest expected time.
    data = CoverageData(str(file))
    data.read()
    by_line = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
    looks = Counter(name for lines in by_line.values() for names in lines.values() for name in names)

    def tests(mutant: Mutant) -> list[str]:
        lines = next((lines for path, lines in by_line.items() if path.endswith(f"/{mutant.file}")), {})
        last = max((line for line in lines if line <= mutant.line), default=0)
        contexts = {*lines.get(last, ())} - {""} or {name for names in lines.values() for name in names if name}
        cost = {name.rpartition("|")[0]: looks[name] for name in sorted(contexts, key=lambda name: -looks[name])}
        cost = {name: lines * max(durations.get(name, 0.0), 0.01) for name, lines in cost.items()}
        selected, seconds, cases = list[str](), 0.0, Counter[str]()
        for name in sorted(cost, key=lambda name: (cost[name], name)):
            # Further cases of a test find less than a different test.
            cases[name.partition("[")[0]] += 1
            cost[name] *= cases[name.partition("[")[0]]
        for name in sorted(cost, key=lambda name: (cost[name], name)):
            if not selected or seconds + durations.get(name, MOST_SECONDS / MOST_TESTS) <= MOST_SECONDS:
                selected.append(name)
                seconds += durations.get(name, MOST_SECONDS / MOST_TESTS)
        return selected

    return tests


def read_durations(log: Path) -> dict[str, float]:
    # Seconds of each test in the output of pytest --durations 0
    seconds: Counter[str] = Counter()
    for duration, name in re.findall(
        r"^([\d.]+)s (?:setup|call|teardown) +(\S.*)$", log.read_text("utf-8"), re.MULTILINE
    ):
        seconds[name] += float(duration)
    return dict(seconds)


@functools.cache
def imports(root: Path, file: str) -> set[str]:
    # Files of the checkout that a file imports, including module names in strings, as for importlib.import_module
    names = set[str]()
    for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"benchmarks(\.\w+)+", str(node.value)):
            names.add(str(node.value))
    files = [name.replace(".", "/") + suffix for name in names for suffix in (".py", "/__init__.py")]
    return {path for path in files if (root / path).is_file()}


def distance(root: Path, file: str, source: str) -> float:
    # Length of the shortest chain of imports from a file to ``source``; infinite if it does not import it
    reached, last, steps = {file}, {file}, 0
    while last and source not in reached:
        last = set[str]().union(*(imports(root, name) for name in last)) - reached
        reached, steps = reached | last, steps + 1
    return steps if source in reached else math.inf


def importers(root: Path, source: str, in_framework: bool) -> list[str]:
    # Test files that import the module; for coverage data the nearest framework tests and a toy run instead
    def nearest(files: Mapping[str, str], number: int) -> list[str]:
        steps = {name: distance(root, file, source) for name, file in files.items()}
        return sorted((name for name in steps if steps[name] < math.inf), key=lambda name: (steps[name], name))[:number]

    tests = sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("*.py"))
    if not in_framework:
        return [name for name in tests if source in imports(root, name)]
    framework_tests = {name: name for name in tests if re.match(r"tests/in_framework/\w+/", name)}
    trainings = {
        f"{TOY_RUN}[{name}]": f"{choice.folder.relative_to(paths.ROOT)}/train.py"
        for name, choice in catalogue.choices().items()
    }
    return nearest(framework_tests, MOST_FILES) + nearest(trainings, 1)


class Failures:
    """Pytest plugin that records names of failed tests and of files that pytest cannot import."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.names += [report.nodeid] * report.failed

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.names += [report.nodeid] * report.failed


def run_pytest(root: Path, arguments: Sequence[str], sender: Connection) -> None:
    # Run in a forked process, and send the exit code and the failures
    os.setsid()
    os.chdir(root)
    os.environ["PYTHONPATH"] = sys.path[0] = str(root)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "encore", "tests", "tools")]:
        del sys.modules[name]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    failures = Failures()
    code = pytest.main([*arguments], plugins=[failures])
    sender.send((int(code), failures.names))


def first_failure(root: Path, tests: Sequence[str], marks: str) -> str | None:
    # The first test that fails or hangs
    receiver, sender = FORK.Pipe(duplex=False)
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-m", marks, *tests]
    process = FORK.Process(target=run_pytest, args=(root, arguments, sender))
    process.start()
    sender.close()
    try:
        code, names = receiver.recv() if receiver.poll(HANG_SECONDS) else (1, [])
    except EOFError:
        code, names = 1, []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    if code in (0, 5):
        return None
    return next((test for name in names for test in tests if test.startswith(name) or name.startswith(test)), tests[0])


def is_killed(root: Path, mutant: Mutant, text: str, passes: Callable[[str], bool], marks: str) -> bool | None:
    # Whether a test fails only with the mutant; None if no test passes without it
    tests, killed = mutant.tests, None
    while tests:
        (root / mutant.file).write_text(text, encoding="utf-8")
        # Python identifies a .pyc file by time and size of the source: mutants need different times.
        stamp = time.time_ns() // 1000
        os.utime(root / mutant.file, (stamp, stamp))
        failed = first_failure(root, tests, marks)
        subprocess.run(["git", "checkout", "--quiet", mutant.file], cwd=root, check=True)
        if failed is None or passes(failed):
            return failed is not None
        print(f"fails without a mutant: {failed}", flush=True)
        killed = False if tests.index(failed) else killed
        tests = tests[tests.index(failed) + 1 :]
    return killed


def main(
    sources: Annotated[list[str], typer.Argument(help="folders or files of this checkout")],
    tests: Annotated[str, typer.Option(help="test files and folders, separated by commas")] = "",
    coverage: Annotated[Path | None, typer.Option(help="measured with contexts: chooses the tests")] = None,
    durations: Annotated[Path | None, typer.Option(help="output of the same run with --durations 0")] = None,
    marks: Annotated[str, typer.Option(help="pytest's -m")] = MARKS,
    number: int = 20,
    seed: int = 1,
    output: Annotated[Path | None, typer.Option(help="file for the results (JSON)")] = None,
) -> None:
    # Create and test mutants; print a line per mutant, and the number killed
    tried: list[Mutant] = []
    seconds = read_durations(durations) if durations else {}
    covering = tests_by_coverage(coverage, seconds) if coverage else lambda mutant: []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkout"
        subprocess.run(["git", "clone", "--quiet", ".", str(root)], check=True)
        passes = functools.cache(lambda test: first_failure(root, [test], marks) is None)
        for mutant, text in draw(root, sources, number, seed):
            start = time.monotonic()
            selected = tests.split(",") if tests else covering(mutant)
            if not tests:
                selected += importers(root, mutant.file, in_framework=coverage is not None)
            mutant = replace(mutant, tests=selected)
            tried.append(replace(mutant, killed=is_killed(root, mutant, text, passes, marks)))
            state = {True: "killed", False: "SURVIVED", None: "no test"}[tried[-1].killed]
            took_s = time.monotonic() - start
            print(
                f"{state:9} {mutant.file}:{mutant.line} {mutant.before!r} -> {mutant.after!r} ({took_s:.0f} s)",
                flush=True,
            )
            if output:
                output.write_text(json.dumps([asdict(entry) for entry in tried], indent=1), encoding="utf-8")
    print(f"{sum(entry.killed is True for entry in tried)} of {len(tried)} mutants killed")


if __name__ == "__main__":
    run(main, __doc__)
