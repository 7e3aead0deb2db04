"""Tables in the documentation and Dockerfiles, written from the TOML and CSV files that they show.

    $ python -m encore.cli.documentation --write     # `make docs`
    $ python -m encore.cli.documentation --check     # exit code 1 names each stale file

A table is between the lines ``<!-- generated: NAME BENCHMARK -->`` and ``<!-- end -->`` of a Markdown
file; TABLES lists the names. What is between the two lines is replaced, nothing else is touched. Dockerfiles are
written whole.
"""

from __future__ import annotations

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
from encore.catalogue import Choice, System
from encore.containers import dockerfiles, images, support
from encore.errors import EncoreError, ExitCode
from encore.results.audit import rates
from encore.results.audit.oddities import Rule
from encore.results.audit.rules import RULES
from encore.results.compliance import rates as check_rates
from encore.results.published import calibration
from encore.results.published.published import PublishedResult, load_published
from encore.run import published_speed

START = re.compile(r"<!-- generated: (?P<name>[\w -]+) -->")
END = "<!-- end -->"
NO_VALUE = "–"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a bar inside a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def benchmarks_table() -> str:
    """Return every benchmark and implementation with its task."""
    rows = []
    for name, choice in catalogue.choices().items():
        benchmark = choice.benchmark
        targets = "; ".join(
            f"{quality.title}: " + ", ".join(f"{entry.targets[key]:g} ({r})" for r, entry in benchmark.rounds.items())
            for key, quality in benchmark.qualities.items()
        )
        page = f"[{benchmark.title}](benchmarks/{paths.benchmark_folder(benchmark.name).name}/README.md)"
        framework = choice.implementation.framework
        rows.append([f"`{name}`", page, framework, benchmark.data_set, targets])
    return markdown(["name", "task", "framework", "data set", "target"], rows)


def targets_table(choice: Choice) -> str:
    """Return the quality target and runs of a score, per round."""
    qualities, rounds = choice.benchmark.qualities, choice.benchmark.rounds.items()
    head = ["round", *(f"target, {each.title}" for each in qualities.values()), "runs of a score"]
    rows = [[name, *(f"{each.targets[q]:g}" for q in qualities), str(each.runs)] for name, each in rounds]
    return markdown(head, rows)


def systems_table(choice: Choice) -> str:
    """Return every system of an implementation with the values that distinguish it."""
    head = ["round", "system", "kind", "nodes x GPUs", "GPU", "batch per GPU", "global batch", "optimizer"]
    head += ["learning rate", "warm-up", "epochs"]
    return markdown(head, [_system_row(choice, system) for system in catalogue.systems(choice)])


def _system_row(choice: Choice, system: System) -> list[str]:
    resolved = configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])
    scale = f"{system.nodes} x {system.gpus_per_node}" if system.accelerator else "any number of ranks"
    values = ["batch_size", "optimizer", "learning_rate", "epochs"]
    batch, optimizer, rate, epochs = (resolved.get(name) for name in values)
    warmup = f"{resolved.get('warmup_epochs'):g}" if "warmup_epochs" in resolved.values else NO_VALUE
    gpu = system.accelerator or ("any" if resolved.get("device") == "gpu" else "none")
    row = [system.round, f"`{system.system}`", system.kind, scale, gpu]
    row += [str(batch) if system.accelerator else NO_VALUE, str(resolved.global_batch), optimizer]
    return [*row, f"{rate:g}", warmup, str(epochs)]


def published_table(choice: Choice) -> str:
    """Return the submitted result of each system that has one."""
    head = ["round", "system", "submitted as", "minutes", "fastest to slowest", "converged", "epochs"]
    found = {
        (result.round, result.system): result
        for result in load_published()
        if result.benchmark == choice.benchmark.name
    }
    submitted = [system for system in catalogue.systems(choice) if system.kind == "submitted"]
    return markdown(head, [_published_row(each, found.get((each.round, each.submission))) for each in submitted])


def _published_row(system: System, result: PublishedResult | None) -> list[str]:
    first = [system.round, f"`{system.system}`"]
    if result is None:
        return [*first, "result not at hand", *[NO_VALUE] * 4]
    span = f"{_minutes(result.fastest_minutes)} to {_minutes(result.slowest_minutes)}"
    converged = NO_VALUE if result.converged is None else f"{result.converged} of {result.runs}"
    # DLRM evaluates within an epoch, and its logs give all sixteen digits.
    shown = [f"{float(epoch):.5g}" for epoch in result.last_eval_epochs.split("-") if epoch]
    epochs = " to ".join(dict.fromkeys(shown)) or NO_VALUE
    return [*first, f"`{result.name}`", _minutes(result.score_minutes), span, converged, epochs]


def _minutes(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.3f}"


