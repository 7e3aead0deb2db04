"""Tables in the documentation and Dockerfiles, written from the TOML and CSV files that they show.

    $ python -m encore.cli.documentation --write     # `make docs`
    $ python -m encore.cli.documentation --check     # exit code 1 names each stale file

A table is between the lines ``<!-- generated: NAME BENCHMARK -->`` and ``<!-- end -->`` of a Markdown
file; TABLES lists the names. What is between the two lines is replaced, nothing else is touched. Dockerfiles are
written whole.
"""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from encore import catalogue, configuration, names, paths
from encore.containers import dockerfiles, images, support
from encore.errors import EncoreError, ExitCode
from encore.results import rates
from encore.results.audit.oddities import Rule
from encore.results.audit.rules import RULES
from encore.results.published import calibration, published
from encore.run import published_speed

MARKER = re.compile(r"(<!-- generated: ([\w -]+) -->\n)(.*?)(?=(<!-- (?:end|generated:[^>]*) -->)|\Z)", re.DOTALL)
NO_VALUE = "–"
Rows = Iterable[Sequence[str]]

TABLES: dict[str, Callable[..., str]] = {}  # The tables by their names; those of a benchmark take it


def markdown(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def of_text(name: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    def register(function: Callable[..., str]) -> Callable[..., str]:
        TABLES[name] = function
        return function

    return register


def of_rows(name: str, *head: str) -> Callable[[Callable[..., Rows]], Callable[..., str]]:
    return lambda rows: of_text(name)(lambda *benchmark: markdown(head, rows(*benchmark)))


@of_rows("benchmarks", "name", "task", "framework", "data set", "target")
def benchmarks_rows() -> Rows:
    for name, choice in catalogue.choices().items():
        benchmark = choice.benchmark
        targets = "; ".join(
            f"{quality.title}: " + ", ".join(f"{entry.targets[key]:g} ({r})" for r, entry in benchmark.rounds.items())
            for key, quality in benchmark.qualities.items()
        )
        page = f"[{benchmark.title}](benchmarks/{paths.benchmark_folder(benchmark.name).name}/README.md)"
        yield f"`{name}`", page, choice.implementation.framework, benchmark.data_set, targets


@of_text("targets")
def targets_table(benchmark: str) -> str:
    known = catalogue.choose(benchmark).benchmark
    head = ["round", *(f"target, {each.title}" for each in known.qualities.values()), "runs of a score"]
    rounds = known.rounds.items()
    return markdown(
        head, [[name, *(f"{each.targets[q]:g}" for q in known.qualities), str(each.runs)] for name, each in rounds]
    )


@of_rows(
    "systems", "round", "system", "kind", "nodes x GPUs", "GPU", "batch per GPU", "global batch", "optimizer",
    "learning rate", "warm-up", "epochs",
)  # fmt: skip
def systems_rows(benchmark: str) -> Rows:
    choice = catalogue.choose(benchmark)
    return [_system_row(choice, system) for system in catalogue.systems(choice)]


def _system_row(choice: catalogue.Choice, system: catalogue.System) -> Sequence[str]:
    resolved = configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])
    gpu = system.accelerator or ("any" if resolved.get("device") == "gpu" else "none")
    on_gpus = bool(system.accelerator)
    return (
        system.round,
        f"`{system.system}`",
        system.kind,
        f"{system.nodes} x {system.gpus_per_node}" if on_gpus else "any number of ranks",
        gpu,
        str(resolved.get("batch_size")) if on_gpus else NO_VALUE,
        str(resolved.global_batch),
        resolved.get("optimizer"),
        f"{resolved.get('learning_rate'):g}",
        f"{resolved.get('warmup_epochs'):g}" if "warmup_epochs" in resolved.values else NO_VALUE,
        str(resolved.get("epochs")),
    )


@of_rows("published", "round", "system", "submitted as", "minutes", "fastest to slowest", "converged", "epochs")
def published_rows(benchmark: str) -> Rows:
    choice = catalogue.choose(benchmark)
    results = [result for result in published.load_published() if result.benchmark == choice.benchmark.name]
    found = {(result.round, result.system): result for result in results}
    for system in catalogue.systems(choice):
        if system.kind != "submitted":
            continue
        result = found.get((system.round, system.submission))
        first = system.round, f"`{system.system}`"
        if result is None:
            yield *first, "result not at hand", *[NO_VALUE] * 4
            continue
        minutes = [
            NO_VALUE if value is None else f"{value:.3f}"
            for value in (result.score_minutes, result.fastest_minutes, result.slowest_minutes)
        ]
        converged = NO_VALUE if result.converged is None else f"{result.converged} of {result.runs}"
        # DLRM evaluates within an epoch, and its logs give all sixteen digits.
        shown = [f"{float(epoch):.5g}" for epoch in result.last_eval_epochs.split("-") if epoch]
        epochs = " to ".join(dict.fromkeys(shown)) or NO_VALUE
        yield *first, f"`{result.name}`", minutes[0], f"{minutes[1]} to {minutes[2]}", converged, epochs


