"""Mutation testing: change one operator or constant at a time and run the tests.

    $ python -m tools.mutants encore/results --number 20 --seed 1 --tests tests/results
    $ make test ARGS="-m 'not training and not engine and not cluster' --cov . --cov-context test"
    $ python -m tools.mutants encore benchmarks --number 100 --seed 7 --coverage .coverage --output mutants.json

A mutant replaces one comparison, arithmetic operator, ``and``/``or`` or ``not``, or increments a number. It is
killed if one of its tests fails; tests that also fail without it do not count. Its tests are those that cover its
line in the coverage data, the most specific first, then the test files without trainings that import the module.
Mutants are created in a clone of the checkout, which contains committed files only.
"""

import ast
import functools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from coverage import CoverageData

from tools import run

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
MOST_TESTS = 100
WITHOUT_TRAININGS = "in_framework or not training and not engine and not cluster and not gpu"


@dataclass(frozen=True)
class Mutant:
    # A single change, and the tests that were run

    file: str
    line: int
    before: str
    after: str
    tests: list[str]
    killed: bool | None = None  # Whether a test failed; None where no test was found, or one fails without the mutant


def mutable_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    # Yield the nodes that can be changed; annotations and docstrings have none
    for node in ast.walk(tree):
        operator = getattr(node, "op", None) or (getattr(node, "ops", None) or [None])[0]
        number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if type(operator) in SWAPS or number or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            yield node


def mutate(node: ast.AST) -> ast.AST:
    # ``node`` with one change
    if isinstance(node, ast.Constant):
        return ast.Constant(node.value + 1)  # type: ignore[operator]
    if isinstance(node, ast.UnaryOp):
        return node.operand
    if isinstance(node, ast.Compare):
        return ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
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


def tests_by_coverage(file: Path) -> Callable[[Mutant], list[str]]:
    # Return a function for the tests that cover a mutant's line, or the module if the line runs at import
    data = CoverageData(str(file))
    data.read()
    by_line = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
    looks = Counter(name for lines in by_line.values() for names in lines.values() for name in names)

    def tests(mutant: Mutant) -> list[str]:
        lines = next((lines for path, lines in by_line.items() if path.endswith(f"/{mutant.file}")), {})
        last = max((line for line in lines if line <= mutant.line), default=0)
        names = {*lines.get(last, ())} - {""} or {name for contexts in lines.values() for name in contexts if name}
        selected = sorted(names, key=lambda name: (looks[name], name))[:MOST_TESTS]
        return list(dict.fromkeys(name.rpartition("|")[0] for name in selected))

    return tests


def importers(root: Path, source: str) -> list[str]:
    # The test files that import the module
    package, _, name = source.removesuffix(".py").removesuffix("/__init__").replace("/", ".").rpartition(".")
    imports = re.compile(rf"from {package} import \(?[\w\s,]*\b{name}\b|(from|import) {package}\.{name}\b")
    files = sorted((root / "tests").rglob("*.py"))
    return [str(path.relative_to(root)) for path in files if imports.search(path.read_text(encoding="utf-8"))]


def fails(root: Path, tests: Sequence[str], marks: str) -> bool:
    # Whether a test fails; it may also hang for ever, which counts as a failure after ten minutes
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    try:
        done = subprocess.run([*command, "-m", marks, *tests], cwd=root, capture_output=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 5)


def main(
    sources: Annotated[list[str], typer.Argument(help="folders or files of this checkout")],
    tests: Annotated[str, typer.Option(help="test files and folders, separated by commas")] = "",
    coverage: Annotated[Path | None, typer.Option(help="measured with contexts: chooses the tests")] = None,
    marks: Annotated[str, typer.Option(help="pytest's -m")] = WITHOUT_TRAININGS,
    number: int = 20,
    seed: int = 1,
    output: Annotated[Path | None, typer.Option(help="file for the results (JSON)")] = None,
) -> None:
    # Create and test mutants; print a line per mutant, and the number killed
    tried: list[Mutant] = []
    covering = tests_by_coverage(coverage) if coverage else lambda mutant: []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkout"
        subprocess.run(["git", "clone", "--quiet", ".", str(root)], check=True)
        fail_unchanged = functools.cache(lambda test_set: fails(root, test_set, marks))
        for mutant, text in draw(root, sources, number, seed):
            killed, looked = None, list[str]()
            sets = [tests.split(",")] if tests else [covering(mutant), importers(root, mutant.file)]
            for test_set in filter(None, sets):
                (root / mutant.file).write_text(text, encoding="utf-8")
                # Python identifies a .pyc file by time and size of the source: mutants need different times.
                os.utime(root / mutant.file, (len(tried), len(tried)))
                looked += test_set
                noticed = fails(root, test_set, marks)
                subprocess.run(["git", "checkout", "--quiet", mutant.file], cwd=root, check=True)
                if not noticed or not fail_unchanged((*test_set,)):
                    killed = noticed
                if killed:
                    break
            tried.append(Mutant(**{**asdict(mutant), "tests": looked, "killed": killed}))
            state = {True: "killed", False: "SURVIVED", None: "no test"}[killed]
            print(f"{state:9} {mutant.file}:{mutant.line} {mutant.before!r} -> {mutant.after!r}", flush=True)
            if output:
                output.write_text(json.dumps([asdict(entry) for entry in tried], indent=1), encoding="utf-8")
    print(f"{sum(entry.killed is True for entry in tried)} of {len(tried)} mutants killed")


if __name__ == "__main__":
    run(main, __doc__)