def keys_table(choice: Choice) -> str:
    """Return every configuration key with its default and its meaning."""
    fields = dataclasses.fields(configuration.config_class(choice.folder))
    meanings = configuration.fields_with_meaning(choice.folder)
    rows = [[f"`{each.name}`", f"`{json.dumps(each.default)}`", meanings[each.name]] for each in fields]
    return markdown(["key", "default", "meaning"], rows)


def images_table() -> str:
    """Return each round's submitted base next to today's."""
    head = ["round", "benchmark", "submitted on", "built on today", "why"]
    rows = []
    for entry in images.catalogue().submitted:
        submitted = images.find_release(entry.framework, entry.release)
        today = images.find_release(entry.framework)
        link = f"[`{submitted.reference}`]({entry.source})"
        rows.append([entry.round, entry.benchmark, link, f"`{today.reference}`", entry.why])
    return markdown(head, rows)


def support_table() -> str:
    """Return for each framework what of an implementation was run in which image."""
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


def _state(release: images.Release, choice: Choice) -> str:
    found = support.too_old(release, choice)
    if found is None:
        return "never run"
    old = [f"{support.title(name)} {each}" for name, each in found[1].items()] if found[0] == release else []
    return f"too old: {', '.join(old)}" if old else "too old"


def tried_table() -> str:
    """Return every training that was tried with other versions, or elsewhere, than the tests have."""
    places = {"cpu": "a CPU", "stand-in": "its image on the CPU base, a CPU", "gpu": "a GPU"}
    rows = []
    for each in support.tried():
        versions = ", ".join(f"{support.title(name)} {text}" for name, text in each.versions.items())
        rows.append(
            [f"`{each.implementation}`", versions, places[each.where], each.date, each.problem or "trained", each.note]
        )
    return markdown(["implementation", "with", "on", "date", "result", "note"], rows)


def calibration_table() -> str:
    """Return how often verdicts were right where it is known how far apart two sets are."""
    return markdown(calibration.calibration_head(), calibration.calibration_rows())


def shift_table() -> str:
    """Return the same for sets of which one needs more epochs."""
    return markdown(calibration.shift_head(), calibration.shift_rows())


def predictions_table(benchmark: str) -> str:
    """Return the cost model's predictions next to the published results of a benchmark."""
    # scipy, which only this table needs, takes half a second to load.
    from encore.lab.scaling.validation import error_table

    table = error_table(benchmark)
    return f"{table.as_markdown()}\n\n{table.note}\n"


def audit_table() -> str:
    """Return every rule of the audit with how often it fires on the public sets."""
    head = ["rule", "finds", "severity", "public sets", "logs", "among them"]
    return markdown(head, [_audit_row(rule) for rule in RULES])


def _audit_row(rule: Rule) -> list[str]:
    entry, every = rates.measured()["rules"].get(rule.name), rates.measured()
    if entry is None:
        return [f"`{rule.name}`", rule.meaning, rates.severity_of(rule), *["not measured"] * 3]
    counts = [f"{entry[key]} of {every[key]} ({entry[key] / every[key]:.2%})" for key in ("sets", "logs")]
    # The folder of the results is in every path.
    examples = [name.removeprefix("training_results_").replace("/results/", "/") for name in entry["examples"]]
    return [f"`{rule.name}`", rule.meaning, rates.severity_of(rule), *counts, "<br>".join(examples) or NO_VALUE]


def own_rules_table() -> str:
    """Return the rules of our own that fire on public logs which the official checker passes."""
    every = check_rates.measured()
    rows = []
    for code, entry in every["rules"].items():
        rate = entry["sets"] / every["sets"]
        severity = "warning" if rate > check_rates.MOST_OF_AN_ERROR else "as it is"
        rows.append([f"`{code}`", f"{entry['sets']} ({rate:.2%})", str(entry["logs"]), severity])
    return markdown(["rule", f"sets of {every['sets']}", f"logs of {every['logs']}", "severity"], rows)


def verdicts_table() -> str:
    """Return how many public logs of each round the official checker and `encore check` pass."""
    rows = [
        [
            name,
            *(str(entry[key]) for key in ("logs", "official", "ours")),
            ", ".join(f"{count} x `{code}`" for code, count in entry["differ"].items()) or NO_VALUE,
        ]
        for name, entry in check_rates.measured()["rounds"].items()
    ]
    return markdown(["round", "logs", "the checker passes", "`encore check` passes", "what differs"], rows)


def fakes_table() -> str:
    """Return how many fakes of the public sets the audit finds."""
    fakes = rates.measured()["fakes"]
    rows = [
        [what, str(count), *(f"{fakes[column][what] / count:.1%}" for column in ("found", "alone"))]
        for what, count in fakes["of"].items()
    ]
    return markdown(["fake", "sets", "found", "found without the look-up"], rows)


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