@of_rows("keys", "key", "default", "meaning")
def keys_rows(benchmark: str) -> Rows:
    folder = catalogue.choose(benchmark).folder
    meanings = configuration.fields_with_meaning(folder)
    for each in dataclasses.fields(configuration.config_class(folder)):
        yield f"`{each.name}`", f"`{json.dumps(each.default)}`", meanings[each.name]


@of_rows("images", "round", "benchmark", "submitted on", "built on today", "why")
def images_rows() -> Rows:
    for entry in images.catalogue().submitted:
        submitted = images.find_release(entry.framework, entry.release)
        today = images.find_release(entry.framework)
        link = f"[`{submitted.reference}`]({entry.source})"
        yield entry.round, entry.benchmark, link, f"`{today.reference}`", entry.why


@of_text("support")
def support_table() -> str:
    found = support.tried()
    return "\n".join(_support_of(name, found) for name in images.catalogue().default)


def _support_of(framework: str, found: Sequence[support.Tried]) -> str:
    releases = [each for each in images.catalogue().release if each.framework == framework]
    head = [catalogue.framework(framework).title, "needs", "its image on the CPU base", "a Python on a GPU"]
    rows = []
    for name, choice in catalogue.choices().items():
        if choice.implementation.framework != framework:
            continue
        ran = [each for each in found if each.implementation == name and not each.problem]
        needs = ", ".join(
            f"{support.title(each)} {least}" for each, least in support.needs(choice.implementation).items()
        )
        dates = [
            max((each.date for each in ran if each.where == where), default="never run")
            for where in ("stand-in", "gpu")
        ]
        rows.append([f"`{name}`", needs, *dates, *(_state(release, choice) for release in releases)])
    return markdown([*head, *(each.tag for each in releases)], rows)


def _state(release: images.Release, choice: catalogue.Choice) -> str:
    found = support.too_old(release, choice)
    if found is None:
        return "never run"
    old = [f"{support.title(name)} {each}" for name, each in found[1].items()] if found[0] == release else []
    return f"too old: {', '.join(old)}" if old else "too old"


@of_rows("tried", "implementation", "with", "on", "date", "result", "note")
def tried_rows() -> Rows:
    places = {"cpu": "a CPU", "stand-in": "its image on the CPU base, a CPU", "gpu": "a GPU"}
    for each in support.tried():
        versions = ", ".join(f"{support.title(name)} {text}" for name, text in each.versions.items())
        result = each.problem or "trained"
        yield f"`{each.implementation}`", versions, places[each.where], each.date, result, each.note


@of_text("calibration")
def calibration_table() -> str:
    return markdown(*calibration.calibration_table())


@of_text("convergence-calibration")
def shift_table() -> str:
    return markdown(*calibration.shift_table())


@of_text("predictions")
def predictions_table(benchmark: str) -> str:
    """Return the cost model's predictions next to the published results, whose benchmarks Encore need not implement."""
    # scipy, which only this table needs, takes half a second to load.
    from encore.lab.scaling.validation import error_table

    table = error_table(benchmark)
    return f"{table.as_markdown()}\n\n{table.note}\n"


@of_rows("audit", "rule", "finds", "severity", "public sets", "logs", "among them")
def audit_rows() -> Rows:
    return [_audit_row(rule) for rule in RULES]


def _audit_row(rule: Rule) -> Sequence[str]:
    entry, every = rates.measured("audit")["rules"].get(rule.name), rates.measured("audit")
    first = f"`{rule.name}`", rule.meaning, rates.severity_at(rates.rate_of("audit", rule.name), rule.severity)
    if entry is None:
        return *first, *["not measured"] * 3
    counts = [f"{entry[key]} of {every[key]} ({entry[key] / every[key]:.2%})" for key in ("sets", "logs")]
    # The folder of the results is in every path.
    examples = [name.removeprefix("training_results_").replace("/results/", "/") for name in entry["examples"]]
    return *first, *counts, "<br>".join(examples) or NO_VALUE


