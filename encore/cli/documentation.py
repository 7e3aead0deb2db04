"""Generate tables in the documentation, Dockerfiles and JSON Schemas from code and data files.

    $ python -m encore.cli.documentation --write     # `make docs`
    $ python -m encore.cli.documentation --check     # exit code 1, lists stale files

The text between ``<!-- generated: NAME BENCHMARK -->`` and ``<!-- end -->`` in a Markdown file is replaced by a
macro of documentation.j2. Dockerfiles and schemas are completely generated.
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

from encore import catalogue, configuration, paths
from encore.cli import schemas
from encore.containers import building, compatibility, images
from encore.errors import EncoreError, ExitCode, unknown_name
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
    results = [result for result in published.load_published() if result.benchmark == name]
    by_system = {(result.round, result.system): result for result in results}
    systems = [system for system in catalogue.systems(choice) if system.kind == "submitted"]
    return [(system, by_system.get((system.round, system.submission))) for system in systems]


def epochs(result: published.PublishedResult) -> str:
    # DLRM evaluates several times per epoch, and its logs contain sixteen digits.
    labels = [f"{float(epoch):.5g}" for epoch in result.last_eval_epochs.split("-") if epoch]
    return " to ".join(dict.fromkeys(labels)) or NO_VALUE


def last_run(implementation: str, environment: str) -> str:
    ran = [
        trial for trial in compatibility.tried() if (trial.implementation, trial.where) == (implementation, environment)
    ]
    return max((trial.date for trial in ran if not trial.problem), default="never run")


def state(release: images.Release, choice: catalogue.Choice) -> str:
    """Return whether an implementation runs on a release. The newest release that is too old lists the reasons."""
    outdated = compatibility.too_old(release, choice)
    if outdated is None:
        return "never run"
    old = (
        [f"{compatibility.title(name)} {version}" for name, version in outdated[1].items()]
        if outdated[0] == release
        else []
    )
    return f"too old: {', '.join(old)}" if old else "too old"


def predicted(benchmark: str) -> Table:
    # scipy takes half a second to import and is only needed here.
    from encore.lab.scaling.validation import error_table

    return error_table(benchmark)


@cache
def checks() -> dict[str, list[str]]:
    # Checks of the GPU self-test per implementation, as listed by the self-test program.
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
    return [name for name in next(iter(listed.values())) if all(name in others for others in listed.values())]


def differing(choice: catalogue.Choice) -> Iterator[tuple[str, ...]]:
    """Yield the initial weights of submitted systems and the differences from the submissions, by round."""
    for key, checkpoints in choice.benchmark.weights.items():
        for checkpoint in checkpoints:
            digests = [
                f" ({name.upper()} {' or '.join(d)}: {checkpoint.published})"
                for name, d in checkpoint.checksums.items()
            ]
            submitted = f"{checkpoint.title}, from {checkpoint.source}{''.join(digests)}"
            rounds = ", ".join(checkpoint.rounds or choice.benchmark.rounds)
            yield rounds, "weights", submitted, f"the same, by the key `{key}`; required"
    rows: dict[tuple[str, ...], dict[str, None]] = {}
    for system in catalogue.systems(choice):
        for part in images.differences(choice, system):
            rows.setdefault((part.what, part.submitted, part.here), {})[system.round] = None
    for parts, rounds_of in sorted(rows.items(), key=lambda item: item[0][0]):
        yield ", ".join(rounds_of), *parts


def cell(value: Any) -> Any:
    # Escape bars in table cells; strings marked as safe are not cells.
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
        "fields": dataclasses.fields, "dumps": json.dumps, "submitted_results": submitted_results,
        "epochs": epochs, "last_run": last_run, "state": state, "predicted": predicted,
        "in_all": in_all, "differing": differing,
    },
)  # fmt: skip


def table(marker: str) -> str:
    name, *benchmark = marker.split()
    macros = vars(TABLES.module)
    if name.replace("-", "_") not in macros:
        raise unknown_name("generated table", name, [macro for macro in macros if not macro.startswith("_")])
    return str(macros[name.replace("-", "_")](*benchmark))


def renewed(text: str, path: Path) -> str:
    """Return ``text`` with all generated tables updated. EncoreError if a marker is not closed."""

    def replace(match: re.Match[str]) -> str:
        if match[4] != "<!-- end -->":
            raise EncoreError(
                f"{path}: a generated table does not have an <!-- end -->", hint="add the line <!-- end --> below it"
            )
        return f"{match[1]}\n{table(match[2])}\n"

    return MARKER.sub(replace, text)


def pages(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("benchmarks/*/README.md")])


def stale(root: Path) -> dict[Path, str]:
    contents = {path: renewed(path.read_text(encoding="utf-8"), path) for path in pages(root)}
    contents.update({**building.dockerfiles(), **schemas.files()})
    return {path: text for path, text in contents.items() if not path.exists() or text != path.read_text("utf-8")}


def main(
    write: Annotated[bool, typer.Option("--write/--check", help="Write stale files, or exit with 1 if there are any.")],
) -> None:
    try:
        outdated = stale(paths.ROOT)
    except EncoreError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    for path, text in outdated.items():
        if write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        typer.echo(f"{path.relative_to(paths.ROOT)}: {'written' if write else 'stale: run make docs'}")
    if outdated and not write:
        raise typer.Exit(ExitCode.FAILED)


if __name__ == "__main__":
    typer.run(main)