def checks_table() -> str:
    """Return which checks every implementation has, and which one has in addition."""
    every = checks()
    shared = [name for name in next(iter(every.values())) if all(name in each for each in every.values())]
    rows = [["each", ", ".join(f"`{name}`" for name in shared)]]
    for name, listed in every.items():
        rows.append([f"`{name}`", ", ".join(f"`{check}`" for check in listed if check not in shared)])
    return markdown(["implementation", "checks"], rows)


def measured_table() -> str:
    """Return the speeds that this project measured, with which the self-test compares."""
    rows = [
        [name, each.framework, each.gpu, each.loop, f"{each.samples_per_second:,.0f}", each.conditions, each.source,
         each.date]
        for name in catalogue.benchmarks()
        for each in published_speed.measured(name)
    ]  # fmt: skip
    return markdown(["benchmark", "framework", "GPU", "loop", "samples/s", "conditions", "by", "date"], rows)


def differences_table(choice: Choice) -> str:
    """Return the weights that submitted systems begin with, and what of them is not as submitted, by round."""
    rows = []
    for key, known in choice.benchmark.weights.items():
        for each in known:
            digests = [f" ({name.upper()} {' or '.join(d)}: {each.published})" for name, d in each.checksums.items()]
            here = f"the same, by the key `{key}`; refused without"
            rounds = ", ".join(each.rounds or choice.benchmark.rounds)
            rows.append([rounds, "weights", f"{each.title}, from {each.source}{''.join(digests)}", here])
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for system in catalogue.systems(choice):
        for part in images.differences(choice, system):
            found.setdefault((part.what, part.submitted, part.here), {})[system.round] = None
    rows += [[", ".join(names), *parts] for parts, names in sorted(found.items(), key=lambda item: item[0][0])]
    return markdown(["round", "what", "submitted", "here"], rows)


TABLES: dict[str, Callable[[Choice], str]] = {
    "differences": differences_table,
    "targets": targets_table,
    "systems": systems_table,
    "published": published_table,
    "keys": keys_table,
}
"""Tables of one benchmark."""

GENERAL: dict[str, Callable[[], str]] = {
    "benchmarks": benchmarks_table,
    "images": images_table,
    "support": support_table,
    "tried": tried_table,
    "calibration": calibration_table,
    "convergence-calibration": shift_table,
    "audit": audit_table,
    "fakes": fakes_table,
    "own-rules": own_rules_table,
    "check-verdicts": verdicts_table,
    "checks": checks_table,
    "measured": measured_table,
}
"""Tables of everything."""

OF_RESULTS: dict[str, Callable[[str], str]] = {"predictions": predictions_table}
"""Tables of a benchmark of the published results, which Encore need not implement."""


def table(marker: str) -> str:
    """Return the table that a marker names: a name of GENERAL, or another with a benchmark."""
    name, _, benchmark = marker.partition(" ")
    if name in GENERAL:
        return GENERAL[name]()
    if name in OF_RESULTS:
        return OF_RESULTS[name](benchmark)
    if name not in TABLES:
        raise names.unknown("generated table", name, [*GENERAL, *OF_RESULTS, *TABLES])
    return TABLES[name](catalogue.choose(benchmark))


def renewed(text: str, path: Path) -> str:
    """Return ``text`` with every generated table as it should be; EncoreError for a marker without its end."""
    lines: list[str] = []
    replacing = False
    for line in text.splitlines(keepends=True):
        if line.strip() == END:
            replacing = False
        marker = START.fullmatch(line.strip())
        if marker and replacing:
            raise _endless(path)
        if not replacing:
            lines.append(line)
        if marker:
            replacing = True
            lines += ["\n", table(marker["name"]), "\n"]
    if replacing:
        raise _endless(path)
    return "".join(lines)


def _endless(path: Path) -> EncoreError:
    return EncoreError(f"{path}: a generated table has no {END}", remedy=f"add the line {END} below it")


def pages(root: Path) -> list[Path]:
    """Return the Markdown files of the documentation."""
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("benchmarks/*/README.md")]
    return sorted(found)


def stale(root: Path) -> dict[Path, str]:
    """Return pages with tables, and Dockerfiles, that are stale, with the text that they should have."""
    wanted = {path: renewed(path.read_text(encoding="utf-8"), path) for path in pages(root)}
    wanted.update(dockerfiles.every())
    return {path: text for path, text in wanted.items() if not path.exists() or text != path.read_text("utf-8")}


def main(
    write: Annotated[bool, typer.Option("--write", help="Write what is stale anew.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if anything is stale.")] = False,
) -> None:
    """Write the tables in the documentation and the Dockerfiles, or check them."""
    if write == check:
        raise typer.BadParameter("--write or --check, one of the two")
    try:
        found = stale(paths.ROOT)
    except EncoreError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    for path, text in found.items():
        if write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        typer.echo(f"{path.relative_to(paths.ROOT)}: {'written' if write else 'stale; do this: make docs'}")
    if found and check:
        raise typer.Exit(ExitCode.FAILED)


if __name__ == "__main__":
    typer.run(main)
