"""Tables in the documentation, Dockerfiles and JSON Schemas, written from the files and types that they show.

    $ python -m encore.cli.documentation --write     # `make docs`
    $ python -m encore.cli.documentation --check     # exit code 1 names each stale file

A table is between the lines ``<!-- generated: NAME BENCHMARK -->`` and ``<!-- end -->`` of a Markdown
file; the macros of documentation.j2 are the tables. What is between the two lines is replaced, nothing else is
touched. Dockerfiles and schemas are written whole.
"""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer

from encore import catalogue, configuration, names, paths
from encore.cli import schemas
from encore.containers import building, compatibility, images
from encore.errors import EncoreError, ExitCode
from encore.lab.scaling.overlap import overlap_table
from encore.results import findings
from encore.results.audit.audit import RULES
from encore.results.published import published, tables
from encore.results.rules import canonical
from encore.results.table import Table
from encore.run import published_speed

MARKER = re.compile(r"(<!-- generated: ([\w -]+) -->\n)(.*?)(?=(<!-- (?:end|generated:[^>]*) -->)|\Z)", re.DOTALL)
NO_VALUE = "–"


def submitted_results(choice: catalogue.Choice) -> list[tuple[catalogue.System, published.PublishedResult | None]]:
    name = canonical(choice.benchmark.name)
    every = [result for result in published.load_published() if result.benchmark == name]
    found = {(result.round, result.system): result for result in every}
    systems = [system for system in catalogue.systems(choice) if system.kind == "submitted"]
    return [(system, found.get((system.round, system.submission))) for system in systems]


def minutes(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.3f}"


def epochs(result: published.PublishedResult) -> str:
    # DLRM evaluates within an epoch, and its logs give all sixteen digits.
    shown = [f"{float(epoch):.5g}" for epoch in result.last_eval_epochs.split("-") if epoch]
    return " to ".join(dict.fromkeys(shown)) or NO_VALUE


def last_run(implementation: str, where: str) -> str:
    ran = [each for each in compatibility.tried() if (each.implementation, each.where) == (implementation, where)]
    return max((each.date for each in ran if not each.problem), default="never run")


def state(release: images.Release, choice: catalogue.Choice) -> str:
    """Return whether an implementation can run on a release, and at its first that is too old, why not."""
    found = compatibility.too_old(release, choice)
    if found is None:
        return "never run"
    old = [f"{compatibility.title(name)} {each}" for name, each in found[1].items()] if found[0] == release else []
    return f"too old: {', '.join(old)}" if old else "too old"


def predicted(benchmark: str) -> Table:
    # scipy, which only this table needs, takes half a second to load.
    from encore.lab.scaling.validation import error_table

    return error_table(benchmark)


@cache
def checks() -> dict[str, list[str]]:
    # The checks that the self-test makes of each implementation on a GPU, as its own program lists them.
    small = {}
    for choice in catalogue.choices().values():
        system = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
        small[choice.implementation.module] = configuration.resolve(choice, system, 1, 1, []).plain()
    program = (
        "from benchmarks.common.checks.selftest import check_names as f; print(json.dumps(f(json.load(sys.stdin))))"
    )
    command = [sys.executable, "-c", f"import json, sys; {program}"]
    listed = json.loads(subprocess.check_output(command, input=json.dumps(small), text=True, cwd=paths.ROOT))
    return {name: listed[choice.implementation.module] for name, choice in catalogue.choices().items()}


def in_all(listed: dict[str, list[str]]) -> list[str]:
    return [name for name in next(iter(listed.values())) if all(name in each for each in listed.values())]


def differing(choice: catalogue.Choice) -> Iterator[tuple[str, ...]]:
    """Yield the weights that submitted systems begin with, and what differs from the submission, by round."""
    for key, known in choice.benchmark.weights.items():
        for each in known:
            digests = [f" ({name.upper()} {' or '.join(d)}: {each.published})" for name, d in each.checksums.items()]
            submitted = f"{each.title}, from {each.source}{''.join(digests)}"
            rounds = ", ".join(each.rounds or choice.benchmark.rounds)
            yield rounds, "weights", submitted, f"the same, by the key `{key}`; refused without"
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for system in catalogue.systems(choice):
        for part in images.differences(choice, system):
            found.setdefault((part.what, part.submitted, part.here), {})[system.round] = None
    for parts, rounds_of in sorted(found.items(), key=lambda item: item[0][0]):
        yield ", ".join(rounds_of), *parts


def cell(value: Any) -> Any:
    # A bar inside a cell is escaped; what is marked safe is no cell.
    return value if hasattr(value, "__html__") else str(value).replace("|", "\\|")


TABLES = jinja2.Environment(
    finalize=cell, loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
).get_template(
    "documentation.j2",
    globals={
        "catalogue": catalogue, "configuration": configuration, "paths": paths, "bases": images,
        "versions": compatibility, "rates": findings, "RULES": RULES,
        "schemas": schemas, "calibrated": tables, "speeds": published_speed, "listed": checks,
        "fields": dataclasses.fields, "dumps": json.dumps, "submitted_results": submitted_results, "minutes": minutes,
        "epochs": epochs, "last_run": last_run, "state": state, "predicted": predicted, "overlapped": overlap_table,
        "in_all": in_all, "differing": differing,
    },
)  # fmt: skip


def table(marker: str) -> str:
    name, *benchmark = marker.split()
    known = vars(TABLES.module)
    if name.replace("-", "_") not in known:
        raise names.unknown("generated table", name, [each for each in known if not each.startswith("_")])
    return str(known[name.replace("-", "_")](*benchmark))


def renewed(text: str, path: Path) -> str:
    """Return ``text`` with every generated table as it should be; EncoreError for a marker without its end."""

    def replaced(found: re.Match[str]) -> str:
        if found[4] != "<!-- end -->":
            raise EncoreError(
                f"{path}: a generated table has no <!-- end -->", hint="add the line <!-- end --> below it"
            )
        return f"{found[1]}\n{table(found[2])}\n"

    return MARKER.sub(replaced, text)


def pages(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("benchmarks/*/README.md")])


def stale(root: Path) -> dict[Path, str]:
    wanted = {path: renewed(path.read_text(encoding="utf-8"), path) for path in pages(root)}
    wanted.update({**building.dockerfiles(), **schemas.files()})
    return {path: text for path, text in wanted.items() if not path.exists() or text != path.read_text("utf-8")}


def main(
    write: Annotated[bool, typer.Option("--write/--check", help="Write what is stale, or exit with 1 for it.")],
) -> None:
    try:
        found = stale(paths.ROOT)
    except EncoreError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    for path, text in found.items():
        if write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        typer.echo(f"{path.relative_to(paths.ROOT)}: {'written' if write else 'stale: run make docs'}")
    if found and not write:
        raise typer.Exit(ExitCode.FAILED)


if __name__ == "__main__":
    typer.run(main)