@of_text("own-rules")
def own_rules_table() -> str:
    every = rates.measured("check")
    rows = []
    for code, entry in every["rules"].items():
        rate = entry["sets"] / every["sets"]
        severity = "warning" if rate > rates.MOST_OF_AN_ERROR else "as it is"
        rows.append([f"`{code}`", f"{entry['sets']} ({rate:.2%})", str(entry["logs"]), severity])
    return markdown(["rule", f"sets of {every['sets']}", f"logs of {every['logs']}", "severity"], rows)


@of_rows("check-verdicts", "round", "logs", "the checker passes", "`encore check` passes", "what differs")
def verdicts_rows() -> Rows:
    for name, entry in rates.measured("check")["rounds"].items():
        differ = ", ".join(f"{count} x `{code}`" for code, count in entry["differ"].items())
        yield name, *(str(entry[key]) for key in ("logs", "official", "ours")), differ or NO_VALUE


@of_rows("fakes", "fake", "sets", "found", "found without the look-up")
def fakes_rows() -> Rows:
    fakes = rates.measured("audit")["fakes"]
    for what, count in fakes["of"].items():
        yield what, str(count), *(f"{fakes[column][what] / count:.1%}" for column in ("found", "alone"))


@cache
def checks() -> dict[str, list[str]]:
    """Return the checks that the self-test makes of each implementation on a GPU, as its own program lists them."""
    small = {}
    for choice in catalogue.choices().values():
        system = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
        small[choice.implementation.module] = configuration.resolve(choice, system, 1, 1, []).plain()
    command = [sys.executable, "-m", "benchmarks.common.checks.selftest"]
    listed = json.loads(subprocess.check_output(command, input=json.dumps(small), text=True, cwd=paths.ROOT))
    return {name: listed[choice.implementation.module] for name, choice in catalogue.choices().items()}


@of_rows("checks", "implementation", "checks")
def checks_rows() -> Rows:
    every = checks()
    shared = [name for name in next(iter(every.values())) if all(name in each for each in every.values())]
    yield "each", ", ".join(f"`{name}`" for name in shared)
    for name, listed in every.items():
        yield f"`{name}`", ", ".join(f"`{check}`" for check in listed if check not in shared)


@of_rows("measured", "benchmark", "framework", "GPU", "loop", "samples/s", "conditions", "by", "date")
def measured_rows() -> Rows:
    for name in catalogue.benchmarks():
        for each in published_speed.measured(name).figures:
            speed = f"{each.samples_per_second:,.0f}"
            yield name, each.framework, each.gpu, each.loop, speed, each.conditions, each.source, each.date


@of_text("results")
def results_table(benchmark: str) -> str:
    found = published_speed.measured(catalogue.choose(benchmark).benchmark.name)
    devices = "".join(f"- `{name}`: {text}\n" for name, text in found.devices.items())
    rows = [[each.what, each.value, f"`{each.device}`", each.date, _code(each.command)] for each in found.results]
    return f"{devices}\n" + markdown(["what", "value", "device", "date", "command"], rows)


def _code(command: str) -> str:
    return f"`{command}`" if command.startswith(("encore ", "./", "python ", "tests/")) else command


@of_rows("differences", "round", "what", "submitted", "here")
def differences_rows(benchmark: str) -> Rows:
    """Yield the weights that submitted systems begin with, and what differs from the submission, by round."""
    choice = catalogue.choose(benchmark)
    for key, known in choice.benchmark.weights.items():
        for each in known:
            digests = [f" ({name.upper()} {' or '.join(d)}: {each.published})" for name, d in each.checksums.items()]
            rounds = ", ".join(each.rounds or choice.benchmark.rounds)
            submitted = f"{each.title}, from {each.source}{''.join(digests)}"
            yield rounds, "weights", submitted, f"the same, by the key `{key}`; refused without"
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for system in catalogue.systems(choice):
        for part in images.differences(choice, system):
            found.setdefault((part.what, part.submitted, part.here), {})[system.round] = None
    for parts, rounds_of in sorted(found.items(), key=lambda item: item[0][0]):
        yield ", ".join(rounds_of), *parts


def table(marker: str) -> str:
    name, *benchmark = marker.split()
    if name not in TABLES:
        raise names.unknown("generated table", name, TABLES)
    return TABLES[name](*benchmark)


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
    wanted.update(dockerfiles.every())
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
