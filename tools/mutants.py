"""Change one operator or constant at a time and see whether the tests notice.

    $ python -m tools.mutants encore/results --number 20 --seed 1 --tests tests/results
    $ python -m tools.mutants encore benchmarks --number 100 --seed 7 --tests auto --output mutants.json

A mutant replaces one comparison, arithmetic operator, ``and``/``or`` or ``not``, or adds one to a number. It is killed
when one of its tests fails; tests that fail without it, too, show nothing. ``--tests auto`` runs, for each mutant, the
test files that name the module or one of its folders, those without trainings. Mutants are made in a clone of the
checkout, which has what was committed.
"""

import ast
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from tools import run

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
AUTO = "auto"
WITHOUT_TRAININGS = "in_framework or not training and not engine and not cluster and not gpu"


@dataclass(frozen=True)
class Mutant:
    # A change of one place, and which tests looked at it

    file: str
    line: int
    before: str
    after: str
    tests: list[str]
    killed: bool | None = None  # Whether a test failed; None where no test was found, or one fails without the mutant


def places(tree: ast.Module) -> Iterator[ast.AST]:
    # Yield the nodes that can be changed; annotations and docstrings have none
    for node in ast.walk(tree):
        operator = getattr(node, "op", None) or (getattr(node, "ops", None) or [None])[0]
        number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if type(operator) in SWAPS or number or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            yield node


def changed(node: ast.AST) -> ast.AST:
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
    # Yield ``number`` mutants with the text of their whole files, each place equally likely
    listed = subprocess.run(["git", "ls-files", *sources], cwd=root, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.split() if name.endswith(".py")]
    texts = {name: (root / name).read_text(encoding="utf-8") for name in files}
    every = [(name, place) for name, text in texts.items() for place in range(len([*places(ast.parse(text))]))]
    for name, place in random.Random(seed).sample(every, min(number, len(every))):
        node = [*places(ast.parse(texts[name]))][place]
        before, after = ast.get_source_segment(texts[name], node), f"({ast.unparse(changed(node))})"
        lines = texts[name].encode().splitlines(keepends=True)
        start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
        whole = texts[name].encode()
        text = (whole[:start] + after.encode() + whole[end:]).decode()
        yield Mutant(name, node.lineno, before or "", after, []), text


def tests_of(root: Path, source: str) -> list[str]:
    # The test files that import the module, or name its folder; the closest few
    module = source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    wanted = (f"from {package} import", f"from {module} import", f"import {module}")
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(each in text for each in wanted) and name in text:
            found.append(str(path.relative_to(root)))
    room = f"tests/{source.split('/')[1]}"
    return found or ([room] if (root / room).is_dir() else [])


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
    tests: Annotated[str, typer.Option(help="test files and folders, with commas between them, or auto")] = AUTO,
    marks: Annotated[str, typer.Option(help="pytest's -m")] = WITHOUT_TRAININGS,
    number: int = 20,
    seed: int = 1,
    output: Annotated[Path | None, typer.Option(help="write what was found as JSON")] = None,
) -> None:
    # Draw mutants and try them; prints a line each, and how many were killed
    found: list[Mutant] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkout"
        subprocess.run(["git", "clone", "--quiet", ".", str(root)], check=True)
        fail_unchanged = functools.cache(lambda chosen: fails(root, chosen, marks))
        for mutant, text in draw(root, sources, number, seed):
            chosen = tests_of(root, mutant.file) if tests == AUTO else tests.split(",")
            killed = None
            if chosen and not fail_unchanged((*chosen,)):
                (root / mutant.file).write_text(text, encoding="utf-8")
                # Python knows a module's compiled form by the time and size of its source: each mutant has a time.
                os.utime(root / mutant.file, (len(found), len(found)))
                killed = fails(root, chosen, marks)
                subprocess.run(["git", "checkout", "--quiet", mutant.file], cwd=root, check=True)
            found.append(Mutant(**{**asdict(mutant), "tests": chosen, "killed": killed}))
            state = {True: "killed", False: "SURVIVED", None: "no test"}[killed]
            print(f"{state:9} {mutant.file}:{mutant.line} {mutant.before!r} -> {mutant.after!r}", flush=True)
            if output:
                output.write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")
    print(f"{sum(each.killed is True for each in found)} of {len(found)} mutants killed")


if __name__ == "__main__":
    run(main, __doc__)
